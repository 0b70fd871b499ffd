"""What vLLM drafts with a head and says; runs in vLLM's own environment, without ours.

Usage: vllm_drafts.py TARGET HEAD INPUTS OUTPUT. INPUTS is JSON: prompts (token ids), max_new_tokens, draft_length. Each
prompt runs alone, greedily. OUTPUT gets its text, every draft in turn and what was accepted at each position.
"""

import json
import sys
from pathlib import Path

from vllm import LLM, SamplingParams
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer


def main(target: str, head: str, inputs: str, output: str) -> None:
    given = json.loads(Path(inputs).read_text())
    drafts: list[list[int]] = []
    propose = SpecDecodeBaseProposer.propose

    def logged(self, *args, **kwargs):
        made = propose(self, *args, **kwargs)
        drafts.extend(made.tolist())
        return made

    SpecDecodeBaseProposer.propose = logged
    llm = LLM(
        target,
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=1,
        enable_prefix_caching=False,
        disable_log_stats=False,
        speculative_config={"model": head, "method": "eagle3", "num_speculative_tokens": given["draft_length"]},
    )
    results = []
    for prompt in given["prompts"]:
        drafts.clear()
        sampling = SamplingParams(temperature=0, max_tokens=given["max_new_tokens"], ignore_eos=True)
        text = llm.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)[0].outputs[0].token_ids
        results.append({"text": list(text), "drafts": [list(draft) for draft in drafts]})
    accepted = [m.values for m in llm.get_metrics() if m.name == "vllm:spec_decode_num_accepted_tokens_per_pos"]
    Path(output).write_text(json.dumps({"results": results, "accepted": accepted[0]}))


if __name__ == "__main__":
    main(*sys.argv[1:])
