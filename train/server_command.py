"""`speculator server-command`: print the `vllm serve` line of a run's target, and check that it runs."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from contextlib import closing

from speculator.errors import OneLineParser, refuse, run_command
from train.command_line import parse
from train.options.config import RunConfig

# Libraries that take seconds are imported where they are used, so that a mistyped flag shows at once.
_STORAGE = "/dev/shm/speculator"

HELP = """print the `vllm serve` line with which a server runs the target of a recipe and gives its hidden states; also
takes the settings of a run, as train.py does, and after -- flags that are added to the line"""


def build_parser() -> OneLineParser:
    """Return the parser of the command's own flags; `split` separates them from those of the run and of vLLM."""
    parser = OneLineParser(prog="speculator server-command", description=HELP)
    check = "send a text to every server of target.server, and compare the answers with what the recipe expects"
    parser.add_argument("--check", action="store_true", help=check)
    storage = f"RAM disk that server and trainer see at the same path (default: {_STORAGE})"
    parser.add_argument("--storage", metavar="FOLDER", default=_STORAGE, help=storage)
    return parser


def split(argv: list[str]) -> tuple[argparse.Namespace, list[str], list[str]]:
    """Return the command's own flags, the settings of the run, and the flags for vLLM."""
    at = argv.index("--") if "--" in argv else len(argv)
    own, settings = build_parser().parse_known_args(argv[:at])
    return own, settings, argv[at + 1 :]


def serve_line(config: RunConfig, layers: Sequence[int], longest: int, storage: str, more: Sequence[str]) -> str:
    """Return the `vllm serve` line.

    Args:
        layers: numbers of the layers whose hidden states the server gives, the last one's included.
        longest: tokens of the longest document that is sent.
        storage: folder in which the server leaves hidden states for the trainer.
        more: flags of the user for `vllm serve`, appended to the line.
    """
    from speculator.clients.hidden_states import layers_folder

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
    own, settings, more = split(list(sys.argv[1:] if argv is None else argv))
    config = parse(settings)
    return run_command("speculator server-command", lambda: print_line(config, own.check, own.storage, more))


def print_line(config: RunConfig, check: bool, storage: str, more: Sequence[str]) -> None:
    """Print the `vllm serve` line, or with `check` send a text to every server; `storage`, `more`: see `serve_line`.

    Raises a UserError if the settings are wrong, or a server does not answer as the run needs.
    """
    from speculator.target.probe import context_length
    from train.door.gpus import Place
    from train.door.settle import settle
    from train.text.inputs import load_target, needed_of_server

    run = settle(config, processes=1, place=Place(1))
    text = run.text
    assert run.target is not None
    assert text is not None
    aux_layers, longest = needed_of_server(run, context_length(text, config.target.name_or_path) - 1)
    layers = (*aux_layers, text.num_hidden_layers)
    if not check:
        print(serve_line(config, layers, longest, storage, more))
        return
    refuse((not config.target.server, "--check needs --target.server URL"))
    target = load_target(run)
    with closing(target):
        target.check(aux_layers, longest)
    for url in config.target.server:
        print(f"{url}: serves {target.name}, with layers {' '.join(map(str, layers))} of texts of {longest} tokens")
