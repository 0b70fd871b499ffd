import copy
import pickle

import pytest
import torch
from torch import nn

from speculator.cli import serve
from speculator.files import cache_folder
from speculator.kernels import linear
from speculator.kernels.linear import HAS_ONEDNN, PackedLinear, pack_linears, product, unpack_linears
from speculator.target import in_process
from speculator.target.model import Target

WIDE, HIGH = 1024, 1152  # large enough for oneDNN with one row

needs_onednn = pytest.mark.skipif(not HAS_ONEDNN, reason="no oneDNN here")


@pytest.fixture
def layer():
    torch.manual_seed(0)
    layer = nn.Linear(WIDE, HIGH).requires_grad_(False)
    pack_linears(layer)
    return layer


def dense(layer, x):
    return nn.functional.linear(x, layer.weight, layer.bias)


@needs_onednn
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1,), (5,), (2, 3), (64,)])
def test_packed_products_equal_torchs_own(layer, shape, dtype):
    layer.to(dtype)
    x = torch.randn(*shape, WIDE, dtype=dtype)
    with torch.no_grad():
        ours, theirs = layer(x), dense(layer, x)
    unpacked = dtype is torch.bfloat16 and shape == (1,) and not linear.bfloat16_pays()
    assert (layer._copy is None) == unpacked
    torch.testing.assert_close(ours, theirs)


@needs_onednn
@pytest.mark.parametrize("bias", [True, False])
def test_products_of_bfloat16_in_float32_are_rounded_exact_ones(monkeypatch, bias):
    """Rounding the sum to bfloat16 once is within half a unit of the last place, 2^-9, of the exact product."""
    monkeypatch.setattr(linear, "bfloat16_pays", lambda: False)
    torch.manual_seed(0)
    layer = nn.Linear(WIDE, HIGH, bias=bias, dtype=torch.bfloat16).requires_grad_(False)
    pack_linears(layer)
    x = torch.randn(3, WIDE, dtype=torch.bfloat16)
    exact = dense(copy.deepcopy(layer).double(), x.double())
    with torch.no_grad():
        ours, unpacked = layer(x), product(x, layer.weight)
        assert layer._copy.packed.dtype is torch.float32
        one = layer(x[:1])
    assert ours.dtype is unpacked.dtype is torch.bfloat16
    torch.testing.assert_close(ours.double(), exact, rtol=2**-8, atol=1e-5)
    torch.testing.assert_close(one.double(), exact[:1], rtol=2**-7, atol=1e-2)
    torch.testing.assert_close(unpacked.double(), exact - (layer.bias.double() if bias else 0), rtol=2**-8, atol=1e-5)


@needs_onednn
def test_the_rates_of_products_are_measured_once(monkeypatch, tmp_path):
    monkeypatch.setenv("SPECULATOR_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    measured = [[2.0, 1.0]]
    monkeypatch.setattr(linear, "_seconds", lambda pairs: measured.pop())
    for _ in range(2):  # as two processes
        linear.bfloat16_pays.cache_clear()
        assert not linear.bfloat16_pays()
    linear.bfloat16_pays.cache_clear()
    assert len([*cache_folder().rglob("*.json")]) == 1


def test_a_dtype_that_was_asked_for_is_obeyed_and_serve_advises_none_that_is_slower(monkeypatch, target_folder):
    """Without oneDNN, as on a Mac or another ARM, no product is widened."""
    monkeypatch.setattr(linear, "HAS_ONEDNN", False)
    for pays in (False, True):
        for place in (linear, in_process, serve):
            monkeypatch.setattr(place, "bfloat16_pays", lambda pays=pays: pays, raising=False)
        assert Target.load(target_folder, dtype="bfloat16", device="cpu").dtype is torch.bfloat16
        target = Target.load(target_folder, device="cpu")
        assert target.dtype is torch.float32
        assert ("--dtype bfloat16" in serve._memory(target, 1)) is pays


@needs_onednn
def test_the_times_of_few_rows_are_measured_once(monkeypatch, tmp_path):
    monkeypatch.setenv("SPECULATOR_CACHE", str(tmp_path))
    measured = [[1.0, 1.3, 1.0]]
    monkeypatch.setattr(linear, "_seconds", lambda pairs: measured.pop())
    for _ in range(2):  # as two processes
        linear.slow_rows.cache_clear()
        assert linear.slow_rows(torch.float32, 1) == {2}
    linear.slow_rows.cache_clear()
    assert len([*cache_folder().rglob("*.json")]) == 1


@needs_onednn
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1,), (2,), (1, 2), (3,)], ids=str)
def test_rows_that_are_slow_alone_are_repeated(monkeypatch, layer, shape, dtype):
    """They then have the bits that they have beside others, as in a verification."""
    monkeypatch.setattr(linear, "bfloat16_pays", lambda: True)
    monkeypatch.setattr(linear, "slow_rows", lambda dtype, threads: {1, 2})
    multiply, rows = linear._onednn, []
    monkeypatch.setattr(linear, "_onednn", lambda x, *rest: rows.append(len(x.flatten(0, -2))) or multiply(x, *rest))
    layer.to(dtype)
    x = torch.randn(4, WIDE, dtype=dtype)
    count = torch.Size(shape).numel()
    with torch.no_grad():
        whole, part = layer(x), layer(x[:count].view(*shape, WIDE))
    assert rows == [4, 3 if count == 3 else 4]
    assert part.shape == (*shape, HIGH)
    assert torch.equal(part.flatten(0, -2), whole[:count])


@needs_onednn
def test_one_row_of_a_small_model_is_multiplied_as_several_are():
    """Otherwise plain decoding would be slower than it could be, and drafts would seem to pay more than they do."""
    small = nn.Linear(576, 192).requires_grad_(False)
    pack_linears(small)
    with torch.no_grad():
        small(torch.randn(1, 576))
    assert small._copy is not None


@needs_onednn
@pytest.mark.parametrize("change", ["in place", "data", "loaded"])
def test_a_changed_weight_is_packed_again(layer, change):
    x = torch.randn(3, WIDE)
    with torch.inference_mode():
        before = layer(x)
    weight = torch.randn(HIGH, WIDE) / WIDE**0.5
    if change == "in place":
        with torch.no_grad():
            layer.weight.copy_(weight)
    elif change == "data":
        layer.weight.data = weight
    else:
        layer.load_state_dict({"weight": weight, "bias": layer.bias.detach()})
    with torch.inference_mode():
        after = layer(x)
    torch.testing.assert_close(after, dense(layer, x))
    assert (after - before).abs().max() > 0.1


@needs_onednn
def test_a_trained_weight_is_not_copied(layer):
    """A fused optimizer does not change a tensor's version."""
    x = torch.randn(3, WIDE)
    with torch.inference_mode():
        before = layer(x)
        assert layer._copy is not None
    layer.requires_grad_(True)
    layer(x).sum().backward()
    torch.optim.AdamW(layer.parameters(), 0.1, fused=True).step()
    with torch.inference_mode():
        after = layer(x)
    # The update moves every weight by 0.1, and so outputs by tens; a copy of the old weights would be that far off.
    torch.testing.assert_close(after, dense(layer, x), rtol=1e-5, atol=1e-3)
    assert (after - before).abs().max() > 10
    layer.requires_grad_(False)
    with torch.inference_mode():
        torch.testing.assert_close(layer(x), after, rtol=1e-5, atol=1e-3)


def test_an_input_that_needs_a_gradient_gets_it_without_a_copy_of_the_weight(layer):
    x = torch.randn(3, WIDE, requires_grad=True)
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, layer.weight.detach().sum(0).expand(3, -1))
    assert layer._copy is None


@needs_onednn
@pytest.mark.parametrize("shape", [(5,), (2, 3)])
def test_a_trained_layer_has_torchs_gradients(shape):
    torch.manual_seed(0)
    ours = nn.Linear(WIDE, HIGH)
    theirs, x = copy.deepcopy(ours).double(), torch.randn(*shape, WIDE, requires_grad=True)
    pack_linears(ours)
    exact = x.detach().double().requires_grad_()
    weights = torch.randn(*shape, HIGH)
    out = ours(x)
    assert "_Trained" in type(out.grad_fn).__name__
    (out * weights).sum().backward()
    (theirs(exact) * weights).sum().backward()
    given = (x, ours.weight, ours.bias)
    for mine, other in zip(given, (exact, theirs.weight, theirs.bias), strict=True):
        torch.testing.assert_close(mine.grad, other.grad.float(), rtol=1e-5, atol=1e-5)
    assert ours._copy is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_other_dtypes_use_torchs_product(layer, dtype):
    layer.to(dtype)
    x = torch.randn(3, WIDE, dtype=dtype)
    with torch.no_grad():
        assert torch.equal(layer(x), dense(layer, x))
    assert layer._copy is None


@needs_onednn
@pytest.mark.parametrize("again", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_a_copied_module_leaves_the_packed_weight_out(layer, again):
    x = torch.randn(3, WIDE)
    with torch.no_grad():
        expected = layer(x)
        twin = again(layer)
        assert twin._copy is None
        assert torch.equal(twin(x), expected)


def test_only_plain_linears_are_packed_and_keep_their_parameters():
    class Own(nn.Linear):
        pass

    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": Own(4, 4), "c": nn.Sequential(nn.Linear(4, 4, bias=False))})
    model["c"][0].weight = model["a"].weight
    names, parts = set(model.state_dict()), list(model.modules())
    pack_linears(model)
    assert [type(part) for part in (model["a"], model["b"], model["c"][0])] == [PackedLinear, Own, PackedLinear]
    assert set(model.state_dict()) == names
    assert all(a is b for a, b in zip(model.modules(), parts, strict=True))
    assert model["c"][0].weight is model["a"].weight


@needs_onednn
def test_unpacked_linears_are_as_before():
    layer = nn.Linear(WIDE, HIGH).requires_grad_(False)
    before = sorted(vars(layer))
    parts = pack_linears(layer)
    with torch.no_grad():
        layer(torch.randn(1, WIDE))
    unpack_linears(parts)
    assert (type(layer), sorted(vars(layer))) == (nn.Linear, before)


@needs_onednn
def test_packing_again_drops_copies_whose_weight_may_have_changed_unseen(layer):
    x = torch.randn(3, WIDE)
    with torch.no_grad():
        layer(x)
        layer.weight.data.mul_(2)
        pack_linears(layer)
        torch.testing.assert_close(layer(x), dense(layer, x))


@needs_onednn
def test_a_compiled_model_traces_the_plain_product(layer):
    x = torch.randn(3, WIDE)
    with torch.no_grad():
        compiled = torch.compile(layer, backend="eager", fullgraph=True)
        assert torch.equal(compiled(x), dense(layer, x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rows", [1, 300])
def test_product_takes_any_strides(rows, dtype):
    x, matrix = torch.randn(rows, WIDE, dtype=dtype), torch.randn(HIGH, WIDE, dtype=dtype) / WIDE**0.5
    torch.testing.assert_close(product(x, matrix), x @ matrix.T)
    torch.testing.assert_close(product(x.T.contiguous().T, matrix), x @ matrix.T)
    torch.testing.assert_close(product(x, matrix.T.contiguous().T), x @ matrix.T)
    torch.testing.assert_close(product(matrix[:, ::2], x[:, ::2]), matrix[:, ::2] @ x[:, ::2].T)


@needs_onednn
def test_the_gradient_of_a_weight_that_reads_part_of_a_tensor_has_a_dense_matrix(monkeypatch):
    # oneDNN takes a thousand times as long for a matrix whose rows and columns both have gaps.
    given, real = [], linear._onednn
    monkeypatch.setattr(linear, "_onednn", lambda x, matrix, *bias: given.append(matrix) or real(x, matrix, *bias))
    layer = nn.Linear(WIDE, HIGH)
    pack_linears(layer)
    x = torch.randn(64, 2 * WIDE)
    layer(x[:, :WIDE]).sum().backward()
    torch.testing.assert_close(layer.weight.grad, x[:, :WIDE].sum(0).expand(HIGH, WIDE))
    assert len(given) == 2
    assert all(matrix.is_contiguous() or matrix.T.is_contiguous() for matrix in given)
