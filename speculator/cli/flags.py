"""Flags of the commands of `speculator` that use a head. Each function has a command's name and its description."""

from __future__ import annotations

from pathlib import Path

from speculator.cli.shared_flags import MANY, add_drafter_flags, add_filters, add_revision, add_target_flags
from speculator.errors import OneLineParser, as_text

FORMATS: tuple[str, ...] = ("ibm", "arctic", "vllm-plugin", "eagle3", "speculators", "dspark", "dflash", "dflash2")
FORMATS += ("transformers", "gguf", "mtp", "native")
"""Names of the layouts, see `speculator.checkpoints.FORMATS`."""
DTYPES = ("float32", "bfloat16", "float16")


def generate(parser: OneLineParser) -> None:
    """Continue prompts or chat; the text is the target's own with any drafter."""
    add_target_flags(parser)
    add_drafter_flags(parser)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", type=as_text, help="text to continue; with --chat, the user's message")
    source.add_argument(
        "--prompts", type=Path, help='.jsonl file with rows {"prompt"}, {"messages"}, {"turns"} or {"question"}'
    )
    parser.add_argument(
        "--chat", action="store_true", help="apply the chat template; without --prompt, converse over stdin"
    )
    parser.add_argument("--num_samples", type=int, default=1, help="texts to generate per prompt (default: 1)")
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="sampling temperature; 0 decodes greedily (default: 0)"
    )
    add_filters(parser)
    parser.add_argument(
        "--stop", type=as_text, **MANY, default=[], metavar="STRING", help="stop string; can be repeated"
    )
    parser.add_argument("--max_new_tokens", type=int, default=128, help="most new tokens per text (default: 128)")
    parser.add_argument("--batch_size", type=int, default=1, help="texts to decode at a time (default: 1)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling (default: 0)")
    parser.add_argument("--output", type=Path, help=".jsonl file for the texts, which are then not printed")
    parser.add_argument("--show_drafts", action="store_true", help="mark accepted draft tokens: green, or [[...]]")


def serve(parser: OneLineParser) -> None:
    """Start a server with OpenAI's API."""
    add_target_flags(parser)
    add_drafter_flags(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, loopback only)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on; 0 takes a free one (default: 8000)")
    parser.add_argument(
        "--served_model_name", metavar="NAME", help="name of the model in the API (default: the target)"
    )
    parser.add_argument("--max_num_seqs", type=int, default=8, help="requests to decode at a time (default: 8)")
    parser.add_argument("--max_model_len", type=int, help="tokens of a prompt and its answer (default: the context)")
    parser.add_argument(
        "--queue", type=int, default=256, help="requests that may wait; further ones get status 429 (default: 256)"
    )
    parser.add_argument(
        "--api_key", help="key that requests under /v1 must send (default: $SPECULATOR_API_KEY, else none)"
    )
    parser.add_argument(
        "--timeout_keep_alive",
        type=int,
        default=75,
        metavar="SECONDS",
        help="time after which an idle connection is closed; longer than that of a load balancer (default: 75)",
    )
    parser.add_argument(
        "--timeout_graceful_shutdown",
        type=int,
        default=60,
        metavar="SECONDS",
        help="time for requests in flight after SIGTERM or Ctrl-C; then they are cut off (default: 60)",
    )
    parser.add_argument(
        "--allowed_origins",
        **MANY,
        default=[],
        metavar="URL",
        help="origins of the web pages that may use the server, such as http://localhost:3000 (default: none)",
    )
    parser.add_argument(
        "--allow_load",
        action="store_true",
        help="load another head at POST /v1/speculator/load, while requests are decoded; needs --api_key",
    )
    parser.add_argument(
        "--record",
        type=Path,
        metavar="FOLDER",
        help="folder for the token ids of prompts and answers, to train on (default: nothing is recorded)",
    )
    parser.add_argument("--record_share", type=float, help="share of requests to record (default: 0.1)")
    parser.add_argument(
        "--record_max", type=float, metavar="GB", help="size at which the oldest shards go (default: 10)"
    )


def inspect(parser: OneLineParser) -> None:
    """Describe a head's folder: architecture, size, base model, layout, and the layouts it can be exported to."""
    parser.add_argument("path", metavar="PATH", help="folder or hub id of a head, in any layout")
    add_revision(parser)


def export(parser: OneLineParser) -> None:
    """Write a head in another checkpoint layout, and show which servers load it and how."""
    parser.add_argument("--speculator", required=True, help="folder or hub id of a head, in any layout")
    add_revision(parser)
    parser.add_argument("--format", required=True, choices=FORMATS, help="layout to write")
    parser.add_argument("--output", required=True, type=Path, help="folder to write; must be new or empty")
    parser.add_argument("--dtype", choices=DTYPES, help="dtype of the weights (default: as stored)")
    parser.add_argument("--base_model", help="hub id or folder of the target (default: as recorded)")


def dequantise(parser: OneLineParser) -> None:
    """Write the model of a GGUF file as a folder, with tokenizer, chat template and generation config."""
    parser.add_argument("--target", required=True, help="GGUF file")
    parser.add_argument("--output", required=True, type=Path, help="folder to write; must be new or empty")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="dtype of the weights (default: bfloat16)")


def push(parser: OneLineParser) -> None:
    """Upload a head's folder to the Hugging Face hub, with a model card."""
    parser.add_argument("--speculator", required=True, type=Path, help="folder of a head, in any layout")
    parser.add_argument("--repo_id", required=True, help="repository org/name, created if necessary")
    parser.add_argument(
        "--private", action="store_true", help="make a new repository private; an existing public one is an error"
    )
