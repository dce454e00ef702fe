"""Several shards' journals into one: the union, in an order of its own, under one manifest.

Rows stay on disk: in memory there are each row's id and where its line begins, some 40 bytes a row.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from medusa_train.console import say
from medusa_train.dataset.distill import JobCounts
from medusa_train.dataset.journal import Journal, journal_files, journal_offsets
from medusa_train.errors import UserError
from medusa_train.provenance import canonical_json, command_line, write_atomic


def merge_shards(folders: Sequence[str | Path], out: str | Path) -> dict[str, Any]:
    """Merges every shard found in `folders` into ``OUT/rows.jsonl``; returns the merged manifest.

    Raises:
        UserError: shards of different jobs, a shard missing or unfinished, or an `out` that holds other rows.
    """
    manifests = [(path, json.loads(path.read_text())) for folder in folders for path in _manifests(folder)]
    _check(manifests)
    index = LineIndex([path for folder in dict.fromkeys(map(str, folders)) for path in journal_files(folder)])
    with Journal(out) as journal:
        present = LineIndex([journal.path]).names
        if not np.isin(present, index.names).all():
            raise UserError("the folder holds rows of another job", where=str(out), fix="give an empty --out")
        counts = JobCounts()
        written = np.isin(index.names, present)
        with contextlib.closing(index.lines()) as lines:
            for line, there in zip(lines, written, strict=True):
                if not there:
                    journal.append_line(line)
                counts.add(json.loads(line))
        for _, manifest in manifests:
            counts.skipped.update(Counter(manifest["counts"].get("skipped", {})))
        merged = {
            **manifests[0][1],
            "shard": [1, 1],
            "merged": [manifest["shard"] for _, manifest in manifests],
            "counts": counts.as_dict(),
            "command": command_line(),
            "complete": True,
        }
        write_atomic(Path(out) / "manifest.json", canonical_json(merged) + "\n")
    say(f"{out}: {counts.rows} rows from {len(manifests)} shards, {counts.generated_tokens:,} supervised tokens")
    return merged


class LineIndex:
    """Where each row of some journals is, sorted by id; of rows with one id the first counts.

    Attributes:
        names: the ids as bytes, sorted, each once.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = list(paths)
        chunks, files, offsets = [np.array([], dtype="S1")], array("i"), array("q")
        for number, path in enumerate(self._paths):
            # In chunks, so that ids are Python strings for a moment only.
            rows = journal_offsets(path)
            while chunk := list(itertools.islice(rows, 65536)):
                chunks.append(np.array([name.encode() for _, name in chunk]))
                offsets.extend(offset for offset, _ in chunk)
                files.extend([number] * len(chunk))
        names = np.concatenate(chunks)
        order = np.argsort(names, kind="stable")
        first = np.ones(len(order), dtype=bool)
        first[1:] = names[order][1:] != names[order][:-1]
        order = order[first]
        self.names = names[order]
        self._files, self._offsets = np.asarray(files)[order], np.asarray(offsets)[order]

    def lines(self) -> Iterator[bytes]:
        """Each row's line as it is on disk, in the order of `names`."""
        with contextlib.ExitStack() as stack:
            handles = [stack.enter_context(open(path, "rb")) for path in self._paths]
            for file, offset in zip(self._files, self._offsets, strict=True):
                handles[file].seek(offset)
                yield handles[file].readline()


def _manifests(folder: str | Path) -> list[Path]:
    found = sorted(Path(folder).expanduser().glob("manifest*.json"))
    if not found:
        raise UserError("no manifest of a distillation", where=str(folder), fix="give the --out folders of the shards")
    return found


def _check(manifests: list[tuple[Path, dict[str, Any]]]) -> None:
    first_path, first = manifests[0]
    for path, manifest in manifests:
        for name in ("job_hash", "prompts"):
            left, right = manifest[name], first[name]
            if name == "prompts":  # paths may differ between machines
                left, right = left["sha256"], right["sha256"]
            if left != right:
                raise UserError(f"another job than that of {first_path} ({name} differs)", where=str(path))
        if not manifest["complete"]:
            raise UserError("this shard is not finished", where=str(path), fix="run its command again")
    count = first["shard"][1]
    have = sorted(manifest["shard"][0] for _, manifest in manifests)
    if any(manifest["shard"][1] != count for _, manifest in manifests) or have != list(range(1, count + 1)):
        raise UserError(
            f"shards {have} of {count} are there",
            where=", ".join(str(path) for path, _ in manifests),
            allowed=f"each of 1..{count} once",
        )
