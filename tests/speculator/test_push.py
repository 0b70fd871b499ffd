"""`speculator push`: what it asks huggingface_hub to create and upload, and what it says if that fails."""

from types import SimpleNamespace

import httpx
import pytest
from conftest import tiny_head
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import filter_repo_objects

from speculator.__main__ import main


class Hub:
    """Takes the place of `HfApi`'s two requests."""

    def __init__(self):
        self.created, self.files, self.error = [], {}, None

    def create_repo(self, repo, *, private, exist_ok):
        if self.error:
            raise self.error
        assert exist_ok
        self.created.append((repo, private))

    def upload_folder(self, *, repo_id, folder_path, allow_patterns, commit_message):
        names = [path.name for path in folder_path.iterdir()]
        for name in filter_repo_objects(names, allow_patterns=allow_patterns):
            self.files[name] = (folder_path / name).read_bytes()
        return SimpleNamespace(repo_url=f"https://hub/{repo_id}")


@pytest.fixture
def hub(monkeypatch):
    made = Hub()
    for name in ("create_repo", "upload_folder"):
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
    (head / "decoding.json").write_text("{}")
    (head / "notes.txt").write_text("what lies there by chance")
    capsys.readouterr()
    assert push(head) == 0
    assert hub.files.keys() == {"config.json", "model.safetensors", "README.md", "decoding.json"}
    assert all(content == (head / name).read_bytes() for name, content in hub.files.items())
    assert hub.files["README.md"].startswith(b"---\nlibrary_name: speculator")
    assert hub.created == [("org/name", None)]
    assert "pushed to https://hub/org/name" in capsys.readouterr().out


def test_the_repository_is_private_on_request(hub, head):
    assert push(head, "--private") == 0
    assert hub.created == [("org/name", True)]


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
