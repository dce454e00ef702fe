"""Checkpoints from and to the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from medusa_train.checkpoint import abi
from medusa_train.errors import UserError

DOWNLOADED = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "README.md")


def download_checkpoint(name: str, revision: str | None) -> Path:
    """Fetches checkpoint `owner/name` into the hub's cache (never a pickle); returns the local folder."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=list(DOWNLOADED)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise UserError(
            f"no checkpoint folder {name!r} here, and the hub cannot give it ({type(error).__name__})",
            fix="check the spelling, log in with `hf auth login`, or name a local folder",
        ) from error
    if not (folder / abi.MANIFEST_FILE).is_file():
        raise UserError(
            f"{name} on the hub holds no {abi.MANIFEST_FILE}: it is no checkpoint of medusa-train",
            fix="heads of another program come in with `medusa-train import`",
        )
    return folder
