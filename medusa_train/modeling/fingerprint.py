"""A hash of what a backbone computes: config, the tokenizer's vocabulary and every weight tensor.

The chat template is hashed on its own (`BaseTokenizer.template_hash`); `tokenizer_config.json` is not hashed.

Heads fit one backbone. Two bases of the same shape differ in this hash, and re-sharded copies of one base do not.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from pathlib import Path
from typing import Any

from medusa_train.errors import UserError
from medusa_train.provenance import canonical_json, sha256_file, sha256_json, user_cache, write_atomic

# What a config says about where or by whom it was saved, not about what the model computes.
VOLATILE_CONFIG = {"_name_or_path", "name_or_path", "transformers_version", "dtype", "torch_dtype", "_commit_hash"}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "added_tokens.json")


def fingerprint_folder(folder: str | Path) -> str:
    """sha256 over config, tokenizer files and weight tensors of the model in `folder`.

    Tensors are hashed by name, dtype, shape and bytes, so that sharding does not matter. The result is kept in the
    user's cache under the files' sizes and modification times; a file that changes is hashed again.
    """
    folder = Path(folder)
    state = _file_state(folder)
    cache = user_cache() / "fingerprints" / f"{sha256_json([str(folder.resolve()), state])[:32]}.json"
    try:
        return json.loads(cache.read_text())["fingerprint"]
    except (OSError, ValueError, KeyError):
        pass
    fingerprint = sha256_json(
        {"config": config_hash(folder), "tokenizer": tokenizer_hash(folder), "weights": weights_hash(folder)}
    )
    with contextlib.suppress(OSError):  # a cache that cannot be written costs time, nothing else
        write_atomic(cache, canonical_json({"fingerprint": fingerprint, "folder": str(folder), "state": state}))
    return fingerprint


def _file_state(folder: Path) -> list[list[Any]]:
    files = [*_weight_files(folder), *(folder / name for name in ("config.json", *TOKENIZER_FILES))]
    return [[p.name, p.stat().st_size, p.stat().st_mtime_ns] for p in sorted(files) if p.is_file()]


def _weight_files(folder: Path) -> list[Path]:
    tensors = sorted(folder.glob("*.safetensors"))
    # Mistral ships the same weights a second time under its own names; transformers never reads that file.
    named = [path for path in tensors if not path.name.startswith("consolidated")]
    return named or tensors or sorted(folder.glob("*.bin"))


def missing_shards(folder: Path) -> list[str]:
    """Weight files that an index, or the names of the shards that are there, promise and that are not there."""
    promised: set[str] = set()
    for index in [*folder.glob("*.safetensors.index.json")] or [*folder.glob("*.bin.index.json")]:
        with contextlib.suppress(OSError, ValueError, KeyError, AttributeError, TypeError):
            promised |= {str(name) for name in json.loads(index.read_text())["weight_map"].values()}
    for path in _weight_files(folder):
        numbered = re.fullmatch(r"(.+-)(\d{5})-of-(\d{5})(\.\w+)", path.name)
        if numbered:
            start, _, total, end = numbered.groups()
            promised |= {f"{start}{number:05d}-of-{total}{end}" for number in range(1, int(total) + 1)}
    return sorted(name for name in promised if not (folder / name).is_file())


def config_hash(folder: Path) -> str:
    """Hash of config.json without the entries that say nothing about the function."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"config.json cannot be read ({error})", where=str(folder)) from error
    return sha256_json({key: value for key, value in config.items() if key not in VOLATILE_CONFIG})


def tokenizer_hash(folder: Path) -> str:
    """Hash of the tokenizer's files that decide which ids a text gets."""
    return sha256_json({name: sha256_file(folder / name) for name in TOKENIZER_FILES if (folder / name).is_file()})


def weights_hash(folder: Path) -> str:
    """Hash over every tensor by name; pickled weights by their files' bytes."""
    from safetensors import safe_open

    files = _weight_files(folder)
    if not files:
        raise UserError("this folder holds no weights", where=str(folder), allowed="*.safetensors (or *.bin)")
    if absent := missing_shards(folder):
        raise UserError(
            f"{len(absent)} weight files are missing: {', '.join(absent[:5])}",
            where=str(folder),
            fix="download or copy the model again",
        )
    if files[0].suffix == ".bin":
        return sha256_json([sha256_file(path) for path in files])
    tensors: dict[str, str] = {}
    for path in files:
        with safe_open(path, framework="pt") as handle:
            for name in handle.keys():  # noqa: SIM118 - a safetensors handle is no mapping
                tensors[name] = tensor_hash(handle.get_tensor(name))
    return sha256_json(tensors)


def tensor_hash(tensor: Any) -> str:
    """sha256 of a torch tensor: dtype, shape, then its bytes in C order."""
    import torch

    flat = tensor.detach().cpu().contiguous()
    digest = hashlib.sha256(f"{flat.dtype}{tuple(flat.shape)}".encode())
    digest.update(flat.view(-1).view(torch.uint8).numpy() if flat.numel() else b"")
    return digest.hexdigest()
