"""A running vLLM 0.32 gets other weights for its drafter: texts stay greedy ones, and a worse head is taken back."""

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch
from serving.shared import ENVIRONMENT, TARGET, fitted

from speculator import Target, generate
from speculator.checkpoints import layout_of, save
from speculator.checkpoints.loading import bind
from speculator.clients import vllm_updates
from speculator.clients.vllm_updates import VLLMServer
from speculator.heads import Eagle3Speculator, Eagle3SpeculatorConfig

PROMPTS = ["import argparse\n", "class Stack:\n    def __init__(self):\n", "def read(path):\n", "for i in range("]
NEW, LENGTH = 48, 3


@pytest.mark.parametrize("shared", [False, True])
def test_a_drafter_is_updated_while_requests_are_decoded(start_in, tmp_path, monkeypatch, report, shared):
    """`shared`: the first head's output matrix is the target's, which vLLM then shares with it."""
    target = Target.load(str(TARGET), dtype="float32")
    prompts = [target.tokenizer(text)["input_ids"] for text in PROMPTS]
    texts = generate(target, None, prompts, max_new_tokens=NEW, eos_token_ids=()).tokens
    for name, steps in (("old", 0 if shared else 4), ("new", 40)):
        torch.manual_seed(steps)
        config = Eagle3SpeculatorConfig.for_target(target.config, n_predict=LENGTH)
        config.base_model_name_or_path = str(TARGET)
        head = Eagle3Speculator(config)
        embedding, output = target.model.get_input_embeddings(), target.model.get_output_embeddings()
        head.initialise_from(embedding.weight, output.weight)
        head = fitted(bind(head, target), target, prompts, NEW, steps=steps, rate=1e-3)
        save(head, tmp_path / name, layout_of("eagle3", head))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    old, new = str(tmp_path / "old"), str(tmp_path / "new")
    settings = ["--dtype", "float32", "--enforce-eager", "--max-model-len", 512, "--no-enable-prefix-caching"]
    settings += ["--weight-transfer-config", json.dumps({"backend": "speculator_folder"})]
    speculative = {"method": "eagle3", "model": old, "num_speculative_tokens": LENGTH}
    command = ["-m", "vllm.entrypoints.openai.api_server", "--model", TARGET, "--port", port, "--host", "127.0.0.1"]
    command += [*settings, "--speculative-config", json.dumps(speculative)]
    process, log = start_in("vllm", *command, VLLM_SERVER_DEV_MODE="1", **ENVIRONMENT)
    url = f"http://127.0.0.1:{port}"
    for _ in range(300):
        assert process.poll() is None, log.read_text()[-4000:]
        try:
            httpx.get(f"{url}/health")
            break
        except httpx.TransportError:
            time.sleep(1)
    for name, value in (("_LOOKS", (40,)), ("_POLL_SECONDS", 0.2), ("_WATCH_SECONDS", 60)):
        monkeypatch.setattr(vllm_updates, name, value)
    server, ended = VLLMServer(url, ""), []

    def client(first: int) -> list[bool]:
        same = []
        while not ended:
            number = (first + len(same)) % len(prompts)
            body = {"model": str(TARGET), "prompt": prompts[number], "max_tokens": NEW, "temperature": 0}
            body |= {"ignore_eos": True, "return_token_ids": True}
            choice = httpx.post(f"{url}/v1/completions", json=body, timeout=300).json()["choices"][0]
            same.append(choice["token_ids"] == texts[number])
        return same

    with ThreadPoolExecutor(2) as pool:
        clients = [pool.submit(client, number) for number in range(2)]
        try:
            loaded = server.try_head(new, old)
            taken_back = None if shared else server.try_head(old, new)
        finally:
            ended.append(True)
    same = [each for client in clients for each in client.result()]
    report(f"shared matrix: {shared}; {sum(same)} of {len(same)} texts are greedy ones; {loaded}; {taken_back}")
    assert all(same)
    if shared:
        assert "lm_head.weight: the drafter shares it with the target" in loaded
    else:
        assert loaded is None
        assert taken_back.startswith("swapped back")
