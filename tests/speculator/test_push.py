"""`speculator push`: what it asks huggingface_hub to create and upload, and what it says if that fails."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from conftest import tiny_head
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HfHubHTTPError
from mtp_models import config_of, model_of, mtp_of
from mtp_models import save as save_model

from speculator.__main__ import main
from speculator.checkpoints import layouts, save


class Hub:
    """Takes the place of `HfApi`'s requests."""

    def __init__(self):
        self.created, self.files, self.error, self.existing = [], {}, None, None

    def repo_info(self, repo):
        return SimpleNamespace(private=self.created[-1][1] if self.existing is None else False)

    def file_exists(self, repo, name):
        return name in (self.existing or ())

    def create_repo(self, repo, *, private, exist_ok):
        if self.error:
            raise self.error
        assert exist_ok
        self.created.append((repo, private))
        return SimpleNamespace(repo_id=repo if "/" in repo else f"me/{repo}")

    def upload_folder(self, *, repo_id, folder_path, commit_message):
        assert "/" in repo_id  # the hub's rule
        for path in Path(folder_path).rglob("*"):
            if path.is_file():
                self.files[path.relative_to(folder_path).as_posix()] = path.read_bytes()
        return SimpleNamespace(repo_url=f"https://hub/{repo_id}")


@pytest.fixture
def hub(monkeypatch):
    made = Hub()
    for name in ("create_repo", "upload_folder", "repo_info", "file_exists"):
        monkeypatch.setattr(HfApi, name, staticmethod(getattr(made, name)))
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    return made


@pytest.fixture
def head(tmp_path, capsys):
    folder = tmp_path / "head"
    tiny_head().save_pretrained(folder)
    (folder / "optimizer.pt").write_bytes(b"not of the head")
    capsys.readouterr()
    return folder


def push(folder, *flags) -> int:
    return main(["push", "--speculator", str(folder), "--repo_id", "org/name", *flags])


def contents(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def refused(capsys, code: int) -> str:
    """The one line of error of a push that failed."""
    shown = capsys.readouterr()
    lines = [line for line in shown.err.splitlines() if line.startswith("speculator: ")]
    assert code == 2
    assert len(lines) == 1
    assert "Traceback" not in shown.err
    assert not shown.out
    return lines[0]


def test_the_files_of_the_head_are_uploaded_with_a_card(hub, head, capsys):
    for name in ("decoding.json", "forecast.json"):
        (head / name).write_text("{}")
    (head / "notes.txt").write_text("what lies there by chance")
    capsys.readouterr()
    assert push(head) == 0
    assert hub.files.keys() == {"config.json", "model.safetensors", "README.md", "decoding.json", "forecast.json"}
    for name in ("model.safetensors", "decoding.json", "forecast.json"):
        assert hub.files[name] == (head / name).read_bytes()
    assert json.loads(hub.files["config.json"]) == json.loads((head / "config.json").read_text())
    assert hub.files["README.md"].startswith(b"---\nlibrary_name: speculator")
    assert hub.created == [("org/name", None)]
    assert "pushed to https://hub/org/name" in capsys.readouterr().out


def test_a_name_without_a_namespace_is_the_users(hub, head, capsys):
    assert main(["push", "--speculator", str(head), "--repo_id", "name"]) == 0
    assert hub.created == [("name", None)]
    assert "pushed to https://hub/me/name" in capsys.readouterr().out


def test_the_repository_is_private_on_request(hub, head):
    assert push(head, "--private") == 0
    assert hub.created == [("org/name", True)]
    assert hub.files


def test_an_existing_public_repository_gets_nothing_private(hub, head, capsys):
    hub.existing = ["config.json"]
    assert "exists and is public; nothing was uploaded" in refused(capsys, push(head, "--private"))
    assert not hub.files


def test_a_made_card_does_not_replace_the_one_on_the_hub(hub, head):
    hub.existing = ["README.md"]
    assert push(head) == 0
    assert hub.files.keys() == {"config.json", "model.safetensors"}
    (head / "README.md").write_text("my own words")
    assert push(head) == 0
    assert hub.files["README.md"] == b"my own words"


def test_without_a_token_nothing_is_sent(hub, head, capsys, monkeypatch, tmp_path):
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    assert "no token" in refused(capsys, push(head))
    assert not hub.created
    assert not (head / "README.md").exists()


def test_a_damaged_head_is_not_pushed(hub, head, capsys):
    (head / "README.md").write_text("my own words")
    weights = head / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert "damaged" in refused(capsys, push(head))
    assert not hub.created


def test_a_refusal_is_one_line_without_the_token_and_leaves_the_folder_as_it_was(hub, head, capsys):
    forbidden = httpx.Response(403, request=httpx.Request("POST", "https://hub"))
    hub.error, before = HfHubHTTPError("403 for Bearer hf_secret", response=forbidden), contents(head)
    line = refused(capsys, push(head))
    assert "can't push to org/name" in line
    assert line.endswith("403 for Bearer ***")
    assert contents(head) == before


def test_only_a_folder_is_pushed(hub, capsys):
    assert "--speculator org/head: no such folder" in refused(capsys, push("org/head"))


def test_an_interrupted_push_leaves_the_folder_as_it_was(hub, head):
    hub.error, before = KeyboardInterrupt(), contents(head)
    assert push(head) == 130
    assert contents(head) == before


@pytest.mark.parametrize("token", ["hf_sec\nret", "hf_sec ret"])
def test_an_invalid_token_is_not_printed(hub, head, capsys, monkeypatch, token):
    monkeypatch.setattr("speculator.cli.push.get_token", lambda: token)
    line = refused(capsys, push(head))
    assert "token" in line
    assert "sec" not in line


def test_no_byte_that_leaves_names_a_folder_of_this_machine(hub, tmp_path, capsys):
    head = tiny_head()
    head.config.base_model_name_or_path = str(tmp_path / "secret" / "base")
    head.config.base_model_adapter = str(tmp_path / "secret" / "adapter")
    head.config.training_data = [str(tmp_path / "secret" / "chats.jsonl"), "org/data"]
    for layout in layouts():
        if layout.stores(head):
            save(head, tmp_path / layout.name, layout)
            assert push(tmp_path / layout.name) == 0
            assert "config.json" in hub.files
            assert "base" in hub.files["config.json"].decode()
            assert not [name for name, content in hub.files.items() if str(tmp_path).encode() in content]
            hub.files.clear()
    assert str(tmp_path) in (tmp_path / "native" / "config.json").read_text()


def test_a_folder_below_stays_on_this_machine(hub, head):
    (head / "old").mkdir()
    (head / "old" / "optimizer.safetensors").write_bytes(b"of a run")
    assert push(head) == 0
    assert hub.files.keys() == {"config.json", "model.safetensors", "README.md"}


def test_a_model_with_mtp_layers_goes_up_with_all_that_serves_it(hub, tmp_path, target_folder):
    """What `export --format mtp` writes is a model: a server needs its tokenizer, template and generation config."""
    config = config_of("glm4_moe", 2, 1)
    config.vocab_size = 300
    folder = save_model(tmp_path / "model", model_of(config), mtp_of(model_of(config), 1))
    for file in target_folder.glob("tokenizer*"):
        shutil.copy(file, folder)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "generation_config.json").write_text("{}")
    (folder / "optimizer.pt").write_bytes(b"of a run")
    assert push(folder) == 0
    expected = {
        "config.json",
        "generation_config.json",
        "chat_template.jinja",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert expected | {"model.safetensors", "README.md"} <= hub.files.keys()
    assert "optimizer.pt" not in hub.files


def test_a_gguf_file_of_a_head_goes_up(hub, tmp_path, capsys):
    gguf = pytest.importorskip("gguf")
    folder = tmp_path / "exported"
    folder.mkdir()
    writer = gguf.GGUFWriter(folder / "head.gguf", "eagle3")
    writer.add_context_length(128)
    writer.add_token_list(["a", "b"])
    writer.add_eos_token_id(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    (folder / "README.md").write_text("a card")
    assert push(folder) == 0
    assert hub.files.keys() == {"head.gguf", "README.md"}
    capsys.readouterr()
    content = (folder / "head.gguf").read_bytes()
    (folder / "head.gguf").write_bytes(content[:40])
    assert "damaged" in refused(capsys, push(folder))
