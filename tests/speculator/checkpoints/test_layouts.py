import json
import os
from pathlib import Path

import pytest
import torch
from checkpoint_folders import edit, edit_tensors, refused
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from speculator import MLPSpeculator, MLPSpeculatorConfig, UserError
from speculator.checkpoints import files, layout_of, load, load_any, native, recognise, save, tensor_shapes

GOLDEN = Path(__file__).parents[2] / "golden"
TIED = {"tie_weights": True, "scale_input": True}
PLAIN = {"tie_weights": False, "scale_input": False}
KINDS = [{"tie_weights": tied, "scale_input": scaled} for tied in (True, False) for scaled in (True, False)]


def head_of(n_predict: int = 3, **kind) -> MLPSpeculator:
    torch.manual_seed(1)
    recorded = {"base_model_name_or_path": "some/base", "trained_length": 64, "training_data": ["text"]}
    sizes = {"vocab_size": 20, "emb_dim": 12, "inner_dim": 8, "n_predict": n_predict}
    head = MLPSpeculator(MLPSpeculatorConfig(**sizes, **recorded, **kind))
    for norm in head.ln:  # with initial values a swap would not show
        torch.nn.init.normal_(norm.weight, mean=1.0, std=0.2)
        torch.nn.init.normal_(norm.bias, std=0.2)
    return head


IBM, ARCTIC, NATIVE = (layout_of(name, head_of()) for name in ("ibm", "arctic", "native"))


def logits(head: MLPSpeculator) -> torch.Tensor:
    hidden = torch.randn(2, 5, head.config.emb_dim, generator=torch.Generator().manual_seed(3)).to(head.dtype)
    tokens = torch.arange(2 * (4 + head.n_predict)).view(2, -1) * 3 % head.config.vocab_size
    with torch.no_grad():
        return head.logits(hidden, tokens)


def read_json(file: Path) -> dict:
    return json.loads(file.read_text())


@pytest.fixture
def ibm(tmp_path):
    """A tied and scaled head in IBM's layout."""
    save(head_of(4, **TIED), tmp_path / "ibm", IBM)
    return tmp_path / "ibm"


def golden(name: str, folder: Path) -> dict[str, torch.Tensor]:
    """Create a folder in IBM's layout from published tensors; return the inputs and logits."""
    with safe_open(GOLDEN / f"{name}.safetensors", "pt") as file:
        config = file.metadata()["config"]
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    folder.mkdir()
    (folder / "config.json").write_text(config)
    save_file({key: value for key, value in tensors.items() if not key.startswith("io.")}, folder / "model.safetensors")
    return {key: value for key, value in tensors.items() if key.startswith("io.")}


def repeat_tied(head: MLPSpeculator):
    """Change for `edit_tensors`: store tied tensors under every position's name too, as published heads have them."""
    names = {f"speculator.{name}": f"speculator.{source}" for name, source in head.aliases().items()}
    return lambda tensors: tensors.update({name: tensors[source].clone() for name, source in names.items()})


# --- there and back


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", [IBM, ARCTIC], ids=lambda layout: layout.name)
def test_round_trip_keeps_every_bit(tmp_path, layout, dtype, kind):
    head = head_of(**kind).to(dtype)
    head.save_pretrained(tmp_path / "native")
    save(load_any(tmp_path / "native"), tmp_path / "served", layout)
    save(load_any(tmp_path / "served"), tmp_path / "back", NATIVE)
    assert recognise(tmp_path / "served") is layout
    assert recognise(tmp_path / "back") is NATIVE
    again = MLPSpeculator.from_pretrained(tmp_path / "back")
    assert again.dtype == dtype
    assert again.state_dict().keys() == head.state_dict().keys()
    assert all(torch.equal(again.state_dict()[name], weight) for name, weight in head.state_dict().items())
    assert torch.equal(logits(again), logits(head))


def test_the_native_layout_equals_save_pretrained(tmp_path):
    head = head_of(**TIED)
    head.save_pretrained(tmp_path / "theirs")
    save(load_any(tmp_path / "theirs"), tmp_path / "ours", NATIVE)
    assert read_json(tmp_path / "ours" / "config.json") == read_json(tmp_path / "theirs" / "config.json")
    tensors = load_file(tmp_path / "ours" / "model.safetensors")
    assert tensors.keys() == head.state_dict().keys()
    assert "draft_tokens" not in tensors


@pytest.mark.parametrize("name", ["tied_scaled", "untied"])
@pytest.mark.parametrize("via", ["ibm", "native", "expanded"])
def test_published_tensors_give_the_published_logits(tmp_path, name, via):
    io = golden(name, tmp_path / "ibm")
    head = load_any(tmp_path / "ibm")
    if via == "native":
        save(head, tmp_path / "native", NATIVE)
        head = load_any(tmp_path / "native")
    if via == "expanded":
        edit_tensors(tmp_path / "ibm", repeat_tied(head))
        head = load_any(tmp_path / "ibm")
    with torch.no_grad():
        found = head.logits(io["io.hidden_states"], io["io.tokens"])
    torch.testing.assert_close(found, io["io.logits"], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["tied_scaled", "untied"])
def test_export_writes_the_published_names_and_fields(tmp_path, name):
    golden(name, tmp_path / "published")
    save(load_any(tmp_path / "published"), tmp_path / "ours", IBM)
    published, ours = (load_file(tmp_path / folder / "model.safetensors") for folder in ("published", "ours"))
    assert published.keys() == ours.keys()
    assert all(torch.equal(published[key], ours[key]) for key in ours)
    written = read_json(tmp_path / "ours" / "config.json")
    assert read_json(tmp_path / "published" / "config.json").items() <= written.items()


@pytest.fixture
def pruned(tmp_path):
    """A head that drafts from 5 of its 20 tokens."""
    head = head_of(**TIED, draft_vocab_size=5)
    head.draft_tokens.copy_(torch.tensor([1, 4, 9, 16, 19]))
    head.save_pretrained(tmp_path / "pruned")
    return tmp_path / "pruned"


def test_a_draft_vocabulary_round_trips_exactly(pruned):
    head = load_any(pruned)
    save(head, pruned.with_name("again"), NATIVE)
    for again in (load_any(pruned.with_name("again")), MLPSpeculator.from_pretrained(pruned.with_name("again"))):
        assert again.config.draft_vocab_size == 5
        assert again.draft_tokens.tolist() == [1, 4, 9, 16, 19]
        assert all(torch.equal(again.state_dict()[name], weight) for name, weight in head.state_dict().items())
        assert torch.equal(logits(again), logits(head))
    assert logits(head).isfinite().any(0).any(0).any(0).nonzero()[:, 0].tolist() == [1, 4, 9, 16, 19]


@pytest.mark.parametrize("layout", [IBM, ARCTIC], ids=lambda layout: layout.name)
def test_a_servers_layout_refuses_a_draft_vocabulary(pruned, layout):
    out = pruned.with_name("out")
    with pytest.raises(UserError, match="draft vocabulary"):
        save(load_any(pruned), out, layout)
    assert not out.exists()


@pytest.mark.parametrize(
    "tokens",
    [
        torch.tensor([1, 4, 9, 16, 20]),
        torch.tensor([4, 1, 9, 16, 19]),
        torch.tensor([1, 4, 9, 16]),
        torch.tensor([1, 4, 9, 16, 19]).float(),
        None,
    ],
)
def test_a_wrong_draft_vocabulary_fails_in_one_line(pruned, tokens):
    edit_tensors(pruned, lambda t: t.pop("draft_tokens") if tokens is None else t.update(draft_tokens=tokens))
    assert "draft_tokens" in refused(pruned)


# --- the table


@pytest.mark.parametrize(
    ("config", "published_bytes"),
    [
        ({"vocab_size": 128256, "emb_dim": 4096, "inner_dim": 3072, "n_predict": 4, **PLAIN}, 6_385_876_992),
        ({"vocab_size": 128256, "emb_dim": 8192, "inner_dim": 8192, "n_predict": 4, **TIED}, 4_471_160_832),
    ],
    ids=["llama3-8b-accelerator", "llama3-70b-accelerator"],
)
def test_the_tensors_have_the_bytes_of_the_published_files(config, published_bytes):
    with torch.device("meta"):
        shapes = tensor_shapes(MLPSpeculator(MLPSpeculatorConfig(**config))).values()
    assert sum(2 * torch.Size(shape).numel() for shape in shapes) == published_bytes


def test_tied_tensors_are_written_once_and_read_under_every_name(tmp_path):
    head = head_of(3, **TIED).half()
    save(head, tmp_path / "ibm", IBM)
    written = load_file(tmp_path / "ibm" / "model.safetensors")
    names = ["emb.0.weight", "head.0.weight", "ln.0.bias", "ln.0.weight", "proj.0.weight", "proj.1.weight"]
    assert sorted(written) == [f"speculator.{name}" for name in names]
    edit_tensors(tmp_path / "ibm", repeat_tied(head))
    every = load_file(tmp_path / "ibm" / "model.safetensors")
    parts = ("emb.{}.weight", "head.{}.weight", "ln.{}.bias", "ln.{}.weight", "proj.{}.weight")
    assert sorted(every) == sorted(f"speculator.{part.format(i)}" for part in parts for i in range(3))
    again = load_any(tmp_path / "ibm").state_dict()
    assert all(torch.equal(again[name], weight) for name, weight in head.state_dict().items())


def test_every_field_of_ibms_config_is_written(tmp_path):
    save(head_of(4, **PLAIN).half(), tmp_path / "out", IBM)
    written = read_json(tmp_path / "out" / "config.json")
    assert written.pop("transformers_version")
    assert written == {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "torch_dtype": "float16",
        "vocab_size": 20,
        "emb_dim": 12,
        "inner_dim": 8,
        "n_predict": 4,
        "top_k_tokens_per_head": [4, 3, 2, 2],
        "n_candidates": 4,
        "tie_weights": False,
        "scale_input": False,
        "base_model_name_or_path": "some/base",
        "trained_length": 64,
        "training_data": ["text"],
    }


@pytest.mark.parametrize("n_predict", [1, 2, 3, 5, 7])
def test_top_k_list_has_an_entry_per_head_and_enough_candidates(n_predict):
    """vLLM asserts the first, fms-extras needs the second."""
    fields = IBM.fields(head_of(n_predict, **PLAIN).config, "float16")
    widths = fields["top_k_tokens_per_head"]
    assert len(widths) == n_predict
    assert torch.tensor(widths).prod() >= fields["n_candidates"]


# --- reading what others wrote


def test_old_config_without_tie_and_scale_is_neither(tmp_path):
    save(head_of(**PLAIN), tmp_path / "old", IBM)
    edit(tmp_path / "old", lambda config: [config.pop(key) for key in ("tie_weights", "scale_input")])
    head = load_any(tmp_path / "old")
    assert not head.config.tie_weights
    assert not head.config.scale_input
    assert torch.equal(logits(head), logits(head_of(**PLAIN)))


@pytest.mark.parametrize("absent", [True, False])
def test_inner_dim_0_or_absent_means_emb_dim(tmp_path, absent):
    config = MLPSpeculatorConfig(vocab_size=20, emb_dim=12, inner_dim=12, n_predict=3, **PLAIN)
    save(MLPSpeculator(config), tmp_path / "ibm", IBM)
    edit(tmp_path / "ibm", lambda config: config.pop("inner_dim") if absent else config.update(inner_dim=0))
    assert load_any(tmp_path / "ibm").config.inner_dim == 12


def test_the_tensor_names_and_config_that_arctic_training_writes_are_read(ibm):
    """ArcticTraining writes these, with a misspelt key."""
    expected = logits(load_any(ibm))
    torch.save(
        {k.removeprefix("speculator."): v for k, v in files.read_tensors(ibm).items()}, ibm / "pytorch_model.bin"
    )
    (ibm / "model.safetensors").unlink()

    def as_arctic_training(config):
        config["architectures"] = "MLPSpeculatorPreTrainedModel"
        config["top_k_tokesns_per_head"] = config.pop("top_k_tokens_per_head")

    edit(ibm, as_arctic_training)
    assert torch.equal(logits(load_any(ibm)), expected)
    save(load_any(ibm), ibm.with_name("fixed"), IBM)
    fixed = read_json(ibm.with_name("fixed") / "config.json")
    assert fixed["architectures"] == ["MLPSpeculatorPreTrainedModel"]
    assert len(fixed["top_k_tokens_per_head"]) == 4


def test_a_tied_pickle_with_shared_storage_is_read(ibm):
    """Tied heads were first published like this."""
    head = head_of(4, **TIED)
    state = {f"speculator.{name}": head.state_dict()[name] for name in tensor_shapes(head)}
    parts = ("emb.{}.weight", "head.{}.weight", "ln.{}.bias", "ln.{}.weight", "proj.{}.weight")
    for part in parts:
        first = 1 if "proj" in part else 0
        for i in range(first, 4):
            state[f"speculator.{part.format(i)}"] = state[f"speculator.{part.format(first)}"]
    (ibm / "model.safetensors").unlink()
    torch.save(state, ibm / "pytorch_model.bin")
    assert torch.equal(logits(load_any(ibm)), logits(head))


@pytest.fixture
def sharded(ibm):
    tensors = load_file(ibm / "model.safetensors")
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    where = {key: names[i % 2] for i, key in enumerate(sorted(tensors))}
    for name in names:
        save_file({key: tensors[key] for key in tensors if where[key] == name}, ibm / name)
    (ibm / "model.safetensors").unlink()
    (ibm / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return ibm


def test_a_sharded_checkpoint_is_read(sharded):
    assert torch.equal(logits(load_any(sharded)), logits(head_of(4, **TIED)))


def test_a_missing_shard_or_index_fails_in_one_line(sharded):
    index, last = sharded / "model.safetensors.index.json", sharded / "model-00002-of-00002.safetensors"
    right = index.read_text()
    for wrong in ("{}", '{"weight_map": {"a": 5}}'):
        index.write_text(wrong)
        assert "weight_map" in refused(sharded)
    index.write_text(right)
    last.unlink()
    assert last.name in refused(sharded)


# --- errors


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda t: t.update({"speculator.emb.9.weight": torch.zeros(2)}), "emb.9"),
        (lambda t: t.pop("speculator.ln.0.bias"), "ln.0.bias"),
        (lambda t: t.update({"speculator.ln.1.bias": t["speculator.ln.0.bias"].clone()}), "missing"),
        (lambda t: t.update({"speculator.proj.0.weight": torch.zeros(8, 8)}), "proj.0.weight is [8, 8]"),
        (lambda t: t["speculator.head.0.weight"].fill_(float("nan")), "not finite"),
        (lambda t: t.update({"speculator.ln.0.bias": torch.zeros(8).half()}), "float16"),
        (lambda t: t.update({"ln.0.bias": t.pop("speculator.ln.0.bias")}), "unexpected"),
    ],
)
def test_a_wrong_tensor_fails_in_one_line(ibm, change, name):
    edit_tensors(ibm, change)
    assert name in refused(ibm)


def test_tied_copies_that_differ_are_refused(tmp_path):
    head = head_of(**TIED)
    save(head, tmp_path / "all", IBM)
    edit_tensors(tmp_path / "all", repeat_tied(head))
    edit_tensors(tmp_path / "all", lambda tensors: tensors["speculator.proj.2.weight"].add_(1))
    assert "proj.2.weight" in refused(tmp_path / "all")


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"architectures": ["EagleModel"]}, "MLPSpeculatorPreTrainedModel"),
        ({"architectures": ["MLPSpeculatorPreTrainedModel", "MLPSpeculatorPreTrainedModel"]}, "architectures"),
        ({"top_k_tokens_per_head": [5, 4, 3]}, "n_predict"),
        ({"n_predict": "4"}, "n_predict"),
        ({"tie_weights": 1}, "tie_weights"),
        ({"tie_weights": False}, "tie_weights is false"),
        ({"n_predict": 1, "top_k_tokens_per_head": [4]}, "nothing to tie"),
        ({"vocab_size": 21}, "[21, 8]"),
    ],
)
def test_a_wrong_config_fails_in_one_line(ibm, change, key):
    edit(ibm, lambda config: config.update(change))
    assert key in refused(ibm)


@pytest.mark.parametrize("key", ["vocab_size", "emb_dim", "n_predict"])
def test_a_missing_field_is_named(ibm, key):
    edit(ibm, lambda config: config.pop(key))
    assert key in refused(ibm)


class Evil:
    def __reduce__(self):
        return os.mkdir, ("opened",)


def test_damaged_files_fail_in_one_line(ibm, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    whole = (ibm / "model.safetensors").read_bytes()
    for size in (0, 100, len(whole) - 1):
        (ibm / "model.safetensors").write_bytes(whole[:size])
        assert "model.safetensors" in refused(ibm)
    (ibm / "model.safetensors").unlink()
    assert "no weights" in refused(ibm)
    for evil in (Evil(), {"speculator.emb.0.weight": Evil()}, {"model_state": {"a": torch.ones(1)}}):
        torch.save(evil, ibm / "pytorch_model.bin")
        assert "pytorch_model.bin" in refused(ibm)
    assert not Path("opened").exists()
    (ibm / "pytorch_model.bin").write_bytes(b"")
    assert "pytorch_model.bin" in refused(ibm)
    for content in ('{"architectures": [', "[]"):
        (ibm / "config.json").write_text(content)
        assert "config.json" in refused(ibm)
    (ibm / "config.json").unlink()
    assert "config.json" in refused(ibm)


# --- writing


def test_only_a_new_or_empty_folder_is_written(tmp_path):
    used, empty = tmp_path / "used", tmp_path / "empty"
    used.mkdir()
    empty.mkdir()
    (used / "mine.txt").write_text("keep")
    with pytest.raises(UserError, match="not empty"):
        save(head_of(**TIED), used, IBM)
    assert [file.name for file in used.iterdir()] == ["mine.txt"]
    save(head_of(**TIED), empty, IBM)
    assert sorted(file.name for file in empty.iterdir()) == ["config.json", "model.safetensors"]
    assert len({file.stat().st_mode for file in empty.iterdir()}) == 1


def test_a_killed_export_can_be_repeated(tmp_path):
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "config.json").write_text("{")
    save(head_of(**TIED), tmp_path / "out", IBM)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    def full(*arguments, **settings):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        save(head_of(**TIED), tmp_path / "out", IBM)
    assert not list(tmp_path.iterdir())


def test_the_written_head_is_compared_with_the_original(tmp_path, monkeypatch):
    """Known-wrong writers, and a head whose alpha belongs to another n_predict."""

    def wrong(field, change):
        write = files.write

        def writer(folder, config, tensors):
            write(folder, {**config, **field}, change(tensors))

        with monkeypatch.context() as patched:
            patched.setattr(files, "write", writer)
            with pytest.raises(UserError, match=r"differs|n_predict") as error:
                save(head_of(**TIED), tmp_path / "out", IBM)
        assert not list(tmp_path.iterdir())
        return str(error.value)

    assert "weights, logits" in wrong({}, lambda t: {**t, "speculator.ln.0.bias": t["speculator.ln.0.bias"] + 1})
    assert "config.json, logits" in wrong({"scale_input": False}, lambda t: t)
    assert "config.json;" in wrong({"n_candidates": 9}, lambda t: t)
    assert "tensors;" in wrong({}, lambda t: {k.removeprefix("speculator."): v for k, v in t.items()})
    head = head_of(**TIED)
    head.alpha *= 1.01
    with pytest.raises(UserError, match="logits"):
        save(head, tmp_path / "out", IBM)


def test_invalid_heads_are_refused(tmp_path):
    head = head_of(**TIED)
    head.ln[0].bias.data[0] = float("inf")
    with pytest.raises(UserError, match="not finite"):
        save(head, tmp_path / "out", IBM)
    assert not list(tmp_path.iterdir())


class GatedConfig(MLPSpeculatorConfig):
    gated: bool = False
    width: int | None = None
    name_of_gate: str = "sigmoid"


class GatedSpeculator(MLPSpeculator):
    config_class = GatedConfig


def test_config_fields_of_a_new_architecture_survive_save_and_load(tmp_path):
    made = GatedSpeculator(GatedConfig(vocab_size=20, emb_dim=12, inner_dim=8, gated=True, width=3))
    layout = native.native_layout(GatedSpeculator)
    save(made, tmp_path / "head", layout)
    again = load(tmp_path / "head", layout).config
    assert (again.gated, again.width, again.name_of_gate) == (True, 3, "sigmoid")
    edit(tmp_path / "head", lambda config: config.update(width="three"))
    with pytest.raises(UserError, match="width"):
        load(tmp_path / "head", layout)


@pytest.mark.parametrize("architecture", ["LSTMSpeculator", "ArcticLSTMSpeculatorPreTrainedModel"])
def test_an_lstm_head_is_refused_by_name(ibm, architecture):
    edit(ibm, lambda config: config.update(architectures=[architecture]))
    assert "lstm is gone: an LSTM head accepted as much as an MLP head and cost more" in refused(ibm)
