"""The vLLM plugin's model drafts what our head drafts, driven as vLLM's proposer drives it.

vLLM itself is a stand-in here; `make serving` runs the real one.
"""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from speculator.checkpoints import layout_of, load_any, save
from speculator.heads import MLPSpeculator, MLPSpeculatorConfig

ROOT = Path(__file__).parents[2] / "integrations" / "vllm"
V, D, N = 40, 32, 4
KINDS = {
    "tied": {},
    "one step": {"tie_weights": False, "n_predict": 1},
    "wider than the target": {"inner_dim": 48},
    "narrow": {"inner_dim": 8, "draft_vocab_size": 17},
    "wide": {"inner_dim": 48, "scale_input": False, "draft_vocab_size": 17},
}


class EagleProposer:
    """vLLM 0.32's, without attention and sampling."""

    def __init__(self, model, rows: int, dtype: torch.dtype):
        self.model = model
        self.input_ids = torch.zeros(rows, dtype=torch.int32)
        self.positions = torch.zeros(rows, dtype=torch.int64)
        self.hidden_states = torch.zeros(rows, D, dtype=dtype)

    def propose(
        self,
        num_speculative_tokens,
        target_token_ids,
        target_hidden_states,
        next_token_ids,
        token_indices_to_sample,
    ):
        count, batch_size = len(target_token_ids), len(token_indices_to_sample)
        self.input_ids[: count - 1] = target_token_ids[1:]
        self.input_ids[token_indices_to_sample] = next_token_ids.int()
        self.hidden_states[:count] = target_hidden_states
        rows, chosen, drafts, logits = count, token_indices_to_sample, [], []
        for _ in range(num_speculative_tokens):
            model_kwargs = {"input_ids": self.input_ids[:rows], "hidden_states": self.hidden_states[:rows]}
            model_kwargs |= {"positions": self.positions[:rows], "inputs_embeds": None}
            ret_hidden_states = self.model(**model_kwargs)
            last_hidden_states, hidden_states = ret_hidden_states
            logits.append(self.model.compute_logits(last_hidden_states[chosen]))
            drafts.append(logits[-1].argmax(-1))
            # A graph's batch has rows that nobody asked for, and they hold what was there before.
            rows = min(batch_size + 3, len(self.input_ids))
            self.input_ids[:batch_size] = drafts[-1].int()
            self.hidden_states[:batch_size] = hidden_states[chosen]
            chosen = torch.arange(batch_size)
        return torch.stack(drafts, 1), torch.stack(logits)


class WeightTransferEngine:
    def __init__(self, config, vllm_config, device, model):
        self.model = vllm_config.drafter

    def __class_getitem__(cls, kinds):
        return cls


@pytest.fixture
def plugin(monkeypatch) -> ModuleType:
    class Attention(torch.nn.Module):
        def __init__(self, *args, **kwargs):
            super().__init__()

    parts = {
        "vllm": {"__version__": "0.32.0+cpu"},
        "vllm.config": {"VllmConfig": object},
        "vllm.logger": {"init_logger": lambda name: SimpleNamespace(warning=print)},
        "vllm.model_executor.layers.attention": {"Attention": Attention},
        "vllm.v1.spec_decode.eagle": {"EagleProposer": EagleProposer},
        "vllm.distributed.weight_transfer.base": {
            "WeightTransferEngine": WeightTransferEngine,
            **dict.fromkeys(("WeightTransferInitInfo", "WeightTransferUpdateInfo"), object),
        },
        "vllm.model_executor.model_loader.reload": {
            "initialize_layerwise_reload": lambda model: None,
            "finalize_layerwise_reload": lambda model, config: None,
        },
    }
    for name, held in parts.items():
        for i in range(name.count(".") + 1):
            package = ".".join(name.split(".")[: i + 1])
            if package not in sys.modules:
                monkeypatch.setitem(sys.modules, package, ModuleType(package))
        vars(sys.modules[name]).update(held)
    monkeypatch.syspath_prepend(str(ROOT))
    for name in ("speculator_vllm", "speculator_vllm.model", "speculator_vllm.weights"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("speculator_vllm.model")


def our_head(kind: str, dtype: torch.dtype = torch.float32):
    torch.manual_seed(0)
    shape = {"vocab_size": V, "emb_dim": D, "inner_dim": D, "n_predict": N} | KINDS[kind]
    made = MLPSpeculator(MLPSpeculatorConfig(**shape)).to(dtype)
    for name, weight in made.named_parameters():
        if "ln" in name:
            torch.nn.init.normal_(weight, mean=float("bias" not in name), std=0.3)
    if made.draft_tokens is not None:
        made.draft_tokens.copy_(torch.randperm(V)[: len(made.draft_tokens)].sort().values)
    return made.eval()


def engine(config: dict, rows: int = 64, **changes) -> SimpleNamespace:
    """The part of a VllmConfig that the model reads."""
    about = {"hf_config": SimpleNamespace(**config)}
    target = SimpleNamespace(
        get_hidden_size=lambda: changes.get("width", D),
        get_vocab_size=lambda: V,
        get_head_size=lambda: 8,
        get_num_kv_heads=lambda parallel: 2,
        get_num_attention_heads=lambda parallel: 4,
        get_num_layers=lambda parallel: 12,
    )
    speculative = SimpleNamespace(
        method=changes.get("method", "eagle"),
        num_speculative_tokens=changes.get("tokens", 1),
        draft_model_config=SimpleNamespace(**about),
    )
    return SimpleNamespace(
        speculative_config=speculative,
        model_config=target,
        parallel_config=None,
        cache_config=None,
        scheduler_config=SimpleNamespace(max_num_batched_tokens=rows),
    )


def served(plugin: ModuleType, folder: Path, rows: int = 64, **changes):
    """The plugin's model with what an export wrote, as vLLM reads it."""
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    names = importlib.import_module("speculator_vllm").ARCHITECTURES
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, config["dtype"]))
    try:
        model = getattr(plugin, names[config["architectures"][0]])(vllm_config=engine(config, rows, **changes))
    finally:
        torch.set_default_dtype(before)
    assert model.load_weights(tensors.items()) == {name for name, _ in model.named_parameters()}
    return model


def ours(head, hidden: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Drafts [B, N] and logits [N, B, V] of hidden states [B, D] and the tokens after them [B]."""
    state, drafts, logits = head.start(hidden), [tokens], []
    for i in range(head.n_predict):
        state, made = head.step(i, state, drafts[-1])
        logits.append(made)
        drafts.append(made.argmax(-1))
    return torch.stack(drafts[1:], 1), torch.stack(logits)


@torch.inference_mode()
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_the_heads_whatever_is_called_in_between(tmp_path, plugin, kind):
    head = our_head(kind)
    save(head, tmp_path / "head", layout_of("vllm-plugin", head))
    model = served(plugin, tmp_path / "head")
    proposer = EagleProposer(model, 64, torch.float32)
    for batch, length in ((3, head.n_predict), (1, 1), (5, head.n_predict), (2, 0), (4, head.n_predict)):
        if length == 0:  # an idle process runs what lies in the buffers, once or more often
            for _ in range(batch):
                model(proposer.input_ids[:7], proposer.positions[:7], proposer.hidden_states[:7])
            continue
        # Chunks of prompts and single tokens side by side; behind a row's last accepted token lie refused ones.
        counts = torch.randint(1, 12, (batch,))
        ends = counts.cumsum(0)
        chosen = ends - 1 - (torch.rand(batch) * (counts - 1)).long()
        hidden, tokens = torch.randn(int(ends[-1]), D), torch.randint(V, (int(ends[-1]),))
        following = torch.randint(V, (batch,))
        drafts, logits = proposer.propose(length, tokens, hidden, following, chosen)
        expected, theirs = ours(head, hidden[chosen], following)
        assert torch.equal(drafts, expected[:, :length])
        torch.testing.assert_close(logits, theirs[:length], rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_rows_are_found_in_bfloat16_beyond_its_whole_numbers(tmp_path, plugin):
    """In bfloat16 257 is 256: a row's number is kept in digits."""
    head = our_head("tied", torch.bfloat16)
    save(head, tmp_path / "head", layout_of("vllm-plugin", head))
    proposer = EagleProposer(served(plugin, tmp_path / "head", rows=40000), 40000, torch.bfloat16)
    hidden, tokens = torch.randn(40000, D, dtype=torch.bfloat16), torch.randint(V, (40000,))
    chosen, following = torch.tensor([3, 257, 16387, 39999]), torch.arange(4)
    drafts, _ = proposer.propose(N, tokens, hidden, following, chosen)
    assert torch.equal(drafts, ours(head, hidden[chosen], following)[0])


def test_a_vllm_without_weight_transfers_gets_the_heads(plugin, monkeypatch, capsys):
    known = {}
    registry = SimpleNamespace(get_supported_archs=lambda: known, register_model=known.__setitem__)
    monkeypatch.setattr(sys.modules["vllm"], "ModelRegistry", registry, raising=False)
    package = importlib.import_module("speculator_vllm")
    package.register()
    assert known == {name: f"speculator_vllm.model:{model}" for name, model in package.ARCHITECTURES.items()}
    assert "no weight transfer" in capsys.readouterr().out
    factory = ModuleType("factory")  # without an engine's list of names
    factory.WeightTransferEngineFactory = object
    monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer.factory", factory)
    package.register()
    assert "no weight transfer" in capsys.readouterr().out


def test_settings_that_are_not_this_heads_stop_vllm_at_the_start(tmp_path, plugin):
    head = our_head("tied")
    save(head, tmp_path / "head", layout_of("vllm-plugin", head))
    for changes, said in (
        ({"tokens": 8}, "num_speculative_tokens"),
        ({"method": "eagle3"}, "method"),
        ({"width": 64}, "width"),
    ):
        with pytest.raises(ValueError, match=said):
            served(plugin, tmp_path / "head", **changes)
    model = served(plugin, tmp_path / "head")
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    with pytest.raises(ValueError, match="proj"):
        model.load_weights((name, tensor) for name, tensor in tensors.items() if name != "proj.1.weight")
    with pytest.raises(ValueError, match="mask"):
        model.load_weights({"mask": torch.zeros(1)}.items())


@pytest.mark.parametrize("own", [True, False], ids=["a head of the plugin", "a head of vLLM"])
def test_weights_that_do_not_fit_a_running_server_change_nothing(tmp_path, plugin, own):
    """Neither model is left with some of the new tensors."""
    for name, changes in (("first", 1.0), ("next", 2.0), ("wrong", 3.0)):
        head = our_head("one step")
        head.load_state_dict({key: tensor * changes for key, tensor in head.state_dict().items()})
        save(head, tmp_path / name, layout_of("vllm-plugin", head))
    tensors = load_file(tmp_path / "wrong" / "model.safetensors")
    last = max(tensors)
    save_file({**tensors, last: tensors[last][:-1]}, tmp_path / "wrong" / "model.safetensors")
    model = served(plugin, tmp_path / "first") if own else Foreign(load_file(tmp_path / "first" / "model.safetensors"))
    engine = importlib.import_module("speculator_vllm.weights").FolderEngine
    settings = SimpleNamespace(speculative_config=SimpleNamespace(model=str(tmp_path / "first")), drafter=model)
    update = engine(None, settings, "cpu", torch.nn.Linear(1, 1))
    places = model.names()
    before = {name: place.clone() for name, place in places.items()}
    with pytest.raises(ValueError, match=last):
        update.receive_weights(SimpleNamespace(folder=str(tmp_path / "wrong")))
    assert all(torch.equal(places[name], tensor) for name, tensor in before.items())
    update.receive_weights(SimpleNamespace(folder=str(tmp_path / "next")))
    assert all(torch.equal(places[name], 2 * tensor) for name, tensor in before.items())


class Foreign(torch.nn.Module):
    """A drafter that copies its tensors one by one, as vLLM's own do."""

    def __init__(self, tensors):
        super().__init__()
        self.tensors = tensors

    def names(self):
        return self.tensors

    def load_weights(self, weights):
        for name, tensor in weights:
            self.tensors[name].copy_(tensor)


def test_an_exported_head_loads_with_the_same_logits(tmp_path):
    for kind in ("narrow", "wide", "one step"):
        head = our_head(kind)
        save(head, tmp_path / kind, layout_of("vllm-plugin", head))
        again = load_any(tmp_path / kind)
        assert type(again) is type(head)
        assert torch.equal(again.logits(*head.probe()), head.logits(*head.probe()))
