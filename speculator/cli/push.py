"""`speculator push`: upload a head's folder to the Hugging Face hub."""

from __future__ import annotations

import argparse

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HTTPError

from speculator.checkpoints import load_any
from speculator.checkpoints.card import NAME, write_card
from speculator.checkpoints.hub import FILES
from speculator.errors import UserError, check_secret, hide, refuse


def run(arguments: argparse.Namespace) -> None:
    """Load the head, which checks it, then create the repository and upload."""
    folder, repo = arguments.speculator, arguments.repo_id
    refuse((not folder.is_dir(), f"--speculator {folder}: no such folder on this machine"))
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
            repo_id=repo, folder_path=folder, allow_patterns=FILES, commit_message=f"Draft head from {folder.name}"
        )
        pushed = True
    except (HTTPError, OSError, RuntimeError, ValueError) as error:
        raise UserError(f"can't push to {repo} at {api.endpoint}: {hide(str(error), token)}") from None
    finally:
        if not (own or pushed):
            card.unlink(missing_ok=True)
    print(f"{folder}: pushed to {commit.repo_url}")
