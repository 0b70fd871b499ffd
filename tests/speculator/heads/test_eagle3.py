"""EAGLE-3's training form equals its equations, and its drafting form equals the training form."""

import copy
import math
import sys

import pytest
import torch
from conftest import CONFIGS, RECURRENT
from torch.nn.functional import silu
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModel, LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from speculator import UserError
from speculator.heads import Eagle3Speculator, Eagle3SpeculatorConfig
from speculator.heads.attention import joint_attention
from speculator.heads.attention.cache import HeadCache
from speculator.heads.attention.levels import LevelCache
from speculator.heads.eagle3 import model as eagle3
from speculator.heads.eagle3.model import Eagle3Form

V, D, STEPS = 13, 8, 4
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
KINDS = {
    "3.1": {},
    "3": {"fc_norm": False, "norm_output": False},
    "residual": {"norm_before_residual": True},
    "before-fc": {"fc_norm": False, "norm_before_fc": True, "norm_output": False},
    "qwen3": {"qk_norm": True, "rope_parameters": LLAMA3},
    "bias": {"attention_bias": True, "draft_vocab_size": 6, "aux_layers": [1, 5]},
    "window": {"sliding_window": 4, "own_embedding": True, "norm_before_residual": True},
}


def head_of(**changes) -> Eagle3Speculator:
    """A head in float64 with random norms and biases, so that a swap of two would show."""
    torch.manual_seed(0)
    shape = {"vocab_size": V, "emb_dim": D, "inner_dim": 12, "n_predict": STEPS, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2, "head_dim": 6, "aux_layers": [0, 2, 3], "rms_norm_eps": 1e-5}
    head = Eagle3Speculator(Eagle3SpeculatorConfig(**shape | changes)).double()
    for name, weight in head.named_parameters():
        if weight.ndim == 1:
            torch.nn.init.normal_(weight, mean=0.0 if "bias" in name else 1.0, std=0.3)
    if head.draft_tokens is not None:
        head.draft_tokens.copy_(torch.tensor([1, 2, 5, 8, 9, 12]))
    if not head.config.own_embedding:
        head.share_embedding(torch.randn(V, D, dtype=torch.float64))
    return head.requires_grad_(True)


DOCUMENTS = torch.tensor([[0] * 5 + [1] * 8, [7] * 13])


def inputs(head: Eagle3Speculator) -> tuple[torch.Tensor, torch.Tensor]:
    """Auxiliary hidden states [2, 13, nD] and tokens [2, 13 + STEPS - 1] of packed rows with DOCUMENTS."""
    generator = torch.Generator().manual_seed(1)
    aux_hidden = torch.randn(*DOCUMENTS.shape, head.fc.in_features, generator=generator, dtype=torch.float64)
    return aux_hidden, torch.randint(V, (2, DOCUMENTS.shape[1] + STEPS - 1), generator=generator)


def written_out(head: Eagle3Speculator, aux_hidden, tokens, documents) -> torch.Tensor:  # [N, B, S, V_d]
    """Evaluate the equations with one dense mask: query (t, i) has S (i + 1) columns, the keys of all steps."""
    w, config = dict(head.named_parameters()), head.config
    layer = {name.removeprefix("layers.0."): value for name, value in w.items()}
    heads, kv_heads, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    batch, length = documents.shape

    frequencies = LlamaRotaryEmbedding(
        LlamaConfig(
            head_dim=size,
            rope_parameters=dict(config.rope_parameters),
            max_position_embeddings=config.max_position_embeddings,
        )
    ).inv_freq

    def rms(x, weight):
        return x / (x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).sqrt() * weight

    def linear(x, name):
        out = x @ layer[f"{name}.weight"].T
        return out + layer[f"{name}.bias"] if f"{name}.bias" in layer else out

    def rope(x, positions):  # [B, S, heads, d], [S]
        angles = positions[:, None].double() * frequencies.double()
        cos, sin = angles.cos()[None, :, None], angles.sin()[None, :, None]
        a, b = x[..., : size // 2], x[..., size // 2 :]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    if config.norm_before_fc:
        aux_hidden = rms(aux_hidden, w["input_norm.weight"])
    if config.fc_norm:
        aux_hidden = torch.cat([rms(x, w[f"fc_norm.{i}.weight"]) for i, x in enumerate(aux_hidden.split(D, -1))], -1)
    g = aux_hidden @ w["fc.weight"].T
    embedding = head.embedding_weight
    t = torch.arange(length)
    causal = (t <= t[:, None]) & (documents[:, :, None] == documents[:, None])  # [B, S, S]
    keys, values, masks, logits = [], [], [], []
    for i in range(config.n_predict):
        hidden = rms(g, layer["hidden_norm.weight"])
        u = torch.cat([rms(embedding[tokens[:, i : i + length]], layer["input_layernorm.weight"]), hidden], -1)
        q, k, v = (linear(u, f"self_attn.{name}_proj").view(batch, length, -1, size) for name in "qkv")
        if config.qk_norm:
            q, k = rms(q, layer["self_attn.q_norm.weight"]), rms(k, layer["self_attn.k_norm.weight"])
        keys.append(rope(k, t + i).repeat_interleave(heads // kv_heads, 2))
        values.append(v.repeat_interleave(heads // kv_heads, 2))
        window = config.sliding_window or 1000
        masks.append(torch.eye(length, dtype=torch.bool).expand(batch, -1, -1))
        masks[0] = causal & (t > t[:, None] + i - window)
        scores = torch.einsum("bqhd,bkhd->bhqk", rope(q, t + i), torch.cat(keys, 1)) / math.sqrt(size)
        scores = scores.masked_fill(~torch.cat(masks, -1)[:, None], -torch.inf)
        attended = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), torch.cat(values, 1)).flatten(2)
        h = (hidden if config.norm_before_residual else g) + linear(attended, "self_attn.o_proj")
        y = rms(h, layer["post_attention_layernorm.weight"])
        s = h + linear(silu(linear(y, "mlp.gate_proj")) * linear(y, "mlp.up_proj"), "mlp.down_proj")
        normed = rms(s, w["norm.weight"])
        logits.append(normed @ w["lm_head.weight"].T)
        g = normed if config.norm_output else s
    return torch.stack(logits)


@pytest.mark.parametrize("kind", KINDS)
def test_training_form_equals_the_equations_for_any_block_size(kind, monkeypatch):
    """Values and all gradients are compared, those of the auxiliary hidden states included."""
    head = head_of(**KINDS[kind])
    aux_hidden, tokens = inputs(head)
    aux_hidden.requires_grad_(True)
    weights = [weight for name, weight in head.named_parameters() if name != "embed_tokens.weight"]
    expected = written_out(head, aux_hidden, tokens, DOCUMENTS)
    mix = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    expected_gradients = torch.autograd.grad((expected * mix).sum(), [aux_hidden, *weights])
    for rows in (1, 5, 100):
        monkeypatch.setitem(joint_attention._SCORES, "cpu", rows * 4 * DOCUMENTS.shape[1])
        found = torch.stack([head.lm_head(x) for x in head.unrolled(aux_hidden, tokens, DOCUMENTS)])
        torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)
        for a, b in zip(
            torch.autograd.grad((found * mix).sum(), [aux_hidden, *weights]), expected_gradients, strict=True
        ):
            torch.testing.assert_close(a, b, atol=1e-10, rtol=0)


@pytest.mark.parametrize("wanted", [[2, 3, 6, 12], [0], []])
def test_positions_outside_the_loss_mask_are_skipped_and_change_nothing(wanted, monkeypatch):
    head = head_of()
    aux_hidden, tokens = inputs(head)
    loss_mask = torch.zeros_like(DOCUMENTS, dtype=torch.bool)
    loss_mask[1, wanted] = True
    loss_mask[0] = True
    monkeypatch.setitem(joint_attention._SCORES, "cpu", 3 * 4 * DOCUMENTS.shape[1])
    queries = []
    head.layers[0].mlp.register_forward_hook(lambda module, given, out: queries.append(len(given[0])))
    with torch.no_grad():
        whole = torch.stack(head.unrolled(aux_hidden, tokens, DOCUMENTS))
        queries.clear()
        some = torch.stack(head.unrolled(aux_hidden, tokens, DOCUMENTS, loss_mask))
    assert sum(queries) == STEPS * (13 + len(wanted))
    torch.testing.assert_close(some[:, loss_mask], whole[:, loss_mask], atol=1e-12, rtol=0)
    assert not some[:, ~loss_mask].any()


def test_a_batch_with_an_empty_loss_mask_has_gradients():
    head = head_of()
    aux_hidden, tokens = inputs(head)
    sum(x.sum() for x in head.unrolled(aux_hidden, tokens, DOCUMENTS, DOCUMENTS < 0)).backward()
    assert [name for name, weight in head.named_parameters() if weight.grad is None] == ["lm_head.weight"]


class Casts(TorchDispatchMode):
    """Records the shapes that are cast to bfloat16."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._to_copy.default and (kwargs or {}).get("dtype") == torch.bfloat16:
            self.shapes.append(tuple(args[0].shape))
        return func(*args, **(kwargs or {}))


def test_under_autocast_what_several_products_read_is_cast_once():
    """Queries, keys and values read u [5, 2D], gate and up y [5, D]."""
    head = head_of(emb_dim=20).float()
    embedded, g = torch.randn(2, 5, 20)
    with torch.autocast("cpu", torch.bfloat16), Casts() as casts:
        u, residual = head.layer.enter(embedded, g)
        rope = head.rope(torch.arange(5), torch.float32)
        query, (key, value) = head.layer.self_attn.query(u, rope), head.layer.self_attn.key_value(u, rope)
        head.layer.leave(residual, query)
    assert query.dtype == key.dtype == torch.float32, "the rope's"
    assert value.dtype == torch.bfloat16
    assert casts.shapes.count((5, 40)) == 0
    assert casts.shapes.count((5, 20)) == 3, "both halves of u, and y"


def test_bfloat16_training_is_close_to_float32():
    head = head_of().float()
    head.share_embedding(head.embedding_weight.float())
    aux_hidden, tokens = inputs(head)
    aux_hidden = aux_hidden.float().requires_grad_(True)
    weights = [aux_hidden, *head.parameters()]
    exact = torch.stack(head.unrolled(aux_hidden, tokens, DOCUMENTS))
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.stack(head.unrolled(aux_hidden, tokens, DOCUMENTS)).float()
    assert (found - exact).std() < 0.05 * exact.std()
    gradients = [torch.autograd.grad(x.pow(3).sum(), weights, allow_unused=True) for x in (found, exact)]
    for a, b in zip(*gradients, strict=True):
        assert (a is None) == (b is None)  # the output matrix is not part of it
        assert a is None or (a - b).norm() < 0.2 * b.norm()


# --- drafting form

LEVELS = [  # of a tree below a row: tokens after the text's own, and the parents in the level before
    ([None, 3], [0, 0]),
    ([None, 4, 4, 0], [0, 0, 1, 1]),
    ([None, 7, 2], [0, 2, 3]),
]
CHAIN = [([None], [0])] * (STEPS - 1)


KNOWN: dict[tuple, torch.Tensor] = {}


class Rounds:
    """Decodes the documents of `inputs` in three rows and compares every logit with the training form's."""

    def __init__(self, kind: str = "3.1", drafting: Eagle3Form | None = None, shift: int = 0):
        self.kind, self.head, self.shift = kind, head_of(**KINDS[kind]), shift
        self.drafting = drafting or Eagle3Form(self.head)
        self.aux_layers, self.tokens = inputs(self.head)
        self.texts = [(0, 0, 5), (0, 5, 13), (1, 0, 13)]  # row of the batch, first row, end

    def expected(self, text: int, row: int, path: list[int]) -> torch.Tensor:  # [V]
        """Logits of the training form at the last step of a path that continues the text at a row."""
        place = (self.kind, text, row, *path)
        if place not in KNOWN:
            KNOWN[place] = self._expected(self.texts[text][0], row, path)
        return KNOWN[place]

    def _expected(self, b: int, row: int, path: list[int]) -> torch.Tensor:
        tokens = torch.cat([self.tokens[b, : row + 1], torch.tensor(path + [0] * STEPS)])[None, : row + STEPS]
        documents, loss_mask = DOCUMENTS[b : b + 1, : row + 1], torch.arange(row + 1)[None] == row
        features = self.head.unrolled(self.aux_layers[b : b + 1, : row + 1], tokens, documents, loss_mask)
        return self.head.to_full_vocabulary(self.head.lm_head(features[len(path)][0, row]))

    @torch.no_grad()
    def gap(self, levels=CHAIN, counts=(1,), after=lambda memory, drafted: None) -> float:
        """Return the largest difference; each round reads `counts` positions, one more of the second text."""
        memory, gap, done = self.drafting.cache(3, capacity=160), 0.0, [begin for _, begin, _ in self.texts]
        turn = 0
        while any(at < end for at, (_, _, end) in zip(done, self.texts, strict=True)):
            asked = [counts[turn % len(counts)] + (text == 1) for text in range(3)]
            read = [min(n, end - at) for n, at, (_, _, end) in zip(asked, done, self.texts, strict=True)]
            width, turn = max(read), turn + 1
            given = [[min(at + i, 12) for i in range(width)] for at in done]
            rows = [b for b, _, _ in self.texts]
            aux_hidden = torch.stack(
                [self.aux_layers[b].roll(self.shift, 0)[at] for b, at in zip(rows, given, strict=True)]
            )
            tokens = torch.stack([self.tokens[b, at] for b, at in zip(rows, given, strict=True)])
            logits = self.drafting.first(memory, aux_hidden, tokens, torch.tensor(read))
            memory.longest = int(memory.lengths.max())
            done = [at + n for at, n in zip(done, read, strict=True)]
            paths: list[list[list[int]]] = [[[]] for _ in rows]
            drafted = 0
            for own, parents in [([], []), *levels]:
                if own:
                    for text, b in enumerate(rows):
                        depth = len(paths[text][0])
                        said = [int(self.tokens[b, done[text] + depth]) if x is None else x for x in own]
                        paths[text] = [[*paths[text][p], x] for p, x in zip(parents, said, strict=True)]
                    newest = torch.tensor([[path[-1] for path in some] for some in paths])
                    logits = self.drafting.next(memory, newest, torch.tensor([parents] * 3))
                    drafted += len(own)
                for text in (text for text in range(3) if read[text]):
                    for place, path in enumerate(paths[text]):
                        expected = self.expected(text, done[text] - 1, path)
                        gap = max(gap, (logits[text, place] - expected).nan_to_num(0, 0, 0).abs().max().item())
            after(memory, drafted)
        return gap


@pytest.mark.parametrize("levels", [CHAIN, LEVELS], ids=["chain", "tree"])
@pytest.mark.parametrize("kind", KINDS)
def test_drafting_form_equals_the_training_form(kind, levels):
    """All rows and steps of packed documents are compared, read one position at a time and several, raggedly."""
    assert Rounds(kind).gap(levels) < 1e-10
    assert Rounds(kind).gap(levels, counts=(3, 1, 2)) < 1e-10


def changed(change) -> Eagle3Form:
    form = Eagle3Form(copy.deepcopy(head_of()))
    change(form)
    return form


def sees_its_siblings(form: Eagle3Form) -> None:
    level = form._level

    def wrong(memory, u, residual):
        memory.seen = torch.ones_like(memory.seen)
        return level(memory, u, residual)

    form._level = wrong


def reads_its_neighbour(form: Eagle3Form) -> None:
    level = form._level

    def wrong(memory, u, residual):
        own = memory.keys, memory.values
        memory.keys, memory.values = (x.roll(1, 1) for x in own)
        logits = level(memory, u, residual)
        memory.keys, memory.values = own
        return logits

    form._level = wrong


def keeps_the_draft(memory: HeadCache, drafted: int) -> None:
    memory.lengths += drafted
    memory.longest += drafted


class StaysBehind(LevelCache):
    """Every level has the rope position of level 0."""

    rope_position = property(lambda self: (self.lengths - 1)[:, None])


def stays_behind(form) -> None:
    make = form.cache

    def cache(rows: int, capacity: int) -> LevelCache:
        made = make(rows, capacity)
        made.__class__ = StaysBehind
        return made

    form.cache = cache


WRONG = {
    "positions not advanced": {"drafting": lambda: changed(stays_behind)},
    "a sibling's key seen": {"drafting": lambda: changed(sees_its_siblings)},
    "another row's key seen": {"drafting": lambda: changed(reads_its_neighbour)},
    "auxiliary hidden states off by one": {"shift": 1},
    "fed back from the wrong side of the norm": {
        "drafting": lambda: changed(lambda form: setattr(form.head.config, "norm_output", False))
    },
    "draft rows left in the cache": {"after": keeps_the_draft},
}


@pytest.mark.parametrize(
    ("levels", "fault"),
    [pytest.param(LEVELS if "sibling" in fault else CHAIN, fault, id=fault) for fault in WRONG],
)
def test_a_wrong_drafting_form_is_detected(levels, fault):
    wrong = dict(WRONG[fault])
    after = {"after": wrong.pop("after")} if "after" in wrong else {}
    if "drafting" in wrong:
        wrong["drafting"] = wrong["drafting"]()
    assert Rounds(**wrong).gap(levels, **after) > 1e-3


@pytest.mark.parametrize("fault", ["positions not advanced", "another row's key seen", "fed back before the norm"])
def test_a_wrong_training_form_is_detected(fault, monkeypatch):
    head = head_of()
    aux_hidden, tokens = inputs(head)
    expected = written_out(head, aux_hidden, tokens, DOCUMENTS)
    enter, right = head._enter, joint_attention.attend_own
    if fault == "positions not advanced":
        places = torch.arange(DOCUMENTS.shape[1]).repeat(2)
        monkeypatch.setattr(head, "_enter", lambda g, tokens, positions: enter(g, tokens, places))
    elif fault == "another row's key seen":
        monkeypatch.setattr(
            joint_attention,
            "attend_own",
            lambda *given: right(*given[:4], *(own.roll(1, 1) for own in given[4:])),
        )
    else:
        head.config.norm_output = False
    with torch.no_grad():
        gaps = [
            (head.lm_head(x) - y).abs().max()
            for x, y in zip(head.unrolled(aux_hidden, tokens, DOCUMENTS), expected, strict=True)
        ]
    assert gaps[0] < 1e-10
    assert all(gap > 1e-3 for gap in gaps[1:])


def test_attention_across_documents_is_detected(monkeypatch):
    monkeypatch.setattr(eagle3, "document_starts", torch.zeros_like)
    monkeypatch.setattr(sys.modules[__name__], "KNOWN", {})
    assert Rounds().gap() > 1e-3


# --- the embedding and the config


def test_the_shared_embedding_is_not_saved(tmp_path):
    head = head_of()
    aux_hidden, tokens = inputs(head)
    assert not [name for name in head.state_dict() if "embed" in name]
    head.save_pretrained(tmp_path)
    again = AutoModel.from_pretrained(tmp_path, dtype=torch.float64)
    assert isinstance(again, Eagle3Speculator)
    with pytest.raises(UserError, match="embedding"):
        again.logits(aux_hidden, tokens)
    again.share_embedding(head.embedding_weight)
    assert again.embedding_weight.data_ptr() == head.embedding_weight.data_ptr()
    torch.testing.assert_close(again.logits(aux_hidden, tokens), head.logits(aux_hidden, tokens), atol=1e-12, rtol=0)


def test_an_own_embedding_is_dropped_only_if_it_equals_the_targets(tmp_path):
    head = head_of(own_embedding=True)
    head.save_pretrained(tmp_path)
    again = AutoModel.from_pretrained(tmp_path, dtype=torch.float64)
    again.share_embedding(head.embedding_weight + 1e-3)
    assert torch.equal(again.embedding_weight, head.embedding_weight)
    assert again.config.own_embedding
    again.share_embedding(head.embedding_weight)
    assert not again.config.own_embedding
    assert "embed_tokens.weight" not in again.state_dict()


def test_the_output_matrix_starts_from_the_targets_rows():
    head, output = head_of(draft_vocab_size=6), torch.randn(V, D, dtype=torch.float64)
    head.initialise_from(torch.randn(V, D), output)
    assert torch.equal(head.lm_head.weight, output[[1, 2, 5, 8, 9, 12]])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"aux_layers": [2, 2, 3]}, "ascending"),
        ({"norm_before_fc": True}, "norm_before_fc"),
        ({"num_attention_heads": 3}, "3 heads are not a multiple of 2"),
        ({"num_attention_heads": 0}, "0 heads of"),
        ({"head_dim": 7}, "heads of 7"),
        ({"sliding_window": 0}, "sliding_window 0"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10.0, "factor": 2.0}}, "rope of type dynamic"),
    ],
)
def test_an_invalid_config_raises(wrong, message):
    with pytest.raises(ValueError, match=message):
        head_of(**wrong)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma4", "gpt_oss", "kimi_linear", "nemotron_h"])
def test_every_familys_target_has_a_head(family):
    target = (CONFIGS | RECURRENT)[family].get_text_config()
    config = Eagle3SpeculatorConfig.for_target(target, aux_layers=[0, 1], n_predict=2)
    head = Eagle3Speculator(config)
    aux_hidden, tokens, embedding = head.probe()
    logits = head.logits(aux_hidden, tokens, embedding)
    assert logits.shape == (2, 1, 4, target.vocab_size)
    assert logits.isfinite().all()
    assert config.rope_parameters["rope_type"] == ("yarn" if family == "gpt_oss" else "default")


@pytest.mark.parametrize(
    ("target", "given", "found"),  # hidden size, heads, key heads, head size -> heads, key heads
    [
        ((5120, 24, 4, 256), {}, (20, 4)),  # Qwen 3.5 27B
        ((4096, 96, 8, 128), {}, (32, 8)),  # GLM-4.5 Air
        ((2048, 20, 20, 64), {}, (32, 32)),  # GLM-4.7 Flash
        ((60, 8, 4, 14), {}, (6, 6)),
        ((5120, 24, 4, 256), {"qk_norm": True}, (24, 4)),
        ((4096, 32, 8, 128), {}, (32, 8)),
    ],
)
def test_the_number_of_heads_divides_the_hidden_size(target, given, found):
    """A Llama config needs that, and published targets may differ."""
    names = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    sizes = Qwen3Config(**dict(zip(names, target, strict=True)), num_hidden_layers=8)
    config = Eagle3SpeculatorConfig.for_target(sizes, **given)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (*found, target[3])


def test_a_target_without_attention_is_refused_in_one_line():
    with pytest.raises(UserError, match="mamba2 has no attention") as error:
        Eagle3SpeculatorConfig.for_target(RECURRENT["mamba2"], aux_layers=[0, 1])
    assert "\n" not in str(error.value)


PLAIN = {"rope_type": "default", "rope_theta": 100.0}


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        (LLAMA3, LLAMA3),
        ({**PLAIN, "rope_type": "linear", "factor": 4.0},) * 2,
        ({**PLAIN, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},) * 2,
        ({**PLAIN, "rope_type": "dynamic", "factor": 4.0}, PLAIN),
        ({**PLAIN, "rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}, PLAIN),
        ({**PLAIN, "partial_rotary_factor": 0.5}, PLAIN),
        ({"full_attention": LLAMA3, "sliding_attention": PLAIN}, LLAMA3),
    ],
)
def test_a_head_takes_its_targets_sizes_and_rope(given, taken):
    target = copy.deepcopy(CONFIGS["llama"])
    target.num_hidden_layers, target.rope_parameters = 12, given
    config = Eagle3SpeculatorConfig.for_target(target, draft_vocab_size=7)
    found = [config.emb_dim, config.inner_dim, config.num_attention_heads, config.num_key_value_heads, config.head_dim]
    assert found == [32, 64, 4, 2, 8]
    assert config.aux_layers == [2, 6, 9]
    assert config.rope_parameters == taken
    assert (config.fc_norm, config.norm_output, config.norm_before_residual) == (True, True, False)
