"""Where a file came from: hashes, versions, the machine, the command. And writing so that a crash leaves old or new.

Nothing here imports torch; what it says of torch is read only where torch is already loaded.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

REPORTED_LIBRARIES = (
    "medusa-train", "torch", "transformers", "peft", "accelerate", "datasets", "safetensors", "tokenizers",
    "bitsandbytes", "deepspeed", "liger-kernel",
)  # fmt: skip


def sha256_bytes(data: bytes) -> str:
    """Hex sha256 of `data`."""
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: str | Path, chunk_bytes: int = 1 << 22) -> str:
    """Hex sha256 of a file's bytes, read in chunks."""
    digest = hashlib.sha256()
    with open(path, "rb") as handle:
        while chunk := handle.read(chunk_bytes):
            digest.update(chunk)
    return digest.hexdigest()


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no spaces: equal values give equal text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def sha256_json(value: Any) -> str:
    """Hex sha256 of the canonical JSON of `value`."""
    return sha256_bytes(canonical_json(value).encode())


def library_versions() -> dict[str, str]:
    """Versions of the libraries that decide what a run computes; absent ones are left out."""
    found = {"python": platform.python_version()}
    for name in REPORTED_LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def environment() -> dict[str, Any]:
    """The machine a figure was measured on: processor, cores, memory, threads, accelerators, versions."""
    facts: dict[str, Any] = {
        "platform": platform.platform(),
        "processor": _processor_name(),
        "cores": os.cpu_count(),
        "memory_bytes": _memory_bytes(),
        "versions": library_versions(),
    }
    torch = sys.modules.get("torch")
    if torch is not None:
        facts["torch_threads"] = torch.get_num_threads()
        facts["accelerators"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return facts


def _processor_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory_bytes() -> int:
    import psutil

    return psutil.virtual_memory().total


def command_line() -> str:
    """The command as typed, program name shortened."""
    name = Path(sys.argv[0]).name
    return shlex.join(["medusa-train" if name == "__main__.py" else name, *sys.argv[1:]])


def user_cache() -> Path:
    """Where what can be made again is kept (converted models, hashes): $MEDUSA_TRAIN_CACHE or ~/.cache/medusa-train."""
    explicit = os.environ.get("MEDUSA_TRAIN_CACHE")
    if explicit:
        return Path(explicit)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "medusa-train"


def write_atomic(path: str | Path, content: bytes | str) -> None:
    """Writes a file so that a crash at any moment leaves the old content or the new, never a torn one."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content.encode() if isinstance(content, str) else content
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as handle:
            handle.write(data)
            handle.flush()
            os.fsync(handle.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


def fsync_folder(folder: str | Path) -> None:
    """Makes a rename inside `folder` survive a power cut (no-op where folders cannot be opened)."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
