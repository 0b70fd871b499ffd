"""MLP heads in vLLM 0.32 with the plugin, in process and over HTTP.

The text equals that of vLLM without a drafter, the draft tokens equal ours, and so does the acceptance per position.
"""

import argparse
import inspect
import json
import socket
import tarfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import scipy.stats
import torch
from serving.shared import ENVIRONMENT, TARGET, draft_from, our_steps, per_position, vllm_runs

from speculator import Target, generate
from speculator.checkpoints import layout_of, save
from speculator.heads import MLPSpeculator, MLPSpeculatorConfig

N = 4
HEADS = {
    "mlp, tied": ({}, 4),
    "mlp, untied, 2,000 tokens": (
        {"tie_weights": False, "scale_input": False, "draft_vocab_size": 2000, "inner_dim": 96},
        3,
    ),
    "mlp, wider than the target": ({"inner_dim": 256}, 4),
}
# Prompts in chunks of 64 tokens, four requests at a time, and a KV cache too small for four long ones.
ENGINE = {"max_model_len": 512, "max_num_seqs": 4, "max_num_batched_tokens": 64, "enable_chunked_prefill": True}
ENGINE |= {
    "enable_prefix_caching": True,
    "block_size": 32,
    "num_gpu_blocks_override": 40,
    "long_prefill_token_threshold": 48,
}
FEW = [40, 7, 64, 90, 25, 33, 51]  # different counts of new tokens, so that requests join and leave
MANY = 300


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.load(str(TARGET), dtype="float32")


@pytest.fixture(scope="module")
def prompts(target) -> list[list[int]]:
    code = [target.tokenizer(inspect.getsource(module))["input_ids"] for module in (argparse, tarfile)]
    short = ["import argparse\n", "class Stack:\n    def __init__(self):\n", "def read(path):\n"]
    cuts = [code[0][300:500], code[0][300:428] + code[1][300:330], code[1][500:550], code[1][700:870]]
    return [*cuts, *(target.tokenizer(text)["input_ids"] for text in short)]


@pytest.fixture(scope="module")
def texts(target, prompts) -> list[list[int]]:
    """Greedy continuations, a few tokens longer than those requested from vLLM."""
    return generate(target, None, prompts, max_new_tokens=MANY + N + 1, eos_token_ids=()).tokens


@pytest.fixture(scope="module")
def runs(prompts) -> list[list[dict]]:
    few = [{"prompt": prompt, "max_new_tokens": count} for prompt, count in zip(prompts, FEW, strict=True)]
    return [few, few, [{"prompt": prompt, "max_new_tokens": MANY} for prompt in prompts]]


@pytest.fixture(scope="module")
def plain(tmp_path_factory, run_in, runs) -> list[dict]:
    return vllm_runs(run_in, tmp_path_factory.mktemp("plain"), runs, engine=ENGINE)


def half_known(target, prompts, texts, kind: str):
    """A head trained on the texts for a few steps, so that some of its drafts are accepted and some are not."""
    torch.manual_seed(0)
    changes, _ = HEADS[kind]
    shape = {"vocab_size": target.vocab_size, "emb_dim": target.hidden_size, "n_predict": N, **changes}
    made = MLPSpeculator(MLPSpeculatorConfig(**shape))
    made.config.base_model_name_or_path = str(TARGET)
    rows = [torch.tensor([prompt + answer]) for prompt, answer in zip(prompts, texts, strict=True)]
    draft_from(made, [row[0].tolist() for row in rows])
    with torch.no_grad():
        states = [target.model(row, output_hidden_states=True).hidden_states[-1] for row in rows]
    optimiser = torch.optim.AdamW(made.parameters(), lr=2e-3)
    for step in range(42):
        row, hidden = rows[step % len(rows)], states[step % len(rows)]
        length = row.shape[1] - N - 1
        loss = torch.zeros(())
        for i, logits in enumerate(made.logits(hidden[:, :length], row[:, 1:-1])):
            loss = loss + torch.nn.functional.cross_entropy(logits[0], row[0, i + 2 : i + 2 + length])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return made.eval()


@pytest.fixture(scope="module", params=HEADS)
def served(request, target, prompts, texts, tmp_path_factory):
    """A head, its folder, and num_speculative_tokens."""
    head = half_known(target, prompts, texts, request.param)
    folder = tmp_path_factory.mktemp("head") / "head"
    save(head, folder, layout_of("vllm-plugin", head))
    return head, folder, HEADS[request.param][1]


def eagle(folder: Path, length: int) -> dict:
    return {"method": "eagle", "model": str(folder), "num_speculative_tokens": length}


@torch.no_grad()
def our_drafts(target, head, length: int, row: list[int]) -> dict[tuple[int, int], list[int]]:
    """Draft after each token of a text, by the token's position and the next token."""
    hidden = target.model(torch.tensor([row]), output_hidden_states=True).hidden_states[-1][0, :-1]
    state, drafts = head.start(hidden), [torch.tensor(row[1:])]
    for i in range(length):
        state, logits = head.step(i, state, drafts[-1])
        drafts.append(logits.argmax(-1))
    return {(p, row[p + 1]): draft for p, draft in enumerate(torch.stack(drafts[1:], 1).tolist())}


def test_vllm_with_the_plugin_writes_our_texts_in_this_process(
    tmp_path, run_in, target, prompts, texts, runs, plain, served, report
):
    head, folder, length = served
    made = vllm_runs(run_in, tmp_path, runs, eagle(folder, length), engine=ENGINE)
    for mine, theirs in zip(plain, made, strict=True):
        assert mine["texts"] == theirs["texts"]
    assert [text[:MANY] for text in texts] == plain[2]["texts"]
    known = [our_drafts(target, head, length, prompt + text) for prompt, text in zip(prompts, texts, strict=True)]
    same = drafted = unknown = 0
    for run in made:
        for position, token, draft in run["drafts"]:
            here = [drafts[position, token] for drafts in known if (position, token) in drafts]
            # vLLM also drafts after each chunk of a prompt, from a token that is not the next one.
            unknown += not here
            drafted += bool(here)
            same += draft in here
    ours = per_position(our_steps(target, head, length, prompts, FEW), length)
    report(
        f"{sum(map(len, runs))} requests in 3 runs: text identical; {same} of {drafted} drafts equal, {unknown} unused"
    )
    report(
        f"accepted per position: vLLM {made[0]['accepted']}, with cached prefixes {made[1]['accepted']}, ours {ours}"
    )
    report(f"prefix cache hits {made[1]['prefix_cache_hits']}, preemptions {made[2]['num_preemptions']}")
    assert same == drafted > 400
    assert unknown < drafted / 4
    assert made[0]["accepted"] == made[1]["accepted"] == ours
    assert 0 < ours[-1] < ours[0]
    assert made[1]["prefix_cache_hits"] > 0
    assert made[2]["num_preemptions"] > 0


def fetch(port: int, path: str, body: dict | None = None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        return answer.read().decode()


def wait_until_healthy(port: int, process, log: Path) -> None:
    for _ in range(300):
        assert process.poll() is None, log.read_text()[-4000:]
        try:
            fetch(port, "health")
        except OSError:
            time.sleep(1)
        else:
            return
    raise AssertionError(f"not healthy after five minutes: {log.read_text()[-2000:]}")


def test_vllm_with_the_plugin_writes_our_texts_over_http(start_in, target, prompts, texts, served, report):
    head, folder, length = served
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = ["-m", "vllm.entrypoints.openai.api_server", "--model", TARGET, "--port", port, "--host", "127.0.0.1"]
    settings = ["--dtype", "float32", "--enforce-eager", "--max-model-len", 512, "--max-num-seqs", 8]
    process, log = start_in(
        "vllm", *server, *settings, "--speculative-config", json.dumps(eagle(folder, length)), **ENVIRONMENT
    )
    wait_until_healthy(port, process, log)

    def complete(row: int) -> list[int]:
        body = {"model": str(TARGET), "prompt": prompts[row], "max_tokens": FEW[row], "temperature": 0}
        body |= {"ignore_eos": True, "return_token_ids": True}
        return json.loads(fetch(port, "v1/completions", body))["choices"][0]["token_ids"]

    with ThreadPoolExecutor(8) as pool:
        answer = list(pool.map(complete, range(len(prompts))))
    assert answer == [text[:count] for text, count in zip(texts, FEW, strict=True)]
    metrics = fetch(port, "metrics").splitlines()
    found = [line for line in metrics if line.startswith("vllm:spec_decode_num_accepted_tokens_per_pos_total{")]
    theirs = [int(float(line.split()[-1])) for line in found]
    ours = per_position(our_steps(target, head, length, prompts, FEW), length)
    report(f"{len(prompts)} requests at a time: text identical; accepted per position {theirs}, ours {ours}")
    assert theirs == ours


@torch.no_grad()
def pair_probs(target, prompt: list[int]) -> torch.Tensor:  # [V, V]
    """Probabilities of the next two tokens."""
    first = target.model(torch.tensor([prompt])).logits[0, -1].double().softmax(-1)
    both = torch.zeros(len(first), len(first), dtype=torch.float64)
    likely = (first > 1e-5).nonzero()[:, 0]
    for some in likely.split(64):
        rows = torch.cat([torch.tensor([prompt]).expand(len(some), -1), some[:, None]], 1)
        both[some] = first[some, None] * target.model(rows).logits[:, -1].double().softmax(-1)
    return both


def chi_square(counts: torch.Tensor, probs: torch.Tensor) -> float:
    """P-value of counts under probabilities; cells with fewer than five expected counts are merged."""
    expected = probs * counts.sum()
    common = expected >= 5
    observed = torch.cat([counts[common], counts[~common].sum()[None]])
    wanted = torch.cat([expected[common], (counts.sum() - expected[common].sum())[None]])
    return scipy.stats.chisquare(observed.numpy(), wanted.numpy()).pvalue


def test_sampled_text_follows_the_targets_distribution(tmp_path, run_in, target, prompts, texts, report):
    """`expand` replaces a faulty function of vLLM's CPU backend: see vllm_runs.py."""
    head = half_known(target, prompts, texts, "mlp, tied")
    save(head, tmp_path / "head", layout_of("vllm-plugin", head))
    prompt, samples = prompts[-2], 3000
    requests = [{"prompt": prompt, "max_new_tokens": 3, "temperature": 1, "seed": i} for i in range(samples)]
    engine = {"max_model_len": 128, "max_num_seqs": 64, "enable_prefix_caching": False}
    made = vllm_runs(run_in, tmp_path, [requests], eagle(tmp_path / "head", 2), engine=engine, expand=True)[0]
    probs = pair_probs(target, prompt)
    counts = torch.zeros_like(probs)
    for first, second, _ in made["texts"]:
        counts[first, second] += 1
    pairs, second = chi_square(counts.flatten(), probs.flatten()), chi_square(counts.sum(0), probs.sum(0))
    report(f"{samples} samples, accepted {made['accepted']}: p = {pairs:.2g} for pairs, {second:.2g} for second tokens")
    assert min(pairs, second) > 1e-4
    assert made["accepted"][0] > samples / 100
