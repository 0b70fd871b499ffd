"""A push, through the real huggingface_hub, to a stand-in of the hub: what arrives is the folder, byte for byte."""

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from conftest import tiny_head
from huggingface_hub import constants

from speculator.__main__ import main


class Hub(ThreadingHTTPServer):
    """As much of the hub as a push needs: create, look at the card, preupload, large files in one part, commit."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.created, self.objects, self.files, self.tokens = [], {}, {}, set()
        self.refuse_with = None  # a status for every request


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *arguments):
        pass

    def answer(self, content: dict, status: int = 200) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def do_GET(self):
        self.answer({"error": "not here"}, 404)

    def do_PUT(self):
        content = self.body()
        self.server.objects[self.path.rsplit("/", 1)[1]] = content
        self.answer({})

    def do_POST(self):
        hub, body, path = self.server, self.body(), self.path.split("?")[0]
        if hub.refuse_with:
            return self.answer({"error": "you may not do that"}, hub.refuse_with)
        hub.tokens.add(self.headers["authorization"])
        if path == "/api/repos/create":
            hub.created.append(json.loads(body))
            return self.answer({"url": f"{hub.url}/org/name"})
        if path == "/api/validate-yaml":  # of a model card
            return self.answer({"errors": [], "warnings": []})
        if path == "/api/models/org/name/preupload/main":
            names = [file["path"] for file in json.loads(body)["files"]]
            mode = {True: "lfs", False: "regular"}
            modes = [{"path": n, "uploadMode": mode["safetensors" in n], "shouldIgnore": False} for n in names]
            return self.answer({"files": modes})
        if path == "/org/name.git/info/lfs/objects/batch":
            wanted = json.loads(body)["objects"]
            return self.answer(
                {"objects": [{**o, "actions": {"upload": {"href": f"{hub.url}/put/{o['oid']}"}}} for o in wanted]}
            )
        if path == "/api/models/org/name/commit/main":
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    hub.files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    content = hub.objects[value["oid"]]
                    assert hashlib.sha256(content).hexdigest() == value["oid"]
                    hub.files[value["path"]] = content
            return self.answer({"commitUrl": f"{hub.url}/org/name/commit/1", "commitOid": "1" * 40})
        return self.answer({"error": "not here"}, 404)


@pytest.fixture
def hub(monkeypatch):
    server = Hub()
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", server.url)  # HF_ENDPOINT, which is read at import
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # its protocol is not stood in for
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    yield server
    server.shutdown()
    server.server_close()


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
    shown = capsys.readouterr()
    lines = [line for line in shown.err.splitlines() if line.startswith("speculator: ")]
    assert code == 2
    assert len(lines) == 1
    assert "Traceback" not in shown.err
    assert not shown.out
    return lines[0]


def test_the_folder_arrives_with_a_card(hub, head, capsys):
    (head / "decoding.json").write_text("{}")
    (head / "notes.txt").write_text("what lies there by chance")
    capsys.readouterr()
    assert push(head) == 0
    assert hub.files.keys() == {"config.json", "model.safetensors", "README.md", "decoding.json"}
    assert all(content == (head / name).read_bytes() for name, content in hub.files.items())
    assert hub.files["README.md"].startswith(b"---\nlibrary_name: speculator")
    assert hub.tokens == {"Bearer hf_secret"}
    assert f"pushed to {hub.url}/org/name" in capsys.readouterr().out


@pytest.mark.parametrize("private", [True, False])
def test_the_repository_is_made_as_asked_for(hub, head, private):
    assert push(head, *(["--private"] if private else [])) == 0
    made = hub.created[0]
    assert (made["organization"], made["name"]) == ("org", "name")
    assert ("private" in json.dumps(made)) == private


def test_no_token_is_one_line_and_nothing_is_sent(hub, head, capsys, monkeypatch, tmp_path):
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    assert "no token for the hub" in refused(capsys, push(head))
    assert not hub.created
    assert not (head / "README.md").exists()


def test_a_damaged_head_is_not_pushed(hub, head, capsys):
    (head / "README.md").write_text("my own words")
    weights = head / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert "damaged" in refused(capsys, push(head))
    assert not hub.created


def test_a_refusal_is_one_line(hub, head, capsys):
    hub.refuse_with = 403
    before = contents(head)
    line = refused(capsys, push(head))
    assert f"can't push to org/name at {hub.url}" in line
    assert "403" in line
    assert not hub.files
    assert contents(head) == before


def test_a_push_that_is_interrupted_leaves_the_folder_as_it_was(hub, head, monkeypatch):
    before = contents(head)

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("speculator.cli.push.HfApi.upload_folder", interrupt)
    assert push(head) == 130
    assert contents(head) == before


@pytest.mark.parametrize("token", ["hf_sec\nret", "hf_sec ret"])
def test_an_invalid_token_is_not_printed(hub, head, capsys, monkeypatch, token):
    monkeypatch.setattr("speculator.cli.push.get_token", lambda: token)
    line = refused(capsys, push(head))
    assert "the hub's token" in line
    assert "sec" not in line


def test_a_refusal_that_repeats_the_token_does_not_show_it(hub, head, capsys, monkeypatch):
    def refuse(*_, **__):
        raise ValueError("bad: Bearer hf_secret")

    monkeypatch.setattr("speculator.cli.push.HfApi.create_repo", refuse)
    assert refused(capsys, push(head)).endswith("bad: Bearer ***")
