"""Files that a server's answer names are deleted only where we told servers to write."""

from types import SimpleNamespace

import openai
import pytest
import torch

from speculator import UserError
from speculator.clients.hidden_states import Expected, HiddenStateServers, discard


def answer(path) -> SimpleNamespace:
    return SimpleNamespace(kv_transfer_params={"hidden_states_path": str(path)})


def files_in(folder) -> list[str]:
    """A file and its lock, in a folder and in one inside it."""
    made = [folder / "model.safetensors", folder / "layers-0-2" / "speculator-0-x.safetensors"]
    for file in made:
        file.parent.mkdir(exist_ok=True)
        file.touch()
        file.with_name(f"{file.name}.lock").touch()
    return made


@pytest.mark.parametrize("spelling", ["{}", "{}/layers-0-2/..", "{}/layers-0-2/../../" + "{}"])
def test_only_hidden_states_with_a_lock_are_deleted(tmp_path, spelling):
    model, states = files_in(tmp_path)
    outside = spelling.format(tmp_path, tmp_path.name)
    discard(answer(f"{outside}/model.safetensors"))
    assert model.exists()
    other = states.with_name("other.safetensors")
    other.touch()
    discard(answer(other))
    assert other.exists(), "without a lock no server has written it"
    discard(answer(states))
    assert not states.exists()
    assert not states.with_name(f"{states.name}.lock").exists()


@pytest.mark.parametrize("number", [0, 1])
def test_training_deletes_no_file_that_is_not_named_after_its_request(tmp_path, monkeypatch, number):
    named = files_in(tmp_path)[number]
    servers = HiddenStateServers(["http://127.0.0.1:9"], "m", Expected((0, 2), 4, torch.float32))
    reply = answer(named)
    reply.data = []
    monkeypatch.setattr(openai.resources.Completions, "create", lambda *_, **__: reply)
    monkeypatch.setattr(openai.resources.Models, "list", lambda *_: reply)
    with pytest.raises(UserError, match="name no file" if number == 0 else "not named after its request"):
        servers.check([1, 2], 8)
    servers.close()
    assert named.exists()
