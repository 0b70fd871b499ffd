"""Tiny real models, built from their configs: nothing is downloaded."""

import argparse
import copy
import doctest
import functools
import gc
import inspect
import json
import os
import signal
import tarfile
import tempfile
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the workers share the cores; torch reads it when it is imported
if "PYTEST_XDIST_WORKER" not in os.environ:  # the workers inherit it
    # Libraries read these when they are imported. The folder is removed when the process ends.
    _home = tempfile.TemporaryDirectory(prefix="home-of-tests-", ignore_cleanup_errors=True)
    os.environ["HOME"] = _home.name
    for _name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "SPECULATOR_CACHE", "HF_HOME", "MPLCONFIGDIR"):
        os.environ.pop(_name, None)

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    FalconH1Config,
    FalconMambaConfig,
    Gemma2Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeHybridConfig,
    JambaConfig,
    KimiLinearConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    LlamaConfig,
    Mamba2Config,
    MambaConfig,
    MistralConfig,
    MixtralConfig,
    NemotronHConfig,
    Olmo2Config,
    OlmoHybridConfig,
    Phi3Config,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    Zamba2Config,
)
from transformers.cache_utils import Cache

from speculator.about import processor
from speculator.checkpoints.loading import bind
from speculator.decoding.draft import Draft
from speculator.decoding.drafter import Memory
from speculator.decoding.sampling import RowSampling
from speculator.drafters import Chain, Drafter, FixedTree, HeadDrafter
from speculator.drafters.adaptive import AdaptiveDrafter
from speculator.drafters.ngram import NgramDrafter
from speculator.drafters.price import Choice
from speculator.drafters.tuning import TUNED
from speculator.heads import (
    ARCHITECTURES,
    DSparkSpeculator,
    DSparkSpeculatorConfig,
    MTPSpeculator,
    MTPSpeculatorConfig,
    Speculator,
)
from speculator.target.model import Target
from speculator.terminal import _Heartbeat

_CLASSES = ((argparse, "ArgumentParser"), (tarfile, "TarFile"), (doctest, "DocTestParser"), (inspect, "Signature"))
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts `pytest &` with SIGINT ignored; processes that the tests interrupt must receive it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(1)  # the models are tiny: a second thread only waits
if "PYTEST_XDIST_WORKER" in os.environ and hasattr(os, "sched_setaffinity"):
    # Give each worker its own cores: subprocesses of one worker would otherwise slow down the others.
    _worker, _workers = int(os.environ["PYTEST_XDIST_WORKER"][2:]), int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    _cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, _cores[_worker::_workers] or _cores)


def pytest_collection_finish() -> None:
    """Keep garbage collections, which every trainer makes, from searching all imported modules: a second each."""
    gc.collect()
    gc.freeze()


SETTINGS: dict[str, Any] = {
    "data.seq_length": 64,
    "data.max_tokens": 20_000,
    "speculator.n_predict": 3,
    "loss.head_decay": 0.5,
    "stage1.max_steps": 16,
    "stage1.per_device_train_batch_size": 4,
    "stage1.warmup_steps": 2,
    "stage1.logging_steps": 5,
    "stage1.eval_steps": 4,
    "stage1.save_steps": 4,
    "stage1.save_total_limit": 4,
    "stage2.max_steps": 0,
    "eval.validation_rows": 8,
    "eval.validation_prompts": 1,
    "eval.tune_prompts": 0,
    "eval.prompt_tokens": 16,
    "eval.max_prompts": 1,
    "eval.max_new_tokens": 8,
    "report_to": "none",
}
VOCAB = 32
_SHAPE = dict(  # noqa: C408
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
)
_HEADS_OF_8 = dict(head_dim=8)  # noqa: C408
_EXPERTS = dict(num_experts_per_tok=2)  # noqa: C408
# The last two layers read the keys and values of those before them.
_SHARED = dict(  # noqa: C408
    num_hidden_layers=4,
    num_kv_shared_layers=2,
    layer_types=["sliding_attention", "full_attention"] * 2,
    sliding_window=6,
    hidden_size_per_layer_input=8,
    vocab_size_per_layer_input=VOCAB,
)
CONFIGS = {
    "llama": LlamaConfig(**_SHAPE),
    "qwen2": Qwen2Config(**_SHAPE),
    "qwen3": Qwen3Config(**_SHAPE, **_HEADS_OF_8),
    "mistral": MistralConfig(**_SHAPE, sliding_window=6),
    "gemma2": Gemma2Config(
        **_SHAPE, **_HEADS_OF_8, sliding_window=6, attn_logit_softcapping=5.0, final_logit_softcapping=10.0
    ),
    "gemma3": Gemma3TextConfig(**_SHAPE, **_HEADS_OF_8, sliding_window=6),
    "gemma3n": Gemma3nTextConfig(
        **_SHAPE | _HEADS_OF_8 | _SHARED | {"intermediate_size": [64] * 4},
        laurel_rank=4,
        activation_sparsity_pattern=[0.0] * 4,
    ),
    "gemma4": Gemma4TextConfig(**_SHAPE | _HEADS_OF_8 | _SHARED, global_head_dim=16),
    "gpt2": GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=128, bos_token_id=None, eos_token_id=None
    ),
    "gpt_neox": GPTNeoXConfig(**{k: v for k, v in _SHAPE.items() if k != "num_key_value_heads"}),
    "phi3": Phi3Config(**_SHAPE, sliding_window=6),
    "granite": GraniteConfig(**_SHAPE, logits_scaling=4.0, attention_multiplier=0.5, residual_multiplier=0.8),
    "olmo2": Olmo2Config(**_SHAPE),
    "mixtral": MixtralConfig(**_SHAPE, **_EXPERTS, num_local_experts=4),
    "qwen3_moe": Qwen3MoeConfig(**_SHAPE, **_HEADS_OF_8, **_EXPERTS, num_experts=4, moe_intermediate_size=16),
    "gpt_oss": GptOssConfig(**_SHAPE, **_HEADS_OF_8, **_EXPERTS, num_local_experts=4, sliding_window=6),
}

_MIXED = dict(layer_types=["linear_attention", "full_attention"])  # noqa: C408
_DELTA = dict(
    **_MIXED, linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8
)
_SPARSE = dict(num_experts=4, moe_intermediate_size=16, shared_expert_intermediate_size=16)  # noqa: C408
_CONV = dict(layer_types=["conv", "full_attention"], conv_L_cache=3)  # noqa: C408
_SSM = dict(mamba_n_heads=8, mamba_d_head=8, mamba_d_state=8, mamba_n_groups=2, mamba_chunk_size=16)  # noqa: C408
_MLA = dict(  # noqa: C408
    num_key_value_heads=4, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8, n_group=1
)
_PURE = dict(  # noqa: C408
    vocab_size=VOCAB,
    hidden_size=32,
    num_hidden_layers=2,
    state_size=8,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
)
RECURRENT = {
    "qwen3_next": Qwen3NextConfig(**_SHAPE, **_HEADS_OF_8, **_DELTA, **_EXPERTS, **_SPARSE),
    "qwen3_5": Qwen3_5TextConfig(**_SHAPE, **_HEADS_OF_8, **_DELTA),
    "qwen3_5_moe": Qwen3_5MoeTextConfig(**_SHAPE, **_HEADS_OF_8, **_DELTA, **_EXPERTS, **_SPARSE),
    "olmo_hybrid": OlmoHybridConfig(**_SHAPE, **_DELTA),
    "kimi_linear": KimiLinearConfig(
        **_SHAPE | _EXPERTS | _MIXED | _MLA,
        linear_head_dim=8,
        linear_num_heads=4,
        num_experts=4,
        moe_intermediate_size=16,
    ),
    "lfm2": Lfm2Config(**_SHAPE, **_CONV),
    "lfm2_moe": Lfm2MoeConfig(
        **_SHAPE, **_CONV, **_EXPERTS, num_experts=4, moe_intermediate_size=16, num_dense_layers=1
    ),
    "bamba": BambaConfig(**_SHAPE, **_SSM, attn_layer_indices=[1]),
    "granitemoehybrid": GraniteMoeHybridConfig(
        **_SHAPE,
        **_SSM,
        **_EXPERTS,
        layer_types=["mamba", "attention"],
        num_local_experts=4,
        shared_intermediate_size=32,
    ),
    "falcon_h1": FalconH1Config(**_SHAPE, **_HEADS_OF_8, **_SSM, mamba_d_ssm=64),
    "nemotron_h": NemotronHConfig(
        **_SHAPE | _HEADS_OF_8 | _EXPERTS | {"num_hidden_layers": 4},
        hybrid_override_pattern="M-*E",
        mamba_num_heads=8,
        mamba_head_dim=8,
        ssm_state_size=8,
        n_groups=2,
        chunk_size=16,
        n_routed_experts=4,
        moe_intermediate_size=16,
        moe_shared_expert_intermediate_size=16,
        n_group=1,
        topk_group=1,
    ),
    "zamba2": Zamba2Config(
        **_SHAPE | {"num_hidden_layers": 3, "num_key_value_heads": 4},
        layers_block_type=["mamba", "mamba", "hybrid"],
        mamba_d_state=8,
        n_mamba_heads=8,
        mamba_ngroups=2,
        chunk_size=16,
        num_mem_blocks=1,
    ),
    "jamba": JambaConfig(
        **_SHAPE, **_EXPERTS, num_experts=4, attn_layer_period=2, attn_layer_offset=1, mamba_d_state=8, mamba_dt_rank=8
    ),
    "mamba2": Mamba2Config(**_PURE, num_heads=8, head_dim=8, n_groups=2, chunk_size=16),
    "mamba": MambaConfig(**_PURE),
    "falcon_mamba": FalconMambaConfig(**_PURE),
}
"""Families with recurrent layers; the last three have no attention at all."""
RECURRENT_RUNS = pytest.mark.skipif(
    not hasattr(Cache, "get_conv_state"), reason="recurrent layers need transformers 5.23 or later"
)


def tiny_model(family: str = "llama", scale: float = 4.0):
    """Make a random model; weights are `scale` times the usual ones, so that distributions are far from uniform."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy((CONFIGS | RECURRENT)[family]))
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data *= scale
    return model.eval()


@pytest.fixture(autouse=True)
def no_work_outlives_a_test():
    """A bar that an error left behind would print its line among those of later work."""
    yield
    left, _Heartbeat.work[:] = [str(work) for work in _Heartbeat.work], []
    assert not left


@pytest.fixture
def target() -> Target:
    return Target(tiny_model(), tokenizer=None)


@pytest.fixture
def head() -> Speculator:
    return tiny_head()


def tiny_head(
    n_predict: int = 3, architecture: str = "mlp", draft_tokens: list[int] | None = None, vocab_size: int = VOCAB
) -> Speculator:
    torch.manual_seed(1)
    head_class = ARCHITECTURES[architecture]
    sizes = {"vocab_size": vocab_size, "emb_dim": 32, "inner_dim": 16, "n_predict": n_predict}
    if architecture == "eagle3":  # with an embedding of its own it needs no target
        sizes |= {"aux_layers": [0, 1], "own_embedding": True, "num_attention_heads": 4, "num_key_value_heads": 2}
        sizes |= {"head_dim": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}
    head = head_class(head_class.config_class(**sizes, draft_vocab_size=draft_tokens and len(draft_tokens)))
    if draft_tokens:
        head.draft_tokens.copy_(torch.tensor(draft_tokens))
    return head


def tiny_block_head(
    target: Target, n_predict: int = 3, draft_tokens: list[int] | None = None, **shape: Any
) -> Speculator:
    """Make a block drafter with random weights, as after training, that uses a target's matrices."""
    shape = {
        "num_hidden_layers": 2,
        "markov_rank": 8,
        "aux_layers": [0, 1],
        "mask_token_id": 0,
        "inner_dim": 16,
        **shape,
    }
    size = draft_tokens and len(draft_tokens)
    torch.manual_seed(1)
    config = DSparkSpeculatorConfig.for_target(target.config, n_predict=n_predict, draft_vocab_size=size, **shape)
    head = DSparkSpeculator(config)
    for weight in head.parameters():
        if weight.ndim == 2:
            torch.nn.init.normal_(weight, std=0.5)
    if draft_tokens:
        head.draft_tokens.copy_(torch.tensor(draft_tokens))
    return bind(head.to(target.device, target.dtype).eval(), target)


def tiny_mtp_head(target: Target, **shape: Any) -> Speculator:
    """Make an MTP layer of a target's own kind with random weights, as after training."""
    torch.manual_seed(1)
    head = MTPSpeculator(MTPSpeculatorConfig.for_target(target.config, **shape))
    for weight in head.parameters():
        if weight.ndim >= 2:
            torch.nn.init.normal_(weight, std=0.15)
    return bind(head.to(target.device, target.dtype).eval(), target)


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
"""A rope like that of Llama 3.1, for short texts."""

DFLASH = {"markov_rank": 0, "sample_from_anchor": False, "confidence_head": False}
"""What makes a block drafter a DFlash head."""

DFLASH2 = {**DFLASH, "conv_group_size": 4, "selector_rank": 6, "selector_top_k": 4}
"""What makes a block drafter a DFlash 2 head, in small."""


def write_tuning(folder: Path, n_predict: int = 3, **changes: Any) -> None:
    """Write a `decoding.json` as if measured here in float32, with the given keys replaced."""
    ranks = [[0.6, 0.1], [0.5, 0.1], *[[0.4, 0.1]] * (n_predict - 2)]
    costs = [
        {"rows": rows, "greedy": greedy, "head": 0.05, "path": 0.0, "level": 0.1, "token": 0.05 / rows}
        for rows in (1, 8)
        for greedy in (True, False)
    ]
    trees: dict[str, list] = {"greedy": [], "sampled": []}
    figures = {"acceptance": {"greedy": ranks, "sampled": ranks}, "trees": trees, "costs": costs}
    figures["lookup"] = dict.fromkeys(("greedy", "sampled"), (0.2, 0.4))
    here = {"processor": processor(), "dtype": "float32"}
    (folder / TUNED).write_text(json.dumps({"schema": 5, **here, **figures, **changes}))


class ScriptedLookup(NgramDrafter):
    """N-gram lookup that always finds `continuation(sequence)`."""

    def __init__(self, num_speculative_tokens: int, continuation):
        super().__init__(num_speculative_tokens)
        self.continuation = continuation

    def look(self, sequences):
        return [(1, list(self.continuation(list(row)))[: self.num_speculative_tokens]) for row in sequences]


class CostByLength:
    """Step costs by the length of the longest sequence, so that the fastest draft changes from step to step."""

    def __init__(self, cost):
        self.cost, self.longest = cost, 0

    def __call__(self, shape, tokens: int, path: bool, greedy: bool, rows: int) -> float:
        return self.cost(shape, tokens, self.longest)


class AlternatingDrafter(AdaptiveDrafter):
    """Adaptive drafting with a `CostByLength`."""

    cost: CostByLength

    def choose(self, requests):
        self.cost.longest = max(len(request.sequence) for request in requests)
        return super().choose(requests)


def alternating_drafter(head: Speculator, cost=None) -> AlternatingDrafter:
    """Make an adaptive drafter that alternates between trees, lookup and chains."""
    likely = {True: [0.6, 0.5, 0.4], False: [0.5, 0.4, 0.3]}
    shapes = [*(Chain(n) for n in range(1, head.n_predict + 1)), FixedTree([(0,), (1,), (0, 0)])]
    choices = [Choice(shape, {kind: each[: shape.depth] for kind, each in likely.items()}) for shape in shapes]

    def uneven(shape, tokens, longest):
        if shape is None:
            return (2.0, 0.5, 2.0)[longest % 3] if tokens else 1.0
        tree = shape.nodes > shape.depth
        return (0.5 if tree else 0.6, 9.0, 2.0 if tree else 1 + 0.3 * shape.nodes)[longest % 3]

    on_cpu = head.device.type == "cpu"
    lookup = dict.fromkeys(likely, (0.3, 0.4, 0.5))
    return AlternatingDrafter(head, choices, lookup, CostByLength(cost or uneven), packed=on_cpu)


def exit_code(main, argv: list[str]) -> int:
    """Exit code of a command; argparse exits by itself on a parse error."""
    try:
        return main(argv)
    except SystemExit as ended:
        return ended.code


class Arrivals(Memory):
    """The texts as they were when they arrived: their prompts."""

    def open(self, cache):
        opened = super().open(cache)
        opened.known = {}  # id of a text -> the text (kept, so that its id stays unique), its prompt
        return opened

    def prefill(self, start, texts, begins, hidden, counts):
        for text in texts:
            self.known.setdefault(id(text), (text, list(text)))


class Oracle(Drafter):
    """Drafts the given completions: every token right, or every token wrong. Several need their prompts."""

    name, num_speculative_tokens, nodes, rules, memory = "oracle", 3, 3, ("match",), Arrivals()

    def __init__(self, continuations: list[list[int]], wrong: bool = False, prompts: list[list[int]] | None = None):
        self.continuations, self.wrong, self.prompts = continuations, wrong, prompts

    def propose(self, pending, noise, texts):
        rows = []
        for text in texts:
            _, prompt = self.memory.known[id(text)]
            number, at = self.prompts.index(prompt) if self.prompts else 0, len(text) - len(prompt)
            rows.append((self.continuations[number] + [0] * 8)[at : at + 3])
        return Draft((torch.tensor(rows) + self.wrong) % VOCAB, torch.full_like(pending, 3))


class MisstatedHead(HeadDrafter):
    """A known-wrong head under `block`: samples from one distribution and reports another."""

    def propose(self, pending, noise, texts):
        colder = copy.copy(noise)
        rows = [replace(row, temperature=0.5 * row.temperature) for row in noise.sampling.rows]
        colder.sampling = RowSampling(rows, pending.device)
        draft = super().propose(pending, colder, texts)
        draft.probs = draft.probs.sqrt() / draft.probs.sqrt().sum(-1, keepdim=True)
        return draft


@functools.cache
def _tiny_bpe(vocab_size: int) -> str:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=["<eos>"], initial_alphabet=alphabet)
    bpe.train_from_iterator([inspect.getsource(textwrap)], trainer)
    return bpe.to_str()


def tiny_tokenizer(vocab_size: int = 300) -> PreTrainedTokenizerFast:
    """Byte-level BPE, trained on the text of a standard module."""
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(_tiny_bpe(vocab_size)), eos_token="<eos>")


@pytest.fixture
def quick(monkeypatch) -> None:
    """Whole reports of evaluation, whose intervals and costs are less precise."""
    monkeypatch.setattr("eval.intervals._RESAMPLES", 100)
    monkeypatch.setattr("eval.decoders._COST_STEPS", 8)
    monkeypatch.setattr("speculator.drafters.measure._ROUNDS", 1)


@pytest.fixture
def figures_only(quick, monkeypatch) -> None:
    """Reports of evaluation without plots and pages, which take most of a tiny evaluation's time."""
    monkeypatch.setattr("eval.run.render", lambda *_: None)
    monkeypatch.setattr("eval.run.trace_suite", lambda *_: [])


def shorten_validation(patch: pytest.MonkeyPatch) -> None:
    """Decode 16 tokens per validation prompt, not 64: most of a tiny stage's time."""
    from train import stages

    patch.setattr(stages, "real_acceptance", functools.partial(stages.real_acceptance, max_new_tokens=16))


def measured(target, head, suites, folder, *, temperatures=(0.0,), max_new_tokens=16, speculator_name="test", **other):
    """Evaluate a head and return the content of report.json; `other` are fields of `Measuring` and `Compared`."""
    from eval.run import Compared, Measuring, evaluate
    from speculator.report import as_json

    sizes = {name: other.pop(name) for name in ("sampled", "batch_sizes", "repeats") if name in other}
    measuring = Measuring(temperatures=temperatures, max_new_tokens=max_new_tokens, **sizes)
    made = evaluate(target, head, suites, folder, measuring, Compared(**other), speculator_name=speculator_name)
    return as_json(made)


def settled(config, target=None, place=None, checked=False):
    """Settle a run for a target, or for its config (default: an unknown one); tiny targets do not fit all settings."""
    from train.door import checks
    from train.door.gpus import Place
    from train.door.settle import Run

    with pytest.MonkeyPatch.context() as patch:
        for name in () if checked else ("settings", "fits_target"):
            patch.setattr(checks, name, lambda *_: None)
        return Run.of(config, getattr(target, "config", target), place or Place(1))


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory) -> Path:
    """Folder with a tiny Llama and its tokenizer."""
    return save_tiny("llama", tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def hybrid_folder(tmp_path_factory) -> Path:
    """Folder with a tiny Qwen 3.5, which has recurrent layers, and its tokenizer."""
    return save_tiny("qwen3_5", tmp_path_factory.mktemp("hybrid"))


def overflow_at(folder: Path, token: int) -> None:
    """Change a saved Llama so that a token's residual stream leaves the range of float16, and no other's does."""
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][token] = torch.finfo(torch.float16).max
    weights["model.layers.0.mlp.down_proj.weight"] *= 5e5
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def save_tiny(family: str, folder: Path) -> Path:
    """Save a random model of the tiny tokenizer's vocabulary."""
    config = copy.deepcopy((CONFIGS | RECURRENT)[family])
    config.vocab_size, config.eos_token_id = 300, 0
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def text_file(tmp_path_factory) -> Path:
    """File of real text: the functions of some standard modules, one per row."""
    file = tmp_path_factory.mktemp("text") / "functions.jsonl"
    modules = (argparse, inspect, textwrap, tarfile, doctest)
    members = [member for module in modules for member in vars(module).values() if inspect.getmodule(member) is module]
    sources = [inspect.getsource(member) for member in members if inspect.isfunction(member)]
    sources += [inspect.getsource(module.__dict__[name]) for module, name in _CLASSES]
    file.write_text("".join(json.dumps({"text": source}) + "\n" for source in sources))
    return file
