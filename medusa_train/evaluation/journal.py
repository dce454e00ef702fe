"""The journal of a running evaluation: one line per prompt, so that an interrupted run continues where it was.

The file's name carries the hash of the settings. Other settings use another file; nothing is mixed and nothing is lost.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import medusa_train
from medusa_train.errors import UserError
from medusa_train.evaluation.records import PromptRecord
from medusa_train.provenance import sha256_file, sha256_json

JOURNAL_VERSION = 1


def settings_hash(settings: dict[str, Any]) -> str:
    """Hash of everything that decides what a prompt's record holds (12 hex digits)."""
    return sha256_json({"journal": JOURNAL_VERSION, **settings})[:12]


def source_hash(package: Path | None = None) -> str:
    """Hash of every module of medusa-train (12 hex digits): records of a program that has changed are not reused.

    The version alone would not do: a checkout keeps its version while its decoder is mended.
    """
    package = package or Path(medusa_train.__file__).parent
    files = {path.relative_to(package).as_posix(): sha256_file(path) for path in package.rglob("*.py")}
    return sha256_json(files)[:12]


class Journal:
    """Append-only records of finished prompts in `folder`.

    Args:
        folder: report folder, made where absent.
        settings: JSON values that decide the records; kept as the file's first line.
    """

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.hash = settings_hash(settings)
        self.path = folder / f"journal-{self.hash}.jsonl"
        self._settings = settings
        self.records: dict[str, PromptRecord] = {}
        if self.path.exists():
            self._read()

    def _read(self) -> None:
        lines = self.path.read_bytes().split(b"\n")
        # A last line without its newline was torn by the interruption; the prompt is decoded again.
        whole, torn = lines[:-1], lines[-1]
        for number, line in enumerate(whole[1:], start=2):
            try:
                record = PromptRecord.from_json(json.loads(line))
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(
                    "this journal line cannot be read",
                    where=f"{self.path}:{number}",
                    fix="delete the file to measure again, or the line to measure its prompt again",
                ) from error
            self.records[record.prompt_id] = record
        if torn:
            with open(self.path, "rb+") as handle:
                handle.truncate(sum(len(line) + 1 for line in whole))

    def append(self, record: PromptRecord) -> None:
        """Keeps a finished prompt; on disk when this returns."""
        fresh = not self.path.exists() or self.path.stat().st_size == 0
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "ab") as handle:
            if fresh:
                handle.write(json.dumps({"settings": self._settings}).encode() + b"\n")
            handle.write(json.dumps(record.to_json(), separators=(",", ":")).encode() + b"\n")
            handle.flush()
            os.fsync(handle.fileno())
        self.records[record.prompt_id] = record
