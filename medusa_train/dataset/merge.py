"""Several shards' journals into one: the union, in an order of its own, under one manifest."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from medusa_train.console import say
from medusa_train.dataset.distill import JobCounts
from medusa_train.dataset.journal import Journal, journal_records
from medusa_train.errors import UserError
from medusa_train.provenance import canonical_json, command_line, write_atomic


def merge_shards(folders: Sequence[str | Path], out: str | Path) -> dict[str, Any]:
    """Merges every shard found in `folders` into ``OUT/rows.jsonl``; returns the merged manifest.

    Raises:
        UserError: shards of different jobs, a shard missing or unfinished, or an `out` that holds other rows.
    """
    manifests = [(path, json.loads(path.read_text())) for folder in folders for path in _manifests(folder)]
    _check(manifests)
    records: dict[str, dict[str, Any]] = {}
    for folder in dict.fromkeys(map(str, folders)):
        for _, record in journal_records(folder):
            records.setdefault(record["id"], record)
    with Journal(out) as journal:
        present = {record["id"] for record in journal.read()}
        if not present <= records.keys():
            raise UserError("the folder holds rows of another job", where=str(out), fix="give an empty --out")
        counts = JobCounts()
        for name in sorted(records):
            if name not in present:
                journal.append(records[name])
            counts.add(records[name])
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
