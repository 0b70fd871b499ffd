"""What costs time on a GPU, counted on a make-believe one: signatures of attention, host waits, captures."""

import copy
import random
from dataclasses import replace

import make_believe_gpu
import pytest
import torch
from allocations import Allocations
from conftest import CONFIGS, DFLASH2, RECURRENT, RECURRENT_RUNS, tiny_block_head, tiny_head, tiny_model, tiny_mtp_head
from make_believe_gpu import gpu
from replays import capturing, overwrite
from transformers import AutoModelForCausalLM

from speculator import Engine, HeadDrafter, NgramDrafter, Sampling, Target
from speculator.decoding import prefill, rows
from speculator.decoding.rows import Rows
from speculator.drafters import Chain, FixedTree
from speculator.drafters.adaptive import AdaptiveDrafter
from speculator.drafters.measure import packs_rows
from speculator.drafters.price import Choice
from speculator.heads.dspark import model as dspark
from speculator.heads.training import TrainingBatch
from speculator.kernels import cuda_graphs
from speculator.kernels.fused_norms import fuse_norms
from speculator.target import in_process
from speculator.target.attention import attention
from speculator.target.cache import kv_cache
from speculator.target.remote.server_target import ServerTarget
from train.losses import ChunkedLoss
from train.options.config import LossConfig
from train.states.batch import Collator

__all__ = ["gpu"]


def long_target(length: int = 4096) -> Target:
    """A Llama of one layer that reads long texts."""
    config = copy.deepcopy(CONFIGS["llama"])
    config.num_hidden_layers, config.max_position_embeddings = 1, length
    torch.manual_seed(0)
    return Target(AutoModelForCausalLM.from_config(config).to("cuda", torch.bfloat16), tokenizer=None)


def prompts(count: int) -> list[list[int]]:
    """Prompts with the lengths of chats: 400 tokens in the median, half of them between 200 and 800."""
    draw = random.Random(0)
    return [[draw.randrange(32) for _ in range(min(3000, int(draw.lognormvariate(6, 1))))] for _ in range(count)]


def serve(engine: Engine, count: int, new_tokens: int, samplings: list[Sampling], arrivals: int = 4) -> None:
    """Run requests that arrive while others decode."""
    waiting = list(enumerate(prompts(count)))
    while waiting or engine.busy:
        if len(engine.waiting) < 2 and waiting:
            for index, prompt in waiting[:arrivals]:
                engine.submit(prompt, samplings[index % len(samplings)], max_new_tokens=new_tokens, eos_token_ids=())
            del waiting[:arrivals]
        engine.step()


@pytest.mark.parametrize("where", ["here", "in a server"])
def test_attention_never_runs_on_cudnn(where, gpu):
    """It builds a plan for every signature. Heads attend with masks too, wherever their target is."""
    assert torch.backends.cuda.cudnn_sdp_enabled()
    if where == "here":
        long_target()
    else:
        model = tiny_model().to("cuda", torch.bfloat16)
        ServerTarget(None, model, model.model.norm, [])
    assert not torch.backends.cuda.cudnn_sdp_enabled()


@RECURRENT_RUNS
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(each, marks=() if each in ("qwen3_5", "kimi_linear", "lfm2", "mamba2") else pytest.mark.soak)
        for each in RECURRENT
    ],
)
@pytest.mark.parametrize("shape", [Chain(3), FixedTree([(0,), (1,), (0, 0)])], ids=["chain", "tree"])
def test_a_verification_of_a_recurrent_target_computes_what_it_does_on_a_cpu(family, shape, gpu, monkeypatch):
    """Padded to whole chunks of 16 or 64 tokens, it computed 2 to 87 times as many numbers."""
    monkeypatch.setattr(in_process, "fuse_norms", lambda model: None)
    monkeypatch.setattr(in_process, "pack_linears", lambda model: None)
    monkeypatch.setitem(kv_cache.BUCKETS, "cuda", 1)
    made = {}
    for device in ("cpu", "cuda"):
        target = Target(tiny_model(family).to(device), tokenizer=None)
        engine = Engine(target, HeadDrafter(tiny_head().to(device), shape), slots=2, capture=False)
        for first in (1, 2):
            engine.submit([first, 2, 3], max_new_tokens=30, eos_token_ids=())
        engine.step()
        with torch.inference_mode():
            batch = engine.schedule()
            gpu.elements.clear()
            engine.decode_batch(batch)
        made[device] = gpu.elements.total()
    assert made["cuda"] == pytest.approx(made["cpu"], rel=0.01)


def launches(target: Target, monkeypatch) -> int:
    """Operations of a plain step that are not views."""
    engine = Engine(target, None, slots=1, capture=False)
    engine.submit([1, 2, 3], max_new_tokens=20, eos_token_ids=())
    for _ in range(3):
        engine.step()
    counted, real = [], make_believe_gpu.run

    def run(func, args, kwargs):
        views = make_believe_gpu._is_view(func)
        composite = make_believe_gpu._is_composite(func) and func not in make_believe_gpu._EMULATED
        counted.extend(
            [func]
            * (
                not views
                and not composite
                and any(isinstance(x, make_believe_gpu.GpuTensor) for x in make_believe_gpu._tensors(args))
            )
        )
        return real(func, args, kwargs)

    with monkeypatch.context() as patch, torch.inference_mode():
        patch.setattr(make_believe_gpu, "run", run)
        batch = engine.schedule()
        engine.decode_batch(batch)
    return len(counted)


def test_a_norm_is_one_launch(gpu, monkeypatch):
    """In place of eight: the two norms of each layer, and the last one."""
    counts = []
    for fuse in (lambda model: 0, fuse_norms):
        monkeypatch.setattr(in_process, "fuse_norms", fuse)
        counts.append(launches(Target(tiny_model().to("cuda", torch.bfloat16), tokenizer=None), monkeypatch))
    assert counts[0] - counts[1] == 5 * 7


def test_a_server_asks_for_few_signatures_of_attention(gpu):
    """25 prompts would ask for 105 signatures if shapes followed the prompts' lengths, and ask for 28."""
    engine = Engine(long_target(), None, slots=8, capture=False)
    gpu.signatures.clear()
    serve(engine, 25, 4, [Sampling()], arrivals=1)
    assert len(gpu.signatures) <= 32


def test_prompts_are_read_in_long_passes_while_no_row_decodes(gpu, monkeypatch):
    """A pass of 512 tokens of each took 6. A prompt that comes later does not stop the rows that decode for as long."""
    passes = []
    process = prefill.process
    monkeypatch.setattr(prefill, "process", lambda chunk, *given: passes.append(chunk.counts) or process(chunk, *given))
    engine = Engine(long_target(), None, slots=3, capture=False)
    for length in (3000, 1200):
        engine.submit(
            [length % 31, *range(31)] * (length // 32) + [0] * (length % 32), max_new_tokens=8, eos_token_ids=()
        )
    engine.step()
    engine.submit([3] * 1200, max_new_tokens=2, eos_token_ids=())
    engine.run()
    assert passes == [[3000, 1200], [512], [512], [176]]


@pytest.mark.parametrize("decoding", [0, 1])
@pytest.mark.parametrize(
    ("family", "bucket", "most"),
    [("gemma3", 1, 12), ("gemma3", 16, 100), pytest.param("mamba2", 1, 12, marks=RECURRENT_RUNS)],
)
def test_a_pass_of_a_prefill_has_a_bound_on_what_grows_with_it(family, bucket, most, decoding, monkeypatch):
    """Masks grow with the positions read, scans with the chunk, padding counts. Shorter passes give the same text."""
    monkeypatch.setitem(kv_cache.BUCKETS, "cpu", bucket)
    target, prompts = Target(tiny_model(family), None), [[7 * i % 31 for i in range(count)] for count in (70, 40, 9)]
    expected = Engine(target, slots=4).generate(prompts, max_new_tokens=5, eos_token_ids=()).tokens
    passes, process, bound = [], prefill.process, most * target.scratch_per_token(target.cache(1, 1), 70)
    widths, writing = [], kv_cache.KVCache.writing

    def noting(chunk, *given):
        hidden = process(chunk, *given)
        passes.append((chunk, widths[-1]))
        return hidden

    monkeypatch.setattr(kv_cache.KVCache, "writing", lambda *given: widths.append(given[1]) or writing(*given))
    monkeypatch.setattr(prefill, "process", noting)
    monkeypatch.setattr(rows, "SCRATCH", bound)
    engine = Engine(target, slots=4)
    for number in range(decoding):
        engine.submit([3 + number], max_new_tokens=90, eos_token_ids=())
        engine.step()
    assert engine.generate(prompts, max_new_tokens=5, eos_token_ids=()).tokens == expected
    for chunk, width in passes:
        read = max(begin + count for begin, count in zip(chunk.begins, chunk.counts, strict=True))
        tokens = len(chunk.counts) * width
        assert tokens * target.scratch_per_token(engine.cache, read) <= bound or tokens <= most
    assert max(sum(chunk.counts) for chunk, _ in passes) > 6


@pytest.mark.parametrize("family", ["gpt_oss", "gemma2"])
def test_explicit_attention_holds_few_scores_at_a_time(family, monkeypatch):
    """All scores of a pass of 8,192 tokens would take 34 GB in gpt-oss-20b."""
    monkeypatch.setitem(kv_cache.BUCKETS, "cpu", 16)  # as on a GPU, where a pass attends in one call
    target, prompt = Target(tiny_model(family), None), [[7 * i % 31 for i in range(120)]]
    made = {}
    for scores in (2**26, 4000):
        monkeypatch.setattr(attention, "_SCORES", scores)
        engine = Engine(target, slots=1)
        with Allocations() as allocations:
            texts = engine.generate(prompt, max_new_tokens=8, eos_token_ids=(), logprobs=0)
        made[scores] = texts.tokens, allocations.largest
    assert made[4000][0] == made[2**26][0]
    assert made[4000][1] <= made[2**26][1] / 2, "the mask"


@pytest.mark.parametrize("kind", ["ngram", "adaptive"])
def test_new_tokens_are_indexed_after_the_launch_and_before_the_wait(kind, gpu, monkeypatch):
    target, events = long_target(), []
    drafter = {
        "ngram": NgramDrafter,
        "adaptive": lambda: adaptive(target),
    }[kind]()
    read = NgramDrafter.prepare
    monkeypatch.setattr(NgramDrafter, "prepare", lambda self: events.append(sum(gpu.waits.values())) or read(self))
    engine = Engine(target, drafter, slots=2, capture=False)
    for first in (1, 2):
        engine.submit([first, 2, 3], max_new_tokens=9, eos_token_ids=())
    run = engine.rows.run
    monkeypatch.setattr(engine.rows, "run", lambda *given: (run(*given), events.append(sum(gpu.waits.values())))[0])
    engine.run()
    launched, read_at = events[::2], events[1::2]
    assert launched == read_at, "no wait between them"
    assert len(set(launched)) == len(launched) > 1, "the step is waited for afterwards"


def documents(rows: int, length: int, seed: int) -> list[dict]:
    """Rows of packed documents, 200 tokens each on average."""
    draw = random.Random(seed)
    made = []
    for _ in range(rows):
        numbers: list[int] = []
        while len(numbers) < length:
            numbers += [len(made) * length + len(numbers)] * int(draw.expovariate(1 / 200) + 1)
        made.append({"input_ids": [draw.randrange(32) for _ in range(length)], "document_ids": numbers[:length]})
    return made


def to_gpu(batch: dict) -> dict:
    return {name: x.to("cuda") if isinstance(x, torch.Tensor) else x for name, x in batch.items()}


def training_step(target: Target, head, rows: list[dict]) -> None:
    """A micro-batch as the loop runs it."""
    batch = to_gpu(Collator(head.config)(rows))
    ids, number = batch.pop("input_ids"), batch.pop("document_ids")
    hidden = torch.zeros(*ids.shape, target.hidden_size, dtype=target.dtype, device="cuda")
    states = torch.zeros(*ids.shape, (len(head.aux_layers) or 1) * target.hidden_size, device="cuda")
    loss = ChunkedLoss(target.logits, LossConfig(cross_entropy=0.1, kl=0.0, total_variation=1.8), 2**22)
    with torch.autocast("cuda", torch.bfloat16):
        total, count = head(
            TrainingBatch(input_ids=ids, document_ids=number, hidden=hidden, states=states, targets=batch), loss
        )["objective"]
    (total * head.n_predict / count).backward()


@pytest.fixture
def block_head(gpu, monkeypatch):
    """A target and a head that trains rows of 2,048 tokens in 8 chunks each, as the recipes do."""
    target = long_target()
    head = tiny_block_head(target, n_predict=7, anchors=64, aux_layers=[0], num_hidden_layers=1).float()
    monkeypatch.setattr(dspark, "_SCORES_ON_GPU", head.config.num_attention_heads * 2048 * 7 * 8)
    return target, head


def test_training_dspark_asks_for_few_signatures_of_attention(block_head, gpu):
    """Every micro-batch had 16 new ones when each chunk had the width of its text."""
    gpu.signatures.clear()
    for batch in range(2):
        training_step(*block_head, documents(2, 2048, batch))
    assert sum(gpu.signatures.values()) == 2 * 2 * 8
    assert len(gpu.signatures) <= 4


@pytest.mark.parametrize("shape", [{}, DFLASH2], ids=["dspark", "dflash2"])
def test_training_a_block_drafter_does_not_wait_for_the_device(block_head, gpu, shape):
    target, head = block_head
    if shape:
        head = tiny_block_head(target, anchors=16, aux_layers=[0], num_hidden_layers=1, **shape).float()
    training_step(target, head, documents(2, 2048, 0))
    gpu.waits.clear()
    training_step(target, head, documents(2, 2048, 1))
    assert not {name: count for name, count in gpu.waits.items() if "test_gpu_costs" not in name}


@pytest.mark.parametrize("architecture", ["mlp", "eagle3", "mtp"])
def test_training_unrolled_heads_does_not_wait_for_the_device(gpu, architecture):
    target = long_target()
    head = tiny_mtp_head(target) if architecture == "mtp" else tiny_head(architecture=architecture)
    head = head.to("cuda").float().train().requires_grad_(True)
    training_step(target, head, documents(2, 256, 0))
    gpu.waits.clear()
    training_step(target, head, documents(2, 256, 1))
    assert not {name: count for name, count in gpu.waits.items() if "test_gpu_costs" not in name}


@pytest.mark.parametrize("architecture", ["dspark", "mtp"])
def test_a_head_trains_with_the_targets_matrices_on_another_device(gpu, architecture):
    """As under device_map, which puts the output matrix on the last GPU and the head on the first."""
    elsewhere = Target(tiny_model().bfloat16(), tokenizer=None)
    make = tiny_block_head if architecture == "dspark" else tiny_mtp_head
    head = make(elsewhere).to("cuda").float().train().requires_grad_(True)
    assert head._shared[1].weight.device.type == "cpu"
    training_step(long_target(), head, documents(2, 64, 0))
    assert any(weight.grad is not None for weight in head.parameters())
    assert head.output_logits(torch.zeros(2, 32, device="cuda")).device.type == "cuda"


_POSITION = 2 * 2 * 8 * 4
"""Bytes of keys and values of a position: 2 heads of 8 numbers in float32."""


class Counted:
    """Stands in for a CUDA graph without its speed: a replay runs the work again."""

    made = 0

    def __init__(self, work, given):
        self.work, self.given, self.result = work, given, work(*given)
        self.first = True
        type(self).made += 1

    def replay(self):
        if not self.first:
            overwrite(self.result, self.work(*self.given))
        self.first = False

    def reset(self):
        pass


def adaptive(target: Target) -> AdaptiveDrafter:
    """An adaptive drafter with the costs of a GPU: a drafted level costs a fifth of a step, verification little."""

    def cost(shape, tokens, path, greedy, rows):
        return 1 + 0.2 * (shape.levels if shape else 0) + 0.002 * tokens

    shapes = [Chain(1), Chain(3), FixedTree([(0,), (1,), (0, 0), (0, 1), (0, 0, 0)])]
    likely = {True: [0.6, 0.5, 0.4], False: [0.5, 0.4, 0.3]}
    choices = [Choice(shape, {kind: each[: shape.depth] for kind, each in likely.items()}) for shape in shapes]
    lookup = dict.fromkeys(likely, (0.3, 0.4, 0.5))
    return AdaptiveDrafter(
        tiny_head().to(target.device, target.dtype), choices, lookup, cost, packed=packs_rows(target)
    )


def captures(monkeypatch, drafter, steps: int) -> int:
    """Graphs that a server of 8 slots captures, with greedy and sampled requests of usual lengths."""
    price = cuda_graphs._PRICE
    capturing(monkeypatch, Counted)
    monkeypatch.setattr(cuda_graphs, "_PRICE", price)
    monkeypatch.setitem(kv_cache.BUCKETS, "cpu", 256)
    monkeypatch.setattr(Rows, "_weight_bytes", _POSITION * int(16e9 / 2**17))  # as those of 8 billion weights
    config = copy.deepcopy(CONFIGS["llama"])
    config.num_hidden_layers, config.max_position_embeddings = 1, 4096
    torch.manual_seed(0)
    target = Target(AutoModelForCausalLM.from_config(config), tokenizer=None)
    engine = Engine(target, drafter(target), slots=8)
    samplings = [Sampling(), Sampling(1.0), Sampling(0.8, top_p=0.9)]
    draw, waiting = random.Random(0), prompts(steps)
    for _ in range(steps):
        while len(engine.waiting) < 2 and draw.random() < 0.1:
            index = len(waiting)
            length = int(draw.lognormvariate(5.2, 0.6))
            sampling = replace(samplings[index % 3], seed=index)
            engine.submit(waiting.pop(), sampling, max_new_tokens=length, eos_token_ids=())
        engine.step()
    return Counted.made


def test_a_server_captures_few_graphs(monkeypatch):
    """Of 500 steps 15 are captured; if lengths were rounded up to 256, 20 would be."""
    assert captures(monkeypatch, adaptive, 500) <= 17


@pytest.mark.parametrize(("weights", "graphs"), [(4, 2), (10_000, 1)])
def test_a_step_reads_an_eighth_more_than_the_longest_row_once_that_pays_for_a_graph(weights, graphs, monkeypatch):
    """600 tokens are read as 1,024 or 640. Where keys are few next to the weights, the second graph never pays."""
    capturing(monkeypatch, Counted)
    monkeypatch.setattr(cuda_graphs, "_PRICE", 5.0)
    monkeypatch.setitem(kv_cache.BUCKETS, "cpu", 256)
    monkeypatch.setattr(Rows, "_weight_bytes", weights * _POSITION * 2 * 384)  # two rows save 384 positions each
    config = copy.deepcopy(CONFIGS["llama"])
    config.num_hidden_layers, config.max_position_embeddings = 1, 2048
    engine = Engine(Target(AutoModelForCausalLM.from_config(config), tokenizer=None), None, slots=2, capacity=1500)
    for length in (590, 440):
        engine.submit([7 * i % 31 for i in range(length)], max_new_tokens=48, eos_token_ids=())
    read = []
    while engine.busy:
        engine.step()
        read.append(engine.cache.longest)
    assert Counted.made == graphs
    read = read[1:]  # the first call reads the prompts
    # Each step in 1,024 positions could save a quarter of the weights' time: 20 of them pay for a graph of price 5.
    assert read == ([1024] * 19 + [640] * (len(read) - 19) if graphs == 2 else [1024] * len(read))
