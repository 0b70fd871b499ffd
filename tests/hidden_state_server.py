"""A stand-in for vLLM with `extract_hidden_states`: it computes with a target in this process, and fails as asked."""

import fcntl
import json
import os
import socket
import sys
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path

import torch
from safetensors.torch import save_file

from speculator import Sampling, Target
from speculator.clients.hidden_states import layers_folder
from speculator.decoding.engine import Engine

METRICS = """# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{{engine="0",model_name="served"}} {}.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="served",position="0"}} {}.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="served",position="1"}} {}.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="served",position="2"}} 0.0
"""
_numbers = count()
_computing = threading.Lock()  # servers share a target, and hooks see every pass


class StandIn(ThreadingHTTPServer):
    """Answers requests for hidden states and for text.

    Args:
        target: what it serves.
        folder: where the files go, in a folder named after the layers.
        layers: numbers of the layers, the last one's included.
        port: 0 for any.
        models: names of what it serves; a request's is kept as `model`.
        last: number of the last streamed answer that is well; later ones are errors.
        delay: seconds for each answer.
        fault: see `Handler`.
    """

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 64

    def __init__(self, target: Target, folder: Path, layers, port=0, delay=0.0, fault="", dtype=torch.float32):
        super().__init__(("127.0.0.1", port), Handler)
        self.target, self.layers, self.delay, self.fault, self.dtype = target, list(layers), delay, fault, dtype
        self.folder = folder / layers_folder(layers)
        self.asked = self.most = 0
        self.drafted: dict[str, int] = {}
        self.models, self.model, self.last = ["served"], "", sys.maxsize
        self.open: set[socket.socket] = set()
        self.url = f"http://127.0.0.1:{self.server_port}/v1"
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def process_request(self, request, client_address):
        self.open.add(request)
        super().process_request(request, client_address)

    def handle_error(self, request, client_address):
        if not isinstance(sys.exc_info()[1], OSError):  # the client has gone, or this server dies
            super().handle_error(request, client_address)

    def die(self) -> None:
        """Break all connections, as a killed process does."""
        self.shutdown()
        self.server_close()
        for connection in list(self.open):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    @torch.no_grad()
    def states(self, tokens: list[int]) -> torch.Tensor:  # [T, layers, D], the last before the final norm
        seen = []
        with _computing, self.target.aux_layers.recorded(self.layers[:-1]) as read:
            norm = self.target.model.get_decoder().norm
            handle = norm.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
            hidden = self.target.hidden(torch.tensor([tokens]))
            handle.remove()
        aux = read(hidden).view(len(tokens), -1, hidden.shape[-1])[:, : len(self.layers) - 1]
        return torch.cat([aux, seen[0].view(len(tokens), 1, -1)], 1)


class Handler(BaseHTTPRequestHandler):
    """Faults: "connector" (no file is named), "cut" (files are cut short), "full" (nothing is written).

    "llama.cpp" answers as a llama-server without --metrics, whose drafts are `drafted`.
    "nothing" answers without a body where the models are listed.
    With "half" it writes half a file, breaks the connection, and is well afterwards.
    """

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: StandIn

    def log_message(self, *args):
        pass

    def reply(self, content) -> None:
        raw = content.encode() if isinstance(content, str) else json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def do_GET(self):
        if self.path == "/metrics" and self.server.fault == "llama.cpp":
            return self.send_error(501)
        if self.path == "/metrics":  # as if each request had 4 drafts of 3 tokens, of which 3, 1 and 0 are accepted
            return self.reply(METRICS.format(*(self.server.asked * count for count in (4, 3, 1))))
        if self.server.fault == "nothing":
            return self.reply("")
        owner = {"owned_by": "llamacpp" if self.server.fault == "llama.cpp" else "vllm"}
        length = self.server.target.context_length
        self.reply({"data": [{"id": name, "max_model_len": length, **owner} for name in self.server.models]})

    def do_POST(self):
        server, body = self.server, json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        time.sleep(server.delay)
        tokens, name = body["prompt"], f"cmpl-{body.get('request_id', 'x')}-0-{next(_numbers)}"
        states = server.states(tokens).to(server.dtype)
        made, chances = self.text(body, tokens)
        server.asked, server.model = server.asked + 1, body.get("model", "")
        choice = {"index": 0, "text": "", "token_ids": made, "logprobs": {"token_logprobs": chances}}
        choice["finish_reason"] = "length" if len(made) == body["max_tokens"] else "stop"
        answer = {"id": "x", "object": "text_completion", "created": 0, "model": "served", "choices": [choice]}
        if body.get("stream"):
            return self.stream(answer, len(made), server.fault == "llama.cpp")
        if server.fault == "llama.cpp":
            return self.reply({**answer, "timings": {"predicted_n": len(made), **server.drafted}})
        if server.fault == "connector":
            return self.reply(answer)
        server.folder.mkdir(parents=True, exist_ok=True)
        path = server.folder / f"{name}.safetensors"
        lock = os.open(f"{path}.lock", os.O_CREAT | os.O_WRONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if server.fault == "half":
            server.fault = ""
            path.write_bytes(b"half")
            os.close(lock)
            return self.connection.shutdown(socket.SHUT_RDWR)
        server.most = max(server.most, len(list(server.folder.glob("*.safetensors.lock"))))
        self.reply({**answer, "kv_transfer_params": {"hidden_states_path": str(path)}})
        time.sleep(0.002)  # the file is written after the answer
        if server.fault != "full":
            save_file({"hidden_states": states.contiguous(), "token_ids": torch.tensor(tokens)}, str(path))
        if server.fault == "cut":
            path.write_bytes(path.read_bytes()[:-7])
        os.close(lock)

    def stream(self, answer: dict, count: int, llama_cpp: bool) -> None:
        """Send the first token, then the others, then the usage, or llama-server's counts."""
        counts = {"timings": {"predicted_n": count, **self.server.drafted}}
        usage = {"prompt_tokens": 1, "completion_tokens": count, "total_tokens": 1 + count}
        last = {**answer, "choices": [], **(counts if llama_cpp else {"usage": usage})}
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        failed = {"error": {"message": "out of memory"}}
        for event in (answer, answer, last) if self.server.asked <= self.server.last else (answer, failed):
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
            self.wfile.flush()
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def text(self, body: dict, tokens: list[int]) -> tuple[list[int], list[float]]:
        target = self.server.target
        with _computing:
            if body["max_tokens"] == 1:
                chances = target.logits(target.hidden(torch.tensor([tokens])))[0, -1].float().log_softmax(-1)
                return [int(chances.argmax())], [float(chances.max())]
            sampling = Sampling(body["temperature"], seed=body["seed"])
            ends = sorted({*target.eos_token_ids, *body.get("stop_token_ids", [])})
            made = Engine(target).generate([tokens], sampling, max_new_tokens=body["max_tokens"], eos_token_ids=ends)
        return made.tokens[0], [0.0] * len(made.tokens[0])
