"""The checks of a checkpoint on disk against its own manifest. Torch is needed only to look for non-finite numbers."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from medusa_train.checkpoint import abi
from medusa_train.checkpoint.manifest import RESTORE, HeadsManifest, read_manifest
from medusa_train.checkpoint.problems import Problems
from medusa_train.checkpoint.rank_paths import check_tree
from medusa_train.checkpoint.tensorfile import TensorFile, read_header
from medusa_train.provenance import sha256_file

# Up to this size a file's hash costs about a millisecond and is always checked; beyond it only on request.
SMALL_FILE_BYTES = 1 << 20
# Up to this size of the heads file every number is looked at on each load.
FINITE_CHECK_BYTES = 64 << 20
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".gguf")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_OURS = (abi.TREE_FILE, abi.CONFIG_FILE, "adapter_config.json", "model.safetensors.index.json")


def inspect_checkpoint(
    folder: Path, problems: Problems, *, hashes: bool
) -> tuple[HeadsManifest | None, TensorFile | None]:
    """Every check that needs no backbone. Faults go to `problems`; what could be read is returned."""
    if not folder.is_dir():
        what = "is a file, not a folder" if folder.exists() else "no such folder"
        problems.add("missing", str(folder), what, "name the folder that `medusa-train fit` or `import` wrote")
        return None, None
    manifest = read_manifest(folder, problems)
    if manifest is None:
        return None, None
    _check_files(folder, manifest, problems, hashes)
    _check_config(folder, manifest, problems)
    _check_tree_file(folder, manifest, problems)
    if not (folder / abi.HEADS_FILE).is_file():
        return manifest, None
    heads_file = read_header(folder / abi.HEADS_FILE, problems)
    if heads_file is not None:
        _check_tensors(heads_file, manifest, problems, hashes)
        if hashes or (folder / abi.HEADS_FILE).stat().st_size <= FINITE_CHECK_BYTES:
            _check_numbers(heads_file, manifest, problems)
    return manifest, heads_file


def _check_files(folder: Path, manifest: HeadsManifest, problems: Problems, hashes: bool) -> None:
    required = {abi.HEADS_FILE, abi.CONFIG_FILE}
    if manifest.backbone.changed == "adapter":
        required |= {f"{abi.ADAPTER_FOLDER}/adapter_config.json", f"{abi.ADAPTER_FOLDER}/adapter_model.safetensors"}
    elif manifest.backbone.changed == "merged":
        required.add(f"{abi.BACKBONE_FOLDER}/{abi.CONFIG_FILE}")
    for name in sorted(required - set(manifest.files)):
        problems.add("manifest", name, "the manifest does not list this file, and a checkpoint needs it", RESTORE)
    for name, entry in manifest.files.items():
        path = folder / name
        if not path.is_file():
            problems.add("missing", name, "the manifest lists this file, and it is missing", RESTORE)
            continue
        size = path.stat().st_size
        if size == 0 < entry.bytes:
            problems.add("empty", name, f"empty, {entry.bytes} bytes were written", RESTORE)
        elif size != entry.bytes:
            problems.add("size", name, f"{size} bytes, {entry.bytes} were written", RESTORE)
        elif (hashes or size <= SMALL_FILE_BYTES) and sha256_file(path) != entry.sha256:
            problems.add("hash", name, "its bytes are not the ones that were written (sha256 differs)", RESTORE)
    for name in unlisted_files(folder, manifest):
        if name.endswith(_WEIGHTS) or name.rsplit("/", 1)[-1] in _OURS:
            problems.add(
                "unexpected",
                name,
                "not written by medusa-train: the manifest does not list it",
                "move files of other programs out of the checkpoint folder; a tree is stored with `medusa-train tree`",
            )


def unlisted_files(folder: Path, manifest: HeadsManifest) -> list[str]:
    """Relative paths in the folder that the manifest does not list (hidden files and folders left aside)."""
    found = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            relative = os.path.relpath(os.path.join(parent, name), folder).replace(os.sep, "/")
            if not name.startswith(".") and relative != abi.MANIFEST_FILE and relative not in manifest.files:
                found.append(relative)
    return sorted(found)


def _check_config(folder: Path, manifest: HeadsManifest, problems: Problems) -> None:
    config = read_json(folder / abi.CONFIG_FILE, problems)
    if config is None:
        return
    for key, value in manifest.config().items():
        if key not in config:
            problems.add("config", f"{abi.CONFIG_FILE} {key}", "missing", RESTORE)
        elif config[key] != value:
            kind = "count" if key in ("medusa_num_heads", "medusa_num_layers") else "config"
            problems.add(kind, f"{abi.CONFIG_FILE} {key}", f"{config[key]!r}, the manifest says {value!r}", RESTORE)


def _check_tree_file(folder: Path, manifest: HeadsManifest, problems: Problems) -> None:
    if abi.TREE_FILE in manifest.files:
        tree = read_json(folder / abi.TREE_FILE, problems)
        if tree is not None:
            check_tree(tree, manifest.medusa_num_heads, problems)


def read_json(path: Path, problems: Problems) -> dict[str, Any] | None:
    """A JSON object from a small file; None where it is absent (reported elsewhere) or damaged (noted)."""
    try:
        content = json.loads(path.read_bytes())
    except OSError:
        return None
    except (ValueError, RecursionError) as error:
        problems.add("config", path.name, f"not JSON ({type(error).__name__})", RESTORE)
        return None
    if not isinstance(content, dict):
        problems.add("config", path.name, "not a JSON object", RESTORE)
        return None
    return content


def _check_tensors(found: TensorFile, manifest: HeadsManifest, problems: Problems, hashes: bool) -> None:
    """Names, counts, shapes and dtypes of the heads file, both ways."""
    label, expected = abi.HEADS_FILE, manifest.expected_tensors()
    counts = abi.counts_from_names(found.tensors)
    if counts != (manifest.medusa_num_heads, manifest.medusa_num_layers):
        problems.add(
            "count",
            label,
            f"the tensors are {counts[0]} heads of {counts[1]} layers, the manifest says "
            f"{manifest.medusa_num_heads} of {manifest.medusa_num_layers}",
            RESTORE,
        )
    for name, shape in expected.items():
        info, where = found.tensors.get(name), f"{label} [{name}]"
        if info is None:
            problems.add("missing", where, f"the tensor is missing, shape {list(shape)} is needed", RESTORE)
            continue
        if 0 in info.shape:
            problems.add("empty", where, f"shape {list(info.shape)} holds nothing, {list(shape)} is needed", RESTORE)
        elif info.shape != shape:
            problems.add("shape", where, f"shape {list(info.shape)}, {list(shape)} is needed", RESTORE)
        dtype = abi.FIXED_DTYPES.get(name, manifest.dtype)
        if info.dtype != dtype:
            problems.add("dtype", where, f"dtype {info.dtype}, {dtype} is needed", RESTORE)
    for name in found.tensors.keys() - expected.keys():
        problems.add(
            "unexpected", f"{label} [{name}]", f"a `{manifest.head_contract}` checkpoint has no such tensor", RESTORE
        )
    if found.header_sha256 != manifest.header_sha256:
        problems.add(
            "hash", label, "its header (tensor names, shapes, places) is not the one that was written", RESTORE
        )
    if manifest.tensors.keys() != expected.keys():
        problems.add(
            "manifest", f"{abi.MANIFEST_FILE} tensors", "does not list exactly the tensors of its own counts", RESTORE
        )
    if hashes and found.header_sha256 == manifest.header_sha256:
        _check_digests(found, manifest, problems)


def _check_digests(found: TensorFile, manifest: HeadsManifest, problems: Problems) -> None:
    try:
        digests = found.digests()
    except (OSError, ValueError):
        return  # a truncated file; its size is reported already
    owners = {digest: name for name, digest in manifest.tensors.items()}
    for name, digest in digests.items():
        if manifest.tensors.get(name) not in (None, digest):
            other = owners.get(digest)
            what = "its numbers are not the ones that were written (sha256 differs)"
            if other is not None:
                what = f"it holds the numbers that were written as {other}: swapped"
            problems.add("hash", f"{abi.HEADS_FILE} [{name}]", what, RESTORE)


def _check_numbers(found: TensorFile, manifest: HeadsManifest, problems: Problems) -> None:
    """Non-finite numbers, and a token map that names no token or one twice."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(found.path, framework="pt", device="cpu") as handle:
            for name, info in found.tensors.items():
                where = f"{abi.HEADS_FILE} [{name}]"
                if name == abi.TOKEN_MAP_NAME and info.dtype == "I64":
                    check_token_map(handle.get_tensor(name), manifest.vocab_size, where, problems)
                elif info.dtype in abi.HEAD_DTYPES and 0 not in info.shape:
                    values = handle.get_tensor(name)
                    bad = count_non_finite(values)
                    if bad:
                        problems.add("non-finite", where, f"{bad} of {values.numel()} are NaN or infinite", RESTORE)
    except (SafetensorError, OSError, ValueError, RuntimeError):
        return  # the header checks have named the damage already


def count_non_finite(values: Any) -> int:
    """How many numbers of a floating-point tensor are NaN or infinite; one fast pass where none is (any NaN and any
    infinity shows in the extremes, and `isfinite` takes 25 times as long)."""
    if values.numel() == 0 or all(bool(extreme.isfinite()) for extreme in values.aminmax()):
        return 0
    return values.numel() - int(values.isfinite().sum())


def check_token_map(token_map: Any, vocab_size: int, where: str, problems: Problems) -> None:
    """Notes entries of an int64 [V'] token map that are no token of the vocabulary, or stand twice."""
    outside = int(((token_map < 0) | (token_map >= vocab_size)).sum())
    if outside:
        problems.add("config", where, f"{outside} entries are outside the vocabulary 0..{vocab_size - 1}", RESTORE)
    repeated = token_map.numel() - token_map.unique().numel()
    if repeated:
        problems.add("config", where, f"{repeated} tokens stand in it twice", RESTORE)


def is_pickle(name: str) -> bool:
    """True for a file name of a kind that could run code when read."""
    return Path(name).suffix in _PICKLES


def holds_pickle(folder: Path) -> list[str]:
    """Names of files below `folder` that could run code when read; nothing here ever opens one."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if is_pickle(path.name))
