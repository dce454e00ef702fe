"""Records from files, one at a time: JSON, JSONL (also gzipped), Parquet, folders of them, hub dataset ids."""

from __future__ import annotations

import gzip
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from medusa_train.errors import UserError

SUFFIXES = (".jsonl", ".ndjson", ".json", ".jsonl.gz", ".ndjson.gz", ".json.gz", ".parquet")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(:[\w.\[\]%-]+)?")
_CHUNK = 1 << 20

Located = tuple[str, Any]
"""Where a record stands (``file:line``, ``file:row 3``) and the record."""


def sources_of(name: str | Path) -> list[str]:
    """The files a path stands for (a folder: all data files below it, sorted), or the hub id itself.

    Raises:
        UserError: nothing of that name, or a folder without data files.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        found = sorted(str(file) for file in path.rglob("*") if file.is_file() and _suffix(file) in SUFFIXES)
        if not found:
            raise UserError("no data files in the folder", where=str(path), allowed=", ".join(SUFFIXES))
        return found
    if path.is_file():
        if _suffix(path) not in SUFFIXES:
            raise UserError("unknown kind of file", where=str(path), allowed=", ".join(SUFFIXES))
        return [str(path)]
    if _HUB_ID.fullmatch(str(name)):
        return [str(name)]
    raise UserError(
        "no such file or folder", where=str(name), fix="give a file, a folder or a hub dataset id (owner/name[:split])"
    )


def _suffix(path: Path) -> str:
    name = path.name.lower()
    return next((suffix for suffix in sorted(SUFFIXES, key=len, reverse=True) if name.endswith(suffix)), "")


def records(source: str) -> Iterator[Located]:
    """Streams the records of one file or hub id (from `sources_of`)."""
    path = Path(source)
    if not path.is_file():
        return _hub(source)
    suffix = _suffix(path)
    if suffix == ".parquet":
        return _parquet(path)
    return _lines(path) if "jsonl" in suffix or "ndjson" in suffix else _values(path)


def _open(path: Path) -> io.TextIOBase:
    try:
        if path.name.lower().endswith(".gz"):
            return gzip.open(path, "rt", encoding="utf-8-sig")
        return open(path, encoding="utf-8-sig")
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", where=str(path)) from error


def _lines(path: Path) -> Iterator[Located]:
    number = 0
    with _open(path) as handle:
        try:
            for number, line in enumerate(handle, start=1):
                if not line.strip():
                    continue
                where = f"{path}:{number}"
                try:
                    yield where, json.loads(line)
                except json.JSONDecodeError as error:
                    raise UserError(
                        f"not valid JSON: {error.msg} at column {error.colno}",
                        where=where,
                        allowed="one JSON object a line",
                    ) from error
        except (UnicodeDecodeError, OSError, EOFError) as error:
            raise UserError(f"cannot be read: {error}", where=f"{path}:{number + 1}") from error


def _values(path: Path) -> Iterator[Located]:
    """A JSON array, one object, or objects one after another; parsed piece by piece, so that size does not matter."""
    decoder, buffer, line, ended = json.JSONDecoder(), "", 1, False
    with _open(path) as handle:
        try:
            while True:
                stripped = buffer.lstrip(" \t\r\n,[]")
                line += buffer[: len(buffer) - len(stripped)].count("\n")
                buffer = stripped
                if buffer:
                    try:
                        value, end = decoder.raw_decode(buffer)
                    except json.JSONDecodeError as error:
                        if ended:
                            at = line + buffer[: error.pos].count("\n")
                            raise UserError(f"not valid JSON: {error.msg}", where=f"{path}:{at}") from error
                    else:
                        where, line, buffer = f"{path}:{line}", line + buffer[:end].count("\n"), buffer[end:]
                        yield where, value
                        continue
                if ended:
                    return
                piece = handle.read(_CHUNK)
                ended, buffer = not piece, buffer + piece
        except (UnicodeDecodeError, OSError, EOFError) as error:
            raise UserError(f"cannot be read: {error}", where=f"{path}:{line}") from error


def _parquet(path: Path) -> Iterator[Located]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=1024):
            for record in batch.to_pylist():
                yield f"{path}:row {number}", record
                number += 1
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"not a readable Parquet file: {error}", where=str(path)) from error


def _hub(name: str) -> Iterator[Located]:
    import datasets

    identifier, _, split = name.partition(":")
    try:
        stream = datasets.load_dataset(identifier, split=split or "train", streaming=True)
        for number, record in enumerate(stream):
            yield f"{name}:row {number}", record
    except UserError:
        raise
    except Exception as error:  # the hub client raises many kinds; all mean that the data set cannot be had
        raise UserError(
            f"neither a local file nor a hub dataset that can be read: {(str(error) or repr(error)).splitlines()[0]}",
            where=name,
            fix="check the spelling, the network, or give owner/name:split",
        ) from error
