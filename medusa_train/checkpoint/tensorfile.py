"""Reading safetensors files strictly: the header is checked before any tensor is believed.

The library maps the file and trusts the header as far as it needs to; the checks here name each fault with its tensor
(truncated, aliased, empty, of an unknown dtype) instead of failing at the first one. Format: 8 bytes little-endian
header length, JSON header, tensor bytes (https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medusa_train.checkpoint.problems import Problems

ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
MAX_HEADER_BYTES = 100_000_000
DAMAGED = "the file is damaged: copy or download it again, or restore it from the run that wrote it"


@dataclass(frozen=True)
class TensorInfo:
    """One tensor in a file: safetensors dtype name, shape, and its byte range after the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class TensorFile:
    """A checked header. `data_start` is the file offset of byte 0 of the tensor data."""

    path: Path
    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    header_sha256: str
    data_start: int

    def digests(self) -> dict[str, str]:
        """Tensor name -> sha256 of its bytes, read through one memory map."""
        found = {name: hashlib.sha256(b"").hexdigest() for name in self.tensors}
        with (
            open(self.path, "rb") as handle,
            mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
            memoryview(mapped) as view,
        ):
            for name, info in self.tensors.items():
                if info.end > info.begin:
                    with view[self.data_start + info.begin : self.data_start + info.end] as piece:
                        found[name] = hashlib.sha256(piece).hexdigest()
        return found


def read_header(path: Path, problems: Problems, label: str | None = None) -> TensorFile | None:
    """Checks the header of a safetensors file; None where it cannot be read at all, the reasons in `problems`."""
    label = label or path.name
    raw = _raw_header(path, problems, label)
    if raw is None:
        return None
    repeated: list[str] = []

    def unique(pairs: list[tuple[str, object]]) -> dict:
        seen: dict = {}
        for key, value in pairs:
            if key in seen:
                repeated.append(key)
            seen[key] = value
        return seen

    try:
        header = json.loads(raw, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        problems.add("size", label, f"the header is not JSON ({type(error).__name__})", DAMAGED)
        return None
    if not isinstance(header, dict):
        problems.add("size", label, "the header is not a JSON object", DAMAGED)
        return None
    for name in repeated:
        problems.add("aliased", f"{label} [{name}]", "the name stands twice in the header", DAMAGED)
    metadata = header.pop("__metadata__", {})
    start = 8 + len(raw)
    tensors: dict[str, TensorInfo] = {}
    for name, entry in header.items():
        info = _tensor_info(name, entry)
        if isinstance(info, str):
            problems.add("size", f"{label} [{name}]", info, DAMAGED)
        else:
            tensors[name] = info
    if len(tensors) == len(header):
        _check_layout(tensors, path.stat().st_size - start, problems, label)
    return TensorFile(
        path,
        tensors,
        metadata if isinstance(metadata, dict) else {},
        hashlib.sha256(raw).hexdigest(),
        start,
    )


def _raw_header(path: Path, problems: Problems, label: str) -> bytes | None:
    try:
        size = path.stat().st_size
        with open(path, "rb") as handle:
            prefix = handle.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else None
            if length is None or length > min(size - 8, MAX_HEADER_BYTES):
                problems.add("size", label, f"not a whole safetensors file ({size} bytes)", DAMAGED)
                return None
            return handle.read(length)
    except FileNotFoundError:
        problems.add("missing", label, "the file is missing", DAMAGED)
    except OSError as error:
        problems.add("missing", label, f"the file cannot be read ({error.strerror or error})", DAMAGED)
    return None


def _tensor_info(name: str, entry: object) -> TensorInfo | str:
    """The entry as a `TensorInfo`, or what is wrong with it."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        return "its header entry does not hold exactly dtype, shape and data_offsets"
    dtype, shape, span = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        return f"unknown dtype {dtype!r}"
    if not _naturals(shape) or not _naturals(span) or len(span) != 2:
        return f"impossible shape {shape!r} or byte range {span!r}"
    begin, end = span
    needed = math.prod(shape) * ITEM_BYTES[dtype]
    if end - begin != needed:
        return f"byte range {begin}..{end} does not hold shape {shape} of {dtype} ({needed} bytes)"
    return TensorInfo(name, dtype, tuple(shape), begin, end)


def _naturals(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _check_layout(tensors: dict[str, TensorInfo], data_bytes: int, problems: Problems, label: str) -> None:
    """The byte ranges must cover the data exactly once: no overlap, no hole, no tail."""
    position, previous = 0, None
    for info in sorted(tensors.values(), key=lambda info: (info.begin, info.end)):
        if info.begin < position:
            problems.add(
                "aliased",
                f"{label} [{info.name}]",
                f"shares its bytes with {previous}",
                "write the file again with every tensor stored on its own",
            )
        elif info.begin > position:
            problems.add(
                "size",
                f"{label} [{info.name}]",
                f"{info.begin - position} bytes before it belong to no tensor",
                DAMAGED,
            )
        position, previous = max(position, info.end), info.name
    if position != data_bytes:
        problems.add("size", label, f"holds {data_bytes} bytes of tensors, the header tells of {position}", DAMAGED)


def write_tensors(path: Path, tensors: dict[str, Any]) -> None:
    """A safetensors file of torch tensors.

    Raises:
        OSError: the disk is full, or refuses.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        # The library tells of the system's error in words only; whoever catches a full disk looks for its number.
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
