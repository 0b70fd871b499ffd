"""Heads by hub id, through the real huggingface_hub, from a stand-in of the hub."""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from conftest import tiny_head, tiny_model
from huggingface_hub import constants

from speculator import Target, UserError
from speculator.__main__ import main
from speculator.checkpoints import load_any, recognise
from speculator.checkpoints.hub import head_folder
from train.checks import settings
from train.config import HeadOptions, RunConfig
from train.initialise import with_shape_of_start

SHA = {"main": "1" * 40, "v2": "2" * 40}


class Handler(BaseHTTPRequestHandler):
    """As much of the hub as a download needs: what is in a revision, and its files."""

    def log_message(self, *arguments):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        parts, files = self.path.split("?")[0].strip("/").split("/"), self.server.files
        if self.path.startswith("/api/models/org/name/revision/") and parts[-1] in SHA:
            siblings = [{"rfilename": name} for name in files]
            return self.answer(json.dumps({"id": "org/name", "sha": SHA[parts[-1]], "siblings": siblings}).encode())
        if self.path.startswith("/api/models/org/name/tree/"):
            tree = [
                {"type": "file", "path": n, "size": len(c), "oid": hashlib.sha1(c).hexdigest()}
                for n, c in files.items()
            ]
            return self.answer(json.dumps(tree).encode())
        if self.path.startswith("/org/name/resolve/") and parts[-1] in files:
            self.server.asked.add(parts[-1])
            return self.answer(files[parts[-1]], parts[3])
        return self.answer(b"{}", status=404)

    def answer(self, body: bytes, commit: str = "", status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if commit:
            self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
            self.send_header("X-Repo-Commit", commit)
        if status == 404:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    head = tiny_head()
    head.save_pretrained(tmp_path / "head")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.files = {file.name: file.read_bytes() for file in (tmp_path / "head").iterdir()} | {"optimizer.pt": b"no"}
    server.asked, server.head, server.cache = set(), head, tmp_path / "cache"
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    yield server
    server.shutdown()
    server.server_close()


def test_a_head_of_the_hub_is_read_and_later_found_offline(hub, monkeypatch):
    loaded = load_any("org/name")
    assert all(loaded.state_dict()[name].equal(value) for name, value in hub.head.state_dict().items())
    assert hub.asked == {"config.json", "model.safetensors"}, "files of a head only"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert recognise("org/name").name == "native"
    assert head_folder("org/name").name == SHA["main"]


def test_a_revision_is_that_of_the_hub_alone(hub):
    assert head_folder("org/name", "v2").name == SHA["v2"]
    assert head_folder("head").samefile("head")
    with pytest.raises(UserError, match="revision v2: head is no hub id"):
        head_folder("head", "v2")
    with pytest.raises(UserError, match="org/other: no such folder, and no head on the hub"):
        head_folder("org/other")


def test_inspect_and_export_take_a_hub_id(hub, capsys):
    assert main(["inspect", "org/name", "--speculator_revision", "v2"]) == 0
    assert "native" in capsys.readouterr().out
    assert main(["export", "--speculator", "org/name", "--format", "native", "--output", "mine"]) == 0
    assert load_any("mine").config.inner_dim == hub.head.config.inner_dim
    capsys.readouterr()
    assert main(["inspect", "org/other"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_run_starts_from_a_head_of_the_hub(hub):
    start = HeadOptions(warm_start="org/name", warm_start_revision="v2")
    config = with_shape_of_start(RunConfig(speculator=start), ())
    assert config.speculator.n_predict == hub.head.config.n_predict
    assert list((hub.cache / "models--org--name" / "snapshots").iterdir()) == [head_folder("org/name", "v2")]
    with pytest.raises(UserError, match="warm_start_revision needs"):
        settings(RunConfig(speculator=HeadOptions(warm_start_revision="v2")))


@pytest.mark.parametrize(
    "command", [["eval", "gate", "org/name", "head"], ["adapt", "--record", ".", "--head", "org/name"]]
)
def test_gate_and_adapt_take_a_revision(hub, command, monkeypatch, capsys):
    monkeypatch.setattr(Target, "load", lambda *_, **__: Target(tiny_model(), tokenizer=None))
    flags = ["--target", "T", "--suite", "none.jsonl"] if "gate" in command else []
    assert main([*command, *flags, "--speculator_revision", "v2"]) == 2  # the next thing is missing
    assert [path.name for path in (hub.cache / "models--org--name" / "snapshots").iterdir()] == [SHA["v2"]]
