"""Checkpoints from and to the Hugging Face hub."""

from __future__ import annotations

import glob
import json
from pathlib import Path

from medusa_train.checkpoint import abi
from medusa_train.checkpoint.inspect_ import is_pickle
from medusa_train.errors import UserError

TRANSPORTS = ("httpx", "httpx2", "httpcore", "httpcore2", "requests")


def download_checkpoint(name: str, revision: str | None) -> Path:
    """Fetches checkpoint `owner/name` into the hub's cache (never a pickle); returns the local folder."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=[abi.MANIFEST_FILE, "README.md"]))
        if (folder / abi.MANIFEST_FILE).is_file():
            wanted = [abi.MANIFEST_FILE, "README.md", *_listed(folder / abi.MANIFEST_FILE)]
            # The same commit for both calls, whatever is pushed in between.
            folder = Path(snapshot_download(name, revision=folder.name, allow_patterns=wanted))
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


def _listed(manifest: Path) -> list[str]:
    """Patterns for exactly the files that a manifest lists, no pickle among them; [] where it cannot be read."""
    try:
        names = list(json.loads(manifest.read_text(encoding="utf-8"))["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return []  # reading the checkpoint says what is wrong with it
    return [glob.escape(str(name)) for name in names if not is_pickle(str(name))]


def download_foreign(name: str) -> Path:
    """Fetches another program's heads `owner/name` into the hub's cache; returns the local folder."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=["*.safetensors", "*.json", "*.pt", "*.bin"]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise UserError(
            f"nothing named {name!r} here, and the hub cannot give it ({type(error).__name__})",
            fix="check the spelling, log in with `hf auth login`, or name a local folder",
        ) from error


def push_folder(folder: Path, repo_id: str, *, private: bool, message: str) -> str:
    """Uploads a folder to the hub as model repository `repo_id` (made if need be); returns its address.

    Raises:
        UserError: not logged in, no permission, no network, an impossible name.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError

    api = HfApi()
    try:
        address = api.create_repo(repo_id, private=private, exist_ok=True, repo_type="model")
        api.upload_folder(folder_path=folder, repo_id=address.repo_id, commit_message=message, repo_type="model")
    except HFValidationError as error:
        raise UserError(f"{repo_id!r} is no name for a repository", allowed="owner/name") from error
    except LocalTokenNotFoundError as error:
        raise UserError("not logged in to the hub", fix="run `hf auth login`, or set HF_TOKEN") from error
    except HfHubHTTPError as error:
        status = getattr(error.response, "status_code", "?")
        raise UserError(
            f"the hub refused the upload to {repo_id} (status {status})",
            fix="check that you are logged in (`hf auth whoami`) and may write there",
        ) from error
    except Exception as error:
        # The client raises its transport's own errors where a connection breaks; they share no base class.
        if not isinstance(error, OSError) and type(error).__module__.split(".")[0] not in TRANSPORTS:
            raise
        raise UserError(
            f"the hub cannot be reached ({type(error).__name__}); nothing was uploaded",
            fix="connect and run the command again",
        ) from error
    return str(address)
