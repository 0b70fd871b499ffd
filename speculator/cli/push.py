"""`python -m speculator push`: a head's folder to a repository of the Hugging Face hub."""

from __future__ import annotations

import argparse
from pathlib import Path

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HTTPError

from speculator.checkpoints import load_any
from speculator.checkpoints.card import NAME, write_card
from speculator.drafters.tuned import TUNED
from speculator.errors import OneLineParser, UserError, check_secret, hide, refuse

HELP = "upload a head's folder, in the layout that it has, to the Hugging Face hub; one without a model card gets one"
# Of the folder, what belongs to a head: nothing that lies there by chance.
_FILES = ["config.json", NAME, TUNED, "*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin*"]


def add_flags(parser: OneLineParser) -> None:
    """The command's flags."""
    parser.add_argument("--speculator", required=True, type=Path, help="folder of a head, in any of the layouts")
    parser.add_argument("--repo_id", required=True, help="org/name; made if it is not there")
    parser.add_argument("--private", action="store_true", help="make it private, if it is made")


def run(arguments: argparse.Namespace) -> None:
    """Read the head, so that what is pushed can be loaded, then make the repository and upload."""
    folder, repo = arguments.speculator, arguments.repo_id
    load_any(folder)
    token = get_token() or ""
    refuse((not token, "no token for the hub: `hf auth login` stores one, or set HF_TOKEN"))
    check_secret("the hub's token", token)
    api, card, pushed = HfApi(), folder / NAME, False
    own = card.exists()
    try:
        if not own:
            write_card(folder)
        api.create_repo(repo, private=arguments.private or None, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repo, folder_path=folder, allow_patterns=_FILES, commit_message=f"Draft head from {folder.name}"
        )
        pushed = True
    except (HTTPError, OSError, RuntimeError, ValueError) as error:
        raise UserError(f"can't push to {repo} at {api.endpoint}: {hide(str(error), token)}") from None
    finally:
        if not (own or pushed):
            card.unlink(missing_ok=True)
    print(f"{folder}: pushed to {commit.repo_url}")
