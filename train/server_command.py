"""`speculator server-command`: print the `vllm serve` line of a run's target, and check that it runs."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from contextlib import closing

from transformers import PreTrainedConfig

from data.magpie import names_self
from speculator.errors import refuse, run_command
from speculator.target.server import STORAGE, ServerTarget, layers_folder
from train.command_line import parse
from train.config import RunConfig

HELP = """usage: speculator server-command [--check] [FLAGS OF train] [-- FLAGS OF vllm serve]

Print the `vllm serve` line with which servers run the target of a config and give its hidden states. Flags after --
are added to the line: parallel sizes, --port, --quantization.

  --check           ask every server of target.server for one text, and compare the answer with what the config expects
  --storage FOLDER  RAM disk that server and training see at the same path (default: {storage})
"""


def needed_of_server(config: RunConfig, target: PreTrainedConfig, context: int) -> tuple[tuple[int, ...], int]:
    """Return the auxiliary layers that the run's head reads, and the tokens of the longest document that it sends.

    Args:
        target: the target's text config.
        context: its context length.
    """
    from train.initialise import head_config  # imports torch

    head = head_config(config.speculator, target)
    longest = config.data.seq_length
    if names_self(config.data.sources):
        own = config.data.self_source
        longest = max(longest, own.turns * (own.max_prompt_tokens + own.max_new_tokens))
    if config.stage2.max_steps:
        longest = max(longest, config.data.seq_length) + config.stage2.generate.max_new_tokens
    return tuple(getattr(head, "aux_layers", None) or ()), min(longest, context - 1)


def serve_line(config: RunConfig, layers: Sequence[int], longest: int, storage: str, more: Sequence[str]) -> str:
    """Return the `vllm serve` line.

    Args:
        layers: numbers of the layers, the last one's included.
        longest: tokens of the longest document.
        storage: folder of the files.
        more: flags of the user.
    """
    target = config.target
    speculative = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(layers)}},
    }
    connector = {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": f"{storage.rstrip('/')}/{layers_folder(layers)}"},
    }
    line = ["vllm", "serve", target.name_or_path]
    line += ["--revision", target.revision] if target.revision else []
    line += ["--trust-remote-code"] if target.trust_remote_code else []
    line += ["--dtype", target.dtype, "--max-model-len", str(longest + 1), "--no-enable-prefix-caching"]
    line += ["--speculative-config", json.dumps(speculative), "--kv-transfer-config", json.dumps(connector), *more]
    return shlex.join(line)


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if "--help" in argv or "-h" in argv:
        print(HELP.format(storage=STORAGE), end="")
        return 0
    argv, more = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    check, storage = "--check" in argv, STORAGE
    argv = [word for word in argv if word != "--check"]
    if "--storage" in argv[:-1]:
        at = argv.index("--storage")
        storage = argv[at + 1]
        del argv[at : at + 2]
    config = parse(argv)
    return run_command("speculator server-command", lambda: run(config, check, storage, more))


def run(config: RunConfig, check: bool, storage: str, more: Sequence[str]) -> None:
    """Print the line, or check the servers."""
    from train import checks
    from train.plan import target_config
    from train.run import load_target
    from train.sizes import with_sizes_of_target

    whole = target_config(config)
    text, config = whole.get_text_config(), with_sizes_of_target(config, whole)
    checks.settings(config)
    checks.fits_config(config, whole)
    aux_layers, longest = needed_of_server(config, text, text.max_position_embeddings)
    layers = (*aux_layers, text.num_hidden_layers)
    if not check:
        print(serve_line(config, layers, longest, storage, more))
        return
    refuse((not config.target.server, "--check needs --target.server URL"))
    target = load_target(config)
    assert isinstance(target, ServerTarget)
    with closing(target):
        target.check(aux_layers, longest)
    for url in target.urls:
        print(f"{url}: serves {target.name}, with layers {' '.join(map(str, layers))} of texts of {longest} tokens")
