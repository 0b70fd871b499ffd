"""Flash attention combined with own keys equals attention in blocks of rows, with flash attention written out."""

import pytest
import torch

from speculator.heads.attention import joint_attention
from speculator.heads.attention.joint_attention import BlockedAttention, FusedAttention, QueryRows
from speculator.target.packed import document_starts
from tests.speculator.heads.test_eagle3 import DOCUMENTS, STEPS, head_of, inputs

NAMES = ["out", "query", "keys", "values", "own keys", "own values"]


def seen(bounds, count, left):
    """Mask [rows, keys] of packed documents: causal, with `left` keys before a row's own."""
    place = torch.arange(count)
    document = torch.searchsorted(bounds[1:].long(), place, right=True)
    mask = (place <= place[:, None]) & (document == document[:, None])
    return mask if left is None else mask & (place >= place[:, None] - left)


def scores_of(query, key, bounds, left, scale):  # [H, rows, keys]
    groups = query.shape[1] // key.shape[1]
    scores = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(groups, 1)) * scale
    return scores.masked_fill(~seen(bounds, len(query), left), -torch.inf)


def forward(query, key, value, bounds, _, longest, __, dropout, causal, debug, *, scale, window_size_left):
    assert (dropout, causal, debug) == (0.0, True, False)
    assert longest >= bounds.diff().max()
    scores = scores_of(query, key, bounds, window_size_left, scale)
    value = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).to(query.dtype)
    noise = torch.zeros(2, dtype=torch.uint64)
    return out, scores.logsumexp(-1), noise, noise[0], query.new_empty(0)


def backward(d_out, query, key, value, out, lse, bounds, *given, scale, window_size_left):
    """Flash attention's formulas, which know the softmax through `lse` and `out` only."""
    p = (scores_of(query, key, bounds, window_size_left, scale) - lse[..., None]).exp()
    groups = query.shape[1] // key.shape[1]
    d_p = torch.einsum("qhd,khd->hqk", d_out, value.repeat_interleave(groups, 1))
    ds = p * (d_p - (d_out * out).sum(-1).T[..., None]) * scale
    d_query = torch.einsum("hqk,khd->qhd", ds, key.repeat_interleave(groups, 1))
    d_key, d_value = torch.einsum("hqk,qhd->khd", ds, query), torch.einsum("hqk,qhd->khd", p, d_out)
    return d_query, *(x.unflatten(1, (-1, groups)).sum(2) for x in (d_key, d_value))


@pytest.fixture
def written_out(monkeypatch):
    monkeypatch.setattr(joint_attention, "flash_forward", forward)
    monkeypatch.setattr(joint_attention, "flash_backward", backward)


def case(step, part, window, device="cpu", dtype=torch.float64, length=11, size=6):
    """QueryRows of two sequences of several documents, and attention's inputs with H = 4 and K = 2 heads."""
    generator = torch.Generator().manual_seed(3)
    documents = (torch.rand(2, length, generator=generator) < 0.25).cumsum(1)
    wanted = (torch.rand(2 * length, generator=generator) < part).nonzero()[:, 0]
    rows = QueryRows(wanted.to(device), document_starts(documents).to(device), 3 * length, window)
    count, text, own = len(wanted), (2, length, 2, size), (step, len(wanted), 2, size)
    shapes = [(count, 4, size), text, text, own, own]
    given = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    d_out = torch.randn(count, 4, size, generator=generator, dtype=torch.float64)
    return rows, [x.to(device, dtype) for x in given], d_out.to(device, dtype)


def results(form, rows, step, given, d_out):
    given = [x.detach().requires_grad_() for x in given]
    out = form.apply(rows, step, *given)
    return out, *torch.autograd.grad(out, given, d_out)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("part", [1.0, 0.5])
@pytest.mark.parametrize("step", [0, 2])
def test_fused_attention_has_the_values_and_gradients_of_blocked_attention(
    step, part, window, written_out, monkeypatch
):
    given = case(step, part, window)
    expected = results(BlockedAttention, given[0], step, *given[1:])
    for numbers in (2**25, 5 * 24):  # in pieces of five rows
        monkeypatch.setattr(joint_attention, "_NUMBERS", numbers)
        for name, x, y in zip(NAMES, results(FusedAttention, given[0], step, *given[1:]), expected, strict=True):
            torch.testing.assert_close(x, y, atol=1e-12, rtol=0, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("wrong", ["lse", "out"])
def test_a_backward_pass_that_ignores_the_own_keys_is_detected(wrong, written_out, monkeypatch):
    """It receives `lse` or `out` of the softmax over the text alone, not the joint one."""
    rows, given, d_out = case(2, 1.0, None)
    expected = results(BlockedAttention, rows, 2, given, d_out)
    alone = {}

    def noted(*args, **options):
        out, lse, *more = forward(*args, **options)
        alone.update(out=out.clone(), lse=lse.clone())
        return out, lse, *more

    def misled(*args, **options):
        args = [*args]
        args[4 if wrong == "out" else 5] = alone[wrong]
        return backward(*args, **options)

    monkeypatch.setattr(joint_attention, "flash_forward", noted)
    monkeypatch.setattr(joint_attention, "flash_backward", misled)
    gaps = [(x - y).abs().max() for x, y in zip(results(FusedAttention, rows, 2, given, d_out), expected, strict=True)]
    assert gaps[0] < 1e-12
    assert gaps[1] > 1e-2
    assert gaps[2] > 1e-2


def test_a_window_off_by_one_is_detected(written_out, monkeypatch):
    rows, given, _ = case(1, 1.0, 4)
    expected = BlockedAttention.apply(rows, 1, *given)
    asked = joint_attention._flash
    assert (FusedAttention.apply(rows, 1, *given) - expected).abs().max() < 1e-12
    monkeypatch.setattr(joint_attention, "_flash", lambda rows, step, query: asked(rows, step - 1, query))
    assert (FusedAttention.apply(rows, 1, *given) - expected).abs().max() > 1e-2


@pytest.mark.parametrize("window", [None, 2])  # of two positions: no text is seen in the steps 2 and 3
def test_a_head_has_equal_gradients_either_way(window, written_out, monkeypatch):
    head = head_of(sliding_window=window)
    aux_hidden, tokens = inputs(head)
    loss_mask = torch.arange(DOCUMENTS.numel()).view_as(DOCUMENTS) % 3 > 0
    weights = [aux_hidden.requires_grad_(), *(w for n, w in head.named_parameters() if "lm_head" not in n)]
    calls = []
    apply = FusedAttention.apply
    monkeypatch.setattr(FusedAttention, "apply", lambda *given: calls.append(given[1]) or apply(*given))

    def gradients():
        features = torch.stack(head.unrolled(aux_hidden, tokens, DOCUMENTS, loss_mask))
        return features, *torch.autograd.grad(features.pow(3).sum(), weights)

    expected = gradients()
    assert calls == []
    monkeypatch.setattr(joint_attention, "fused_dtype", lambda *_: torch.float64)
    monkeypatch.setattr("speculator.heads.eagle3.model.fused_dtype", lambda *_: torch.float64)
    for x, y in zip(gradients(), expected, strict=True):
        torch.testing.assert_close(x, y, atol=1e-9, rtol=1e-9)
    assert calls == ([0, 1] if window else list(range(STEPS)))


@pytest.mark.parametrize(
    ("kind", "size", "dtype", "fused"),
    [
        ("cuda", 64, torch.bfloat16, torch.bfloat16),
        ("cuda", 64, torch.float32, None),
        ("cuda", 60, torch.bfloat16, None),
        ("cpu", 64, torch.bfloat16, None),
    ],
)
def test_flash_attention_runs_only_for_the_dtypes_and_sizes_that_it_takes(kind, size, dtype, fused):
    assert joint_attention.fused_dtype(torch.empty(1, size, dtype=dtype), kind) == fused


def apart(x, y):
    return ((x.float() - y.float()).norm() / y.float().norm()).item()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnGPU:
    @pytest.mark.parametrize("window", [None, 50])
    @pytest.mark.parametrize("part", [1.0, 0.5])
    @pytest.mark.parametrize("step", [0, 1, 3])
    def test_bfloat16_is_close_to_blocks_in_float32(self, step, part, window):
        given = case(step, part, window, "cuda", torch.bfloat16, length=300, size=64)
        found = results(FusedAttention, given[0], step, *given[1:])
        expected = results(BlockedAttention, given[0], step, [x.float() for x in given[1]], given[2].float())
        for name, x, y in zip(NAMES, found, expected, strict=True):
            assert not y.numel() or apart(x, y) < 1e-2, name

    def test_a_head_has_close_gradients_either_way(self, monkeypatch):
        loss, *gradients = gradients_under_autocast("cuda")
        monkeypatch.setattr("speculator.heads.eagle3.model.fused_dtype", lambda *_: None)
        monkeypatch.setattr(FusedAttention, "apply", lambda *_: pytest.fail("flash attention ran"))
        expected, *others = gradients_under_autocast("cuda")
        assert apart(loss, expected) < 1e-2
        assert max(apart(x, y) for x, y in zip(gradients, others, strict=True)) < 5e-2


def gradients_under_autocast(device):
    head = head_of(emb_dim=8, head_dim=16).float()
    head.share_embedding(head.embedding_weight.float())
    aux_hidden, tokens = (x.to(device) for x in inputs(head))
    head.share_embedding(head.embedding_weight.to(device))
    head.to(device)
    with torch.autocast(device, torch.bfloat16):
        logits = torch.stack([head.lm_head(x) for x in head.unrolled(aux_hidden.float(), tokens, DOCUMENTS.to(device))])
    wanted = tokens[:, STEPS - 1 :]  # any tokens
    loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 2), wanted.repeat(STEPS, 1, 1).flatten())
    return loss, *torch.autograd.grad(loss, [*head.parameters()])
