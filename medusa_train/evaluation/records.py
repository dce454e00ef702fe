"""What decoding leaves behind: one record per round, answer and prompt. Plain data, also the journal's lines.

Nothing here knows a model: the report is computed from these records alone, so a resumed run and an uninterrupted one
give the same report.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

STAGES = ("propose", "forward", "accept", "commit")
ENDINGS = ("mismatch", "exhausted", "stop", "limit")


@dataclass(frozen=True)
class RoundRecord:
    """One round: what was proposed, what the model wanted, what was accepted, how long it took.

    Attributes:
        path: accepted rank path; len(path) == num_accepted, the root not counted.
        tokens: published tokens, the root first; len == num_accepted + 1.
        proposals: [K][top_k] token ids in rank order, head by head, as proposed at the start of the round.
        tree_tokens: [N] tokens of the tree's rows in packed order, row 0 the root.
        target_tokens: [N] the verifier's choice after each row; -1 where it was not computed.
        ended: one of ENDINGS.
        seconds: total, then one entry per stage, in seconds; empty where the root alone ended the answer and no forward
            was needed.
    """

    path: tuple[int, ...]
    tokens: tuple[int, ...]
    proposals: tuple[tuple[int, ...], ...]
    tree_tokens: tuple[int, ...]
    target_tokens: tuple[int, ...]
    ended: str
    seconds: tuple[float, ...]

    @property
    def num_accepted(self) -> int:
        return len(self.path)


@dataclass(frozen=True)
class AnswerRecord:
    """One answer of one arm.

    Attributes:
        token_ids: generated ids.
        rounds: every round, for a tree arm; empty for plain arms.
        step_seconds: seconds of every plain step; empty for tree arms.
        prefill_s, decode_s: seconds for the prompt and for everything after it.
        finish: "stop" or "length".
    """

    token_ids: tuple[int, ...]
    rounds: tuple[RoundRecord, ...]
    step_seconds: tuple[float, ...]
    prefill_s: float
    decode_s: float
    finish: str


@dataclass(frozen=True)
class TurnRecord:
    """One turn of one prompt, decoded by every arm.

    Attributes:
        plain: plain decoding's answers by law, "greedy" and "sample"; empty without a baseline.
        generate: transformers' own greedy answer, or None.
        arms: one answer per arm, in the order of the group's arms.
        divergences: `schema.Divergence` fields plus "arm", -1 for `generate`.
    """

    prompt_tokens: int
    plain: dict[str, AnswerRecord]
    generate: AnswerRecord | None
    arms: tuple[AnswerRecord, ...]
    divergences: tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class PromptRecord:
    """One prompt of the suite, all its turns; `skipped` says why turns are missing."""

    prompt_id: str
    category: str
    turns: tuple[TurnRecord, ...]
    skipped: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The record as JSON values (tuples become lists)."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> PromptRecord:
        """The record that `to_json` wrote; KeyError or TypeError where the value is something else."""
        turns = tuple(
            TurnRecord(
                prompt_tokens=turn["prompt_tokens"],
                plain={law: _answer(item) for law, item in turn["plain"].items()},
                generate=None if turn["generate"] is None else _answer(turn["generate"]),
                arms=tuple(_answer(arm) for arm in turn["arms"]),
                divergences=tuple(turn["divergences"]),
            )
            for turn in value["turns"]
        )
        return cls(value["prompt_id"], value["category"], turns, value["skipped"])


def _answer(value: dict[str, Any]) -> AnswerRecord:
    return AnswerRecord(
        token_ids=tuple(value["token_ids"]),
        rounds=tuple(_round(item) for item in value["rounds"]),
        step_seconds=tuple(value["step_seconds"]),
        prefill_s=value["prefill_s"],
        decode_s=value["decode_s"],
        finish=value["finish"],
    )


def _round(value: dict[str, Any]) -> RoundRecord:
    return RoundRecord(
        path=tuple(value["path"]),
        tokens=tuple(value["tokens"]),
        proposals=tuple(tuple(ids) for ids in value["proposals"]),
        tree_tokens=tuple(value["tree_tokens"]),
        target_tokens=tuple(value["target_tokens"]),
        ended=value["ended"],
        seconds=tuple(value["seconds"]),
    )
