"""Packed products: equal to torch's own, never stale, and taken where they were seen to be faster."""

import copy
import json
import pickle
import time

import pytest
import torch
from torch import nn

from speculator.target import linear
from speculator.target.linear import FAST_DTYPES, TIMED_ROWS, PackedLinear, pack_linears, product, unpack_linears

WIDE, HIGH = 512, 640  # one row is enough to be packed

needs_onednn = pytest.mark.skipif(not FAST_DTYPES, reason="no oneDNN here")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A folder of its own, and nothing known."""
    monkeypatch.setenv("SPECULATOR_CACHE", str(tmp_path))
    monkeypatch.setattr(linear, "_known", {})
    return tmp_path / "products"


@pytest.fixture
def timed(monkeypatch):
    """The shapes that were timed, with a choice in place of a clock's."""
    shapes = []
    monkeypatch.setattr(linear, "_timed", lambda weights, limit: shapes.append(tuple(weights[0].shape)) or CHOSEN)
    return shapes


CHOSEN = [True, False, False, True, False, True]


@pytest.fixture
def layer(monkeypatch):
    monkeypatch.setattr(linear, "_timed", lambda weights, limit: [])
    torch.manual_seed(0)
    layer = nn.Linear(WIDE, HIGH).requires_grad_(False)
    pack_linears(layer)
    return layer


def dense(layer, x):
    return nn.functional.linear(x, layer.weight, layer.bias)


@needs_onednn
@pytest.mark.parametrize("dtype", FAST_DTYPES)
@pytest.mark.parametrize("shape", [(1,), (5,), (2, 3), (64,)])
def test_products_are_torchs_own(layer, shape, dtype):
    layer.to(dtype)
    x = torch.randn(*shape, WIDE, dtype=dtype)
    with torch.no_grad():
        ours, theirs = layer(x), dense(layer, x)
    assert layer._copy is not None
    torch.testing.assert_close(ours, theirs)


@needs_onednn
@pytest.mark.parametrize(
    ("rows", "packed"), [(1, True), (2, False), (3, False), (4, True), (5, True), (8, False), (9, True), (64, True)]
)
def test_a_product_goes_the_way_that_was_chosen_for_its_rows(timed, rows, packed):
    layer = nn.Linear(WIDE, HIGH).requires_grad_(False)
    pack_linears(layer)
    with torch.no_grad():
        layer(torch.randn(1, rows, WIDE))
    assert (layer._copy is not None) == packed


@needs_onednn
@pytest.mark.parametrize("shape", [(1,), (16,), (0,), (64,)])
def test_a_matrix_that_gains_nothing_is_never_copied(monkeypatch, shape):
    monkeypatch.setattr(linear, "_timed", lambda weights, limit: [False] * len(TIMED_ROWS))
    layer = nn.Linear(WIDE, HIGH).requires_grad_(False)
    pack_linears(layer)
    x = torch.randn(*shape, WIDE)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), dense(layer, x))
    assert layer._copy is None


@needs_onednn
def test_a_shape_is_timed_once_on_a_machine(timed, cache, monkeypatch):
    pack_linears(nn.ModuleList([nn.Linear(WIDE, HIGH), nn.Linear(WIDE, HIGH), nn.Linear(HIGH, WIDE), nn.Linear(8, 8)]))
    monkeypatch.setattr(linear, "_known", {})  # another process
    again = nn.ModuleList([nn.Linear(WIDE, HIGH), nn.Linear(WIDE, WIDE)])
    pack_linears(again)
    assert [part.packs for part in again] == [CHOSEN, CHOSEN]
    assert sorted(timed) == sorted([(HIGH, WIDE), (WIDE, HIGH), (WIDE, WIDE)])
    (file,) = cache.glob("*.json")
    assert f"{torch.get_num_threads()}-threads-torch-{torch.__version__}" in file.name
    assert json.loads(file.read_text())[f"torch.float32 {WIDE}x{HIGH}"] == CHOSEN


@needs_onednn
@pytest.mark.parametrize("content", ["", "[1]", "{}", '{"torch.float32 512x640": [true]}', '{"a": 1}'])
def test_a_damaged_file_is_made_again(timed, cache, content, monkeypatch):
    pack_linears(nn.Linear(WIDE, HIGH))
    (file,) = cache.glob("*.json")
    file.write_text(content)
    monkeypatch.setattr(linear, "_known", {})
    pack_linears(nn.Linear(WIDE, HIGH))
    assert len(timed) == 2
    assert json.loads(file.read_text()) == {f"torch.float32 {WIDE}x{HIGH}": CHOSEN}


@needs_onednn
def test_without_a_cache_folder_a_process_times_once(timed, cache):
    cache.write_text("no folder")
    for _ in range(2):
        layer = nn.Linear(WIDE, HIGH)
        pack_linears(layer)
        assert layer.packs == CHOSEN
    assert len(timed) == 1


@needs_onednn
def test_on_a_machine_too_busy_to_tell_nothing_changes_in_any_later_run_either(cache, monkeypatch):
    monkeypatch.setattr(linear, "_SECONDS", 0)
    layer = nn.Linear(WIDE, HIGH)
    pack_linears(layer)
    assert layer.packs is None
    monkeypatch.setattr(linear, "_known", {})
    monkeypatch.setattr(linear, "_SECONDS", 0.8)
    later = nn.Linear(WIDE, HIGH)
    pack_linears(later)
    assert later.packs is None


@needs_onednn
@pytest.mark.parametrize("stall", [0, 7])
@pytest.mark.parametrize(
    ("own", "large", "small"),  # torch's own time over the packed product's; whether to pack
    [
        (0.5, [False] * 6, [False] * 6),
        (0.95, [True] * 6, [False] * 5 + [True]),
        (1.05, [True] * 6, [False] * 5 + [True]),
        (2, [True] * 6, [True] * 6),
    ],
)
def test_only_a_clear_gain_moves_from_the_usual_way(monkeypatch, own, large, small, stall):
    """One in seven calls is lengthened by what else runs."""
    now, calls = [0.0], [0]

    def spend(seconds):
        calls[0] += 1
        now[0] += seconds * (10 if stall and calls[0] % stall == 0 else 1)

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(nn.functional, "linear", lambda x, weight: spend(own * 1e-3))
    monkeypatch.setattr(linear, "_onednn", lambda x, weight: spend(1e-3))
    assert linear._timed([torch.ones(512, 512)], 9) == large
    assert linear._timed([torch.ones(128, 128)], 9) == small


@needs_onednn
def test_a_real_timing_keeps_to_its_time():
    weights = [torch.randn(HIGH, WIDE) for _ in range(3)]
    started = time.perf_counter()
    packs = linear._timed(weights, 0.1)
    assert time.perf_counter() - started < 2
    assert packs == [] or [type(each) for each in packs] == [bool] * len(TIMED_ROWS)


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
def test_a_weight_that_is_trained_is_not_copied(layer):
    """torch's fused optimizers leave a tensor's version as it was."""
    layer.requires_grad_(True)
    x = torch.randn(3, WIDE)
    with torch.inference_mode():
        before = layer(x)
    layer(x).sum().backward()
    torch.optim.AdamW(layer.parameters(), 0.1, fused=True).step()
    with torch.inference_mode():
        after = layer(x)
    torch.testing.assert_close(after, dense(layer, x))
    assert (after - before).abs().max() > 0.1


def test_gradients_are_kept(layer):
    x = torch.randn(3, WIDE, requires_grad=True)
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, layer.weight.detach().sum(0).expand(3, -1))
    assert layer._copy is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_other_dtypes_go_torchs_way(layer, dtype):
    layer.to(dtype)
    x = torch.randn(3, WIDE, dtype=dtype)
    with torch.no_grad():
        assert torch.equal(layer(x), dense(layer, x))
    assert layer._copy is None


@needs_onednn
def test_a_moved_dtype_does_not_use_the_old_copy(layer):
    x = torch.randn(3, WIDE)
    with torch.no_grad():
        layer(x)
        layer.double()
        assert torch.equal(layer(x.double()), dense(layer, x.double()))


@needs_onednn
@pytest.mark.parametrize("again", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_a_copy_packs_its_own(layer, again):
    x = torch.randn(3, WIDE)
    with torch.no_grad():
        expected = layer(x)
        twin = again(layer)
        assert twin._copy is None
        assert torch.equal(twin(x), expected)


def test_only_plain_linears_change_and_nothing_else_of_them():
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
def test_plain_again_nothing_is_left_on_them_and_the_copies_serve_once_more(timed):
    layer = nn.Linear(WIDE, HIGH).requires_grad_(False)
    before = sorted(vars(layer))
    parts = pack_linears(layer)
    with torch.no_grad():
        layer(torch.randn(1, WIDE))
    copied = layer._copy
    copies = unpack_linears(parts)
    assert (type(layer), sorted(vars(layer))) == (nn.Linear, before)
    pack_linears(layer, copies)
    assert layer._copy is copied


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
