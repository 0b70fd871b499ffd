"""The targets that the installed vLLM refuses to draft for are those of targets.yaml."""

import json

from speculator.checkpoints.targets import VLLM, lists


def test_the_installed_vllm_refuses_the_targets_of_the_list(run_in):
    found = json.loads(run_in("vllm", "vllm_targets.py").splitlines()[-1])
    assert len(found) > 50
    ours = lists()[VLLM]["refuses"]["eagle3 dflash dspark"].split()
    assert {kind for kind, gives in found.items() if not gives} == {kind for kind in found if kind in ours}
