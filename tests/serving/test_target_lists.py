"""The targets that installed servers draft for are those of targets.yaml."""

import json
import os
from pathlib import Path

from speculator.checkpoints.targets import LLAMA_CPP, VLLM, lists

ALGORITHMS = "eagle3 dflash dspark"


def test_the_installed_vllm_refuses_the_targets_of_the_list(run_in):
    found = json.loads(run_in("vllm", "vllm_targets.py").splitlines()[-1])
    assert len(found) > 50
    ours = lists()[VLLM]["refuses"][ALGORITHMS].split()
    assert {kind for kind, gives in found.items() if not gives} == {kind for kind in found if kind in ours}


def test_the_graphs_of_llama_cpp_that_give_layer_inputs_are_those_of_the_list(run_in):
    sources = Path(os.environ["SPECULATOR_SERVING"]).resolve() / "llama_cpp/source/vendor/llama.cpp"
    path = f"{sources}{os.pathsep}{sources / 'gguf-py'}"
    found = json.loads(run_in("llama_cpp", "llama_cpp_targets.py", sources, PYTHONPATH=path).splitlines()[-1])
    ours = lists()[LLAMA_CPP]["runs"]
    assert found == {"files": ours["gguf"].split(), "types": ours[ALGORITHMS].split()}
