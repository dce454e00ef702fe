"""Writes what a run leaves in its folder: report.json, report.txt, report.html, and the trace where asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from medusa_train.evaluation.groups import GroupInfo
from medusa_train.evaluation.html import html_report
from medusa_train.evaluation.records import STAGES, PromptRecord
from medusa_train.evaluation.schema import AcceptanceReport
from medusa_train.evaluation.text import text_report
from medusa_train.provenance import write_atomic


def write_report(report: AcceptanceReport, folder: Path) -> dict[str, Path]:
    """Writes the three views of a report, each whole or not at all; returns their paths by kind."""
    views = {
        "json": report.model_dump_json(indent=1) + "\n",
        "txt": text_report(report),
        "html": html_report(report),
    }
    paths = {kind: folder / f"report.{kind}" for kind in views}
    for kind, content in views.items():
        write_atomic(paths[kind], content)
    return paths


def write_trace(path: Path, measured: Sequence[tuple[GroupInfo, Sequence[PromptRecord]]]) -> int:
    """Writes one JSON line per round of every arm; returns the number of lines.

    A line holds: arm, checkpoint, prompt_id, turn, round, position (of the root among the generated tokens), root,
    proposed (the tree's tokens in packed order, the root left out), targets (the verifier's choice after the root and
    after each proposed token; -1 where not computed), accepted (tokens), path (their ranks), num_accepted, ended
    (mismatch, exhausted, stop, limit) and ms (total, propose, forward, accept, commit; null where no forward ran).
    """
    lines = [json.dumps(line, ensure_ascii=False, separators=(",", ":")) for line in _trace_lines(measured)]
    write_atomic(path, "".join(f"{line}\n" for line in lines))
    return len(lines)


def _trace_lines(measured: Sequence[tuple[GroupInfo, Sequence[PromptRecord]]]) -> Iterator[dict[str, Any]]:
    for info, records in measured:
        for record in records:
            for turn_number, turn in enumerate(record.turns):
                for arm, answer in zip(info.arms, turn.arms, strict=True):
                    position = 0
                    for number, round_ in enumerate(answer.rounds):
                        ms = {
                            name: round(1e3 * s, 4)
                            for name, s in zip(("total", *STAGES), round_.seconds, strict=bool(round_.seconds))
                        }
                        yield {
                            "arm": arm.name,
                            "checkpoint": arm.checkpoint,
                            "prompt_id": record.prompt_id,
                            "turn": turn_number,
                            "round": number,
                            "position": position,
                            "root": round_.tokens[0],
                            "proposed": round_.tree_tokens[1:],
                            "targets": round_.target_tokens,
                            "accepted": round_.tokens[1:],
                            "path": round_.path,
                            "num_accepted": round_.num_accepted,
                            "ended": round_.ended,
                            "ms": ms or None,
                        }
                        position += len(round_.tokens)
