"""The distilled rows on disk: an append-only journal that a killed run leaves whole, one writer at a time.

``DIR/rows.jsonl`` (``rows.I-of-N.jsonl`` for shard I of N), one conversation a line, written in one piece when its
last turn is done. A line that a kill cut off is removed when the journal is opened again; everything else is work
that need not be repeated.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from medusa_train.dataset.render import Rendered
from medusa_train.errors import UserError

MANIFEST = "manifest.json"
PATTERN = "rows*.jsonl"
ROW_FIELDS = ("id", "input_ids", "loss_mask", "messages", "finish_reason", "ids_exact")


def shard_suffix(shard: tuple[int, int]) -> str:
    """File name part of shard (i, n), 1-based: nothing for a job of one machine."""
    index, count = shard
    return "" if count == 1 else f".{index}-of-{count}"


def is_journal(path: str | Path) -> bool:
    """Whether a path is a folder that `distill` wrote, or a file of its rows, under whatever name and without its
    manifest too."""
    path = Path(path).expanduser()
    if path.is_dir():
        return any(path.glob(PATTERN)) and any(path.glob("manifest*.json"))
    if not path.is_file() or path.suffix != ".jsonl":
        return False
    with open(path, "rb") as handle:
        try:
            record = json.loads(handle.readline())
        except ValueError:
            return False
    return isinstance(record, dict) and record.keys() >= set(ROW_FIELDS)


class Journal:
    """One writer's journal file, locked for as long as it is open."""

    def __init__(self, folder: str | Path, name: str = "rows.jsonl", required: Sequence[str] = ROW_FIELDS):
        import filelock

        self.folder, self.path, self._required = Path(folder), Path(folder) / name, required
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = filelock.FileLock(self.folder / f".{name}.lock")
            self._lock.acquire(timeout=0)
        except filelock.Timeout as error:
            raise UserError(
                "another run is writing here",
                where=str(self.path),
                fix="wait until it ends, give another --out, or split the job with --shard I/N",
            ) from error
        except OSError as error:
            raise UserError(f"cannot be written: {error.strerror}", where=str(self.folder)) from error
        try:
            self.torn_bytes = _cut_torn_line(self.path)
            self._handle = open(self.path, "ab")  # noqa: SIM115 - open as long as the journal is
        except BaseException:
            self._lock.release()
            raise

    def read(self) -> Iterator[dict[str, Any]]:
        """The records there are, one at a time."""
        for _, record in read_journal(self.path, self._required):
            yield record

    def append(self, record: dict[str, Any]) -> None:
        """Writes one line in one piece and hands it to the operating system: a kill of this process cannot undo it."""
        self.append_line(json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode() + b"\n")

    def append_line(self, line: bytes) -> None:
        """`append` for a record that is a journal's line already, its newline included."""
        try:
            self._handle.write(line)
            self._handle.flush()
        except OSError as error:
            raise UserError(f"cannot be written: {error.strerror}", where=str(self.path)) from error

    def close(self) -> None:
        """Syncs to disk and lets the next writer in."""
        if not self._handle.closed:
            self._handle.flush()
            os.fsync(self._handle.fileno())
            self._handle.close()
        self._lock.release()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _cut_torn_line(path: Path) -> int:
    """Cuts a last line without its newline; returns how many bytes went."""
    if not path.exists():
        return 0
    size = end = path.stat().st_size
    with open(path, "r+b") as handle:
        while end:
            begin = max(0, end - 65536)
            handle.seek(begin)
            at = handle.read(end - begin).rfind(b"\n")
            if at >= 0:
                end = begin + at + 1
                break
            end = begin
        if end != size:
            handle.truncate(end)
    return size - end


def read_journal(path: Path, required: Sequence[str] = ROW_FIELDS) -> Iterator[tuple[str, dict[str, Any]]]:
    """(file:line, record) of one journal; its last line is passed over while it is being written."""
    for number, _, record in _read_at(path, required):
        yield f"{path}:{number}", record


def journal_offsets(path: Path) -> Iterator[tuple[int, str]]:
    """(byte offset, id) of every row of one journal."""
    for _, offset, record in _read_at(path, ROW_FIELDS):
        yield offset, record["id"]


def _read_at(path: Path, required: Sequence[str]) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """(line number, byte offset, record)."""
    offset = 0
    with open(path, "rb") as handle:
        for number, line in enumerate(handle, start=1):
            if not line.endswith(b"\n"):
                return  # a line that is being written, or was when its writer was killed
            try:
                record = json.loads(line)
                for name in required:
                    record[name]
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(
                    "not a distilled row", where=f"{path}:{number}", fix="remove the line; `distill` will make it again"
                ) from error
            yield number, offset, record
            offset += len(line)


def journal_files(path: str | Path) -> list[Path]:
    """The journals of a folder, shards in order; a file is its own only journal."""
    path = Path(path).expanduser()
    return [path] if path.is_file() else sorted(path.glob(PATTERN))


def _manifests(path: str | Path) -> list[Path]:
    """The manifests of a folder, or the one of a journal's file, where they are."""
    path = Path(path).expanduser()
    if not path.is_file():
        return sorted(path.glob("manifest*.json"))
    beside = path.with_name(path.name.replace("rows", "manifest", 1)).with_suffix(".json")
    return [beside] if beside.is_file() and beside != path else []


def journal_records(folder: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(file:line, record) of every row of all shards in a folder, each id once."""
    seen: set[str] = set()
    for path in journal_files(folder):
        for where, record in read_journal(path):
            if record["id"] not in seen:
                seen.add(record["id"])
                yield where, record


def spans_of(mask: Sequence[int] | np.ndarray) -> list[list[int]]:
    """A mask as [start, end) spans."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], np.asarray(mask, dtype=np.int8), [0]])))
    return [[int(start), int(end)] for start, end in zip(edges[::2], edges[1::2], strict=True)]


def rows_of_record(record: dict[str, Any]) -> list[Rendered]:
    """A record's token rows: one, or several where a conversation's turns could not share one."""
    rows = []
    for part in [*record.get("earlier", ()), record]:
        ids = np.asarray(part["input_ids"], dtype=np.int32)
        mask = np.zeros(len(ids), dtype=np.uint8)
        for start, end in part["loss_mask"]:
            mask[start:end] = 1
        rows.append(Rendered(ids, mask))
    return rows


def read_manifest(folder: str | Path, shard: tuple[int, int] = (1, 1)) -> dict[str, Any] | None:
    """A folder's manifest, or None."""
    path = Path(folder).expanduser() / manifest_name(shard)
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"not valid JSON: {error}", where=str(path)) from error


def manifest_name(shard: tuple[int, int]) -> str:
    """File name of a shard's manifest."""
    return f"manifest{shard_suffix(shard)}.json"


def check_journal_base(folder: str | Path, base: Any) -> None:
    """Refuses rows whose chat template is another one: their ids would not be what generation sees."""
    for path in _manifests(folder):
        stored = json.loads(path.read_text(encoding="utf-8")).get("base", {})
        if stored.get("template_hash") not in (None, base.template_hash):
            raise UserError(
                f"these rows were generated by {stored.get('name')} with another chat template than {base.name} has",
                where=str(path),
                fix="use the base and --chat-template that generated them, or distill again",
            )
