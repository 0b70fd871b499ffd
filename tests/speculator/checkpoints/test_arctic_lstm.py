import json

import pytest
import torch
from checkpoint_folders import refused
from safetensors.torch import load_file, save_file

from speculator import LSTMSpeculator, LSTMSpeculatorConfig, UserError
from speculator.__main__ import main
from speculator.checkpoints import layout_of, load_any, recognise, save
from speculator.checkpoints.arctic_lstm import ARCTIC_LSTM
from speculator.checkpoints.ibm import IBM

GATES = ("forget", "input", "output", "cell")


def head_of(n_predict: int = 3, **changes) -> LSTMSpeculator:
    torch.manual_seed(1)
    recorded = {"base_model_name_or_path": "some/base", "trained_length": 64, "training_data": ["text"]}
    sizes = {"vocab_size": 20, "emb_dim": 12, "inner_dim": 8, "n_predict": n_predict, **changes}
    head = LSTMSpeculator(LSTMSpeculatorConfig(**sizes, **recorded))
    for norm in (head.cell_ln[0], head.state_ln[0]):
        torch.nn.init.normal_(norm.weight, mean=1.0, std=0.2)
        torch.nn.init.normal_(norm.bias, std=0.2)
    return head


def inputs(head) -> tuple[torch.Tensor, torch.Tensor]:
    hidden = torch.randn(2, 5, head.config.emb_dim, generator=torch.Generator().manual_seed(3)).to(head.dtype)
    return hidden, torch.arange(2 * (4 + head.n_predict)).view(2, -1) * 3 % head.config.vocab_size


@pytest.fixture
def arctic(tmp_path):
    save(head_of(), tmp_path / "arctic", ARCTIC_LSTM)
    return tmp_path / "arctic"


def edit(folder, **changes):
    config = json.loads((folder / "config.json").read_text()) | changes
    left = {name: value for name, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(left))


# --- there and back


@pytest.mark.parametrize("scale_input", [True, False])
@pytest.mark.parametrize("expand_tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip_keeps_every_bit(tmp_path, dtype, expand_tied, scale_input):
    head = head_of(scale_input=scale_input).to(dtype)
    head.save_pretrained(tmp_path / "native")
    save(load_any(tmp_path / "native"), tmp_path / "served", ARCTIC_LSTM, expand_tied)
    native = layout_of("native", head)
    save(load_any(tmp_path / "served"), tmp_path / "back", native)
    assert recognise(tmp_path / "served") is ARCTIC_LSTM
    assert recognise(tmp_path / "back") is native
    again = LSTMSpeculator.from_pretrained(tmp_path / "back")
    assert again.dtype == dtype
    assert again.state_dict().keys() == head.state_dict().keys()
    assert all(torch.equal(again.state_dict()[name], weight) for name, weight in head.state_dict().items())
    assert torch.equal(again.logits(*inputs(head)), head.logits(*inputs(head)))


def test_every_field_of_arctics_config_is_written(tmp_path, target_folder):
    head = head_of().half()
    head.config.base_model_name_or_path = str(target_folder)
    save(head, tmp_path / "out", ARCTIC_LSTM)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written.pop("transformers_version")
    assert written == {
        "architectures": ["ArcticLSTMSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "torch_dtype": "float16",
        "vocab_size": 20,
        "input_hidden_dim": 12,
        "inner_dim": "8",
        "proj_dim": "8",
        "emb_dim": "8",
        "n_predict": 3,
        "top_k_tokens_per_head": [1, 1, 1],
        "n_candidates": 3,
        "tie_weights": True,
        "scale_input": True,
        "method": "sum_lstm",
        "tie_lstm_embs": True,
        "base_model_name_or_path": str(target_folder),
        "trained_length": 64,
        "training_data": ["text"],
        "base_model_archs": ["LlamaForCausalLM"],
    }


def as_served(folder) -> torch.Tensor:
    """Compute logits from a folder as arctic-inference does: gates fused by bare name, split in the same order."""
    config = json.loads((folder / "config.json").read_text())
    stored = load_file(folder / "model.safetensors")
    n, inner = config["n_predict"], int(config["inner_dim"].split(".")[0])
    fused = [torch.cat([stored.pop(f"{gate}_proj.{i}.weight") for gate in GATES]) for i in (0, 1)]
    state_weight = 0.5 ** (0.5 / n)
    alpha = ((1 - state_weight**2) * inner / 2) ** 0.5 / state_weight

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        scaled = x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
        return torch.nn.functional.gelu(stored[f"{name}.0.weight"] * scaled + stored[f"{name}.0.bias"])

    hidden, tokens = inputs(head_of())
    state = hidden / (hidden.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() / 2**0.5 if config["scale_input"] else hidden
    cell, logits = torch.zeros(*hidden.shape[:-1], inner), []
    for i in range(n):
        token = stored["forget_emb.0.weight"][tokens[:, i : i + hidden.shape[1]]]
        gates = state @ fused[min(i, 1)].T + alpha * token.repeat(1, 1, 4)
        forget, take, give, candidate = gates.split(inner, dim=-1)
        cell = cell * torch.sigmoid(forget) + norm(candidate, "cell_ln") * torch.sigmoid(take)
        state = torch.sigmoid(give) * norm(cell, "state_ln")
        logits.append(state @ stored["head.0.weight"].T)
    return torch.stack(logits)


@pytest.mark.parametrize("scale_input", [True, False])
def test_the_servers_logits_are_the_heads(tmp_path, scale_input):
    head = head_of(scale_input=scale_input)
    save(head, tmp_path / "out", ARCTIC_LSTM)
    torch.testing.assert_close(as_served(tmp_path / "out"), head.logits(*inputs(head)), atol=1e-5, rtol=0)


def test_tensors_have_the_bare_names_of_arctic(arctic):
    projections = {f"{gate}_proj.{i}.weight" for gate in GATES for i in (0, 1)}
    norms = {f"{part}_ln.0.{kind}" for part in ("cell", "state") for kind in ("weight", "bias")}
    names = projections | norms | {"forget_emb.0.weight", "head.0.weight"}
    assert load_file(arctic / "model.safetensors").keys() == names


def test_a_pickle_of_arctic_training_is_read(arctic):
    """It has every tied tensor under all of its names, and no base_model_archs."""
    expected = load_any(arctic)
    stored = load_file(arctic / "model.safetensors")
    stored |= {f"{gate}_emb.0.weight": stored["forget_emb.0.weight"] for gate in ("input", "output", "cell")}
    stored |= {f"head.{i}.weight": stored["head.0.weight"] for i in (1, 2)}
    torch.save(stored, arctic / "pytorch_model.bin")
    (arctic / "model.safetensors").unlink()
    head = load_any(arctic)
    assert torch.equal(head.logits(*inputs(head)), expected.logits(*inputs(expected)))


def test_the_other_architecture_and_integer_widths_are_read(arctic):
    edit(arctic, architectures=["MLPVariantSpeculatorPreTrainedModel"], inner_dim=8, proj_dim=8, emb_dim=8)
    assert recognise(arctic) is ARCTIC_LSTM
    assert load_any(arctic).config.inner_dim == 8


# --- errors


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"architectures": "ArcticLSTMSpeculatorPreTrainedModel"}, "architectures"),
        ({"method": "sum_rnn"}, "method"),
        ({"tie_lstm_embs": False}, "tie_lstm_embs"),
        ({"tie_weights": False}, "untied"),
        ({"inner_dim": "8.4"}, "inner_dim"),
        ({"emb_dim": "4"}, "emb_dim"),
        ({"input_hidden_dim": None}, "input_hidden_dim"),
        ({"input_hidden_dim": 11}, "[8, 11]"),
        ({"n_predict": 4}, "top_k_tokens_per_head"),
    ],
)
def test_a_wrong_config_fails_in_one_line(arctic, changes, key):
    edit(arctic, **changes)
    assert key in refused(arctic)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda t: t.pop("cell_ln.0.bias"), "cell_ln.0.bias"),
        (lambda t: t.update({"input_emb.0.weight": torch.zeros(20, 8)}), "missing"),
        (lambda t: t.update({"forget_proj.2.weight": torch.zeros(8, 8)}), "forget_proj.2.weight"),
        (lambda t: [t.update({f"speculator.{name}": t.pop(name)}) for name in list(t)], "speculator."),
    ],
)
def test_a_wrong_tensor_fails_in_one_line(arctic, change, name):
    stored = load_file(arctic / "model.safetensors")
    change(stored)
    save_file(stored, arctic / "model.safetensors")
    assert name in refused(arctic)


# --- commands


def test_ibms_layout_refuses_an_lstm_head(tmp_path, capsys):
    head_of().save_pretrained(tmp_path / "head")
    argv = ["export", "--speculator", str(tmp_path / "head"), "--output", str(tmp_path / "out"), "--format"]
    capsys.readouterr()
    assert main([*argv, "ibm"]) == 2
    shown = capsys.readouterr()
    assert "arctic, vllm-plugin, native" in shown.err
    assert not shown.out
    with pytest.raises(UserError, match="LSTMSpeculator"):
        save(head_of(), tmp_path / "out", IBM)
    assert not (tmp_path / "out").exists()
    assert main([*argv, "arctic"]) == 0
    assert "loads in arctic-inference 0.3.0" in capsys.readouterr().out
