"""Text and drafts of vLLM; runs in vLLM's environment.

Usage: vllm_runs.py INPUTS OUTPUT. INPUTS is JSON: target, engine (settings of vLLM), speculative (its
speculative_config, or null) and runs. A run is a list of requests that are submitted together: prompt (token ids),
max_new_tokens, temperature and seed. OUTPUT gets for each run the texts, the drafts as [position of the target's last
token, the next token, the draft], the accepted tokens per position, preemptions and prefix cache hits. `expand` in
INPUTS replaces a faulty function of vLLM's CPU backend, see `expand`.
"""

import functools
import inspect
import json
import sys
from pathlib import Path

import torch
from vllm import LLM, SamplingParams
from vllm.v1.sample import rejection_sampler
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer


def expand(output, input_val, cu_num_tokens, replace_from, replace_to, MAX_NUM_TOKENS=None):
    """Repeat each request's value for each of its tokens.

    Without triton, vLLM 0.32's own `_expand_kernel_impl` writes into a copy unless `output` is int64. So temperatures,
    top-k and top-p of drafted positions are what lay in memory, and sampled text has another distribution.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1)).long()
    values = torch.where(input_val == replace_from, replace_to, input_val).to(output.dtype)
    output.copy_(values.repeat_interleave(counts))


def counters(llm: LLM) -> dict:
    found = {metric.name.removeprefix("vllm:"): metric for metric in llm.get_metrics()}
    accepted = found.get("spec_decode_num_accepted_tokens_per_pos")
    names = ("num_preemptions", "prefix_cache_hits", "spec_decode_num_drafts")
    numbers = {name: found[name].value for name in names if name in found}
    return {"accepted": accepted.values if accepted else [], **numbers}


def main(inputs: str, output: str) -> None:
    given = json.loads(Path(inputs).read_text())
    drafts: list = []
    propose = SpecDecodeBaseProposer.propose
    signature = inspect.signature(propose)

    @functools.wraps(propose)
    def logged(self, *args, **kwargs):
        called = signature.bind(self, *args, **kwargs).arguments
        # The call changes both in place.
        last = called["token_indices_to_sample"]
        last = (called["common_attn_metadata"].query_start_loc[1:] - 1 if last is None else last).clone()
        positions, following = called["target_positions"][last.long()].tolist(), called["next_token_ids"].tolist()
        made = propose(self, *args, **kwargs)
        drafts.extend(map(list, zip(positions, following, made.tolist(), strict=True)))
        return made

    SpecDecodeBaseProposer.propose = logged
    llm = LLM(
        given["target"],
        dtype="float32",
        enforce_eager=True,
        disable_log_stats=False,
        speculative_config=given["speculative"],
        **given["engine"],
    )
    if given.get("expand"):
        rejection_sampler.expand_kernel._impl = expand
    results = []
    for requests in given["runs"]:
        drafts.clear()
        before = counters(llm)
        settings = [
            SamplingParams(
                temperature=request.get("temperature", 0),
                seed=request.get("seed"),
                max_tokens=request["max_new_tokens"],
                ignore_eos=True,
                stop_token_ids=request.get("ends"),
                detokenize=False,
            )
            for request in requests
        ]
        prompts = [{"prompt_token_ids": request["prompt"]} for request in requests]
        texts = [list(made.outputs[0].token_ids) for made in llm.generate(prompts, settings, use_tqdm=False)]
        after = counters(llm)
        accepted = [now - then for now, then in zip(after["accepted"], before["accepted"], strict=True)]
        more = {name: after[name] - before[name] for name in after if name != "accepted"}
        results.append({"texts": texts, "drafts": list(drafts), "accepted": accepted, **more})
    Path(output).write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
