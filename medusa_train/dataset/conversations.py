"""Conversations from any chat data, with every record that is left out counted under its reason."""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from medusa_train.console import say
from medusa_train.dataset.files import records, sources_of
from medusa_train.dataset.shapes import KNOWN, Dropped, detect, turns_of
from medusa_train.errors import UserError
from medusa_train.provenance import sha256_json

MAX_DROP_FRACTION = 0.05
_EXAMPLES = 3


@dataclass(frozen=True)
class Message:
    """One turn. `role` is system, user or assistant."""

    role: str
    content: str

    def as_dict(self) -> dict[str, str]:
        """The form that chat templates take."""
        return {"role": self.role, "content": self.content}


@dataclass(frozen=True)
class Conversation:
    """The turns of one conversation; `source` is where it was read (file:line)."""

    messages: tuple[Message, ...]
    source: str
    category: str | None = None
    id: str | None = None

    def as_dicts(self) -> list[dict[str, str]]:
        """The messages as chat templates take them."""
        return [message.as_dict() for message in self.messages]

    @property
    def key(self) -> str:
        """Hash of the turns: the same conversation from another file has the same key."""
        return sha256_json(self.as_dicts())[:24]

    @property
    def prompt_key(self) -> str:
        """Hash of everything before the first answer: all answers to one prompt share it."""
        turns = []
        for message in self.messages:
            if message.role == "assistant":
                break
            turns.append(message.as_dict())
        return sha256_json(turns)[:24]


@dataclass
class ReadCounts:
    """What became of the records: ``rows_in == kept + sum(drops)`` once the stream has ended."""

    rows_in: int = 0
    kept: int = 0
    drops: Counter = field(default_factory=Counter)
    shapes: dict[str, str] = field(default_factory=dict)
    examples: list[str] = field(default_factory=list)

    @property
    def dropped(self) -> int:
        return sum(self.drops.values())

    def drop(self, reason: str, where: str, excerpt: str = "") -> None:
        """Counts one record that is left out, and remembers the first few."""
        self.drops[reason] += 1
        if len(self.examples) < _EXAMPLES:
            self.examples.append(f"{where}: {reason}" + (f": {excerpt[:120]!r}" if excerpt else ""))

    def check(self, max_drop_fraction: float = MAX_DROP_FRACTION) -> None:
        """Raises a UserError that shows three of them where more than the allowed share was dropped."""
        if self.rows_in and self.dropped > max_drop_fraction * self.rows_in:
            raise UserError(
                f"{self.dropped} of {self.rows_in} rows were dropped ({self.summary()})\n  "
                + "\n  ".join(self.examples),
                allowed=f"at most {max_drop_fraction:.0%}",
                fix="mend the rows, or raise max_drop_fraction if they may go",
            )
        if not self.kept:
            raise UserError(
                "no usable row" + ("" if self.rows_in else ": the data is empty"), where=", ".join(self.shapes) or None
            )

    def summary(self) -> str:
        """The drops by reason, most frequent first."""
        return ", ".join(f"{reason} {count}" for reason, count in self.drops.most_common()) or "none dropped"

    def as_dict(self) -> dict[str, Any]:
        """For manifests."""
        return {"rows_in": self.rows_in, "kept": self.kept, "drops": dict(self.drops), "shapes": self.shapes}


class ConversationStream:
    """Conversations one at a time; `counts` is complete when the iteration has ended. May be iterated once."""

    def __init__(self, names: Sequence[str | Path], *, prompts: bool, keep_duplicates: bool, quiet: bool = False):
        self._sources = [source for name in names for source in sources_of(name)]
        self._prompts, self._keep_duplicates, self._quiet = prompts, keep_duplicates, quiet
        # 8-byte digests in a set: a million conversations take about 70 MB.
        self._seen: set[int] = set()
        self.counts = ReadCounts()

    def __iter__(self) -> Iterator[Conversation]:
        for source in self._sources:
            shape = None
            for where, record in records(source):
                if shape is None:
                    shape = self.counts.shapes[source] = detect(record, where)
                    if not self._quiet:
                        say(f"{source}: {KNOWN[shape]}")
                self.counts.rows_in += 1
                conversation = self._convert(record, shape, where)
                if conversation is not None:
                    self.counts.kept += 1
                    yield conversation

    def _convert(self, record: Any, shape: str, where: str) -> Conversation | None:
        turns: list[tuple[str, str]] = []
        try:
            turns = turns_of(record, shape, where)
            turns = _prompt_turns(turns) if self._prompts else _checked_turns(turns)
            conversation = Conversation(
                messages=tuple(Message(role, text) for role, text in turns),
                source=where,
                category=_optional_text(record.get("category")),
                id=_optional_text(next((record[k] for k in ("id", "question_id", "prompt_id") if k in record), None)),
            )
            self._check_new(turns)
            return conversation
        except Dropped as drop:
            self.counts.drop(drop.reason, where, turns[0][1] if turns else "")
            return None

    def _check_new(self, turns: list[tuple[str, str]]) -> None:
        try:
            data = "\0".join(part for turn in turns for part in turn).encode()
        except UnicodeEncodeError as error:  # half of a surrogate pair: no tokenizer takes it
            raise Dropped("broken unicode") from error
        if not self._keep_duplicates:
            digest = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")
            if digest in self._seen:
                raise Dropped("exact duplicate")
            self._seen.add(digest)


def _optional_text(value: Any) -> str | None:
    return None if value is None else str(value)


def _checked_turns(turns: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Turns fit to train on: optional system, then user and assistant in alternation, at least one answer."""
    body = turns[1:] if turns and turns[0][0] == "system" else turns
    if not body:
        raise Dropped("no turns")
    if any(role == "system" for role, _ in body):
        raise Dropped("system turn inside the conversation")
    if body[0][0] == "assistant":
        raise Dropped("assistant speaks first")
    if any(not text.strip() for _, text in body):
        raise Dropped("empty turn")
    if any(left[0] == right[0] for left, right in itertools.pairwise(body)):
        raise Dropped("two turns of one role in a row")
    if not any(role == "assistant" for role, _ in body):
        raise Dropped("no assistant turn")
    return turns


def _prompt_turns(turns: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """System and user turns: the answers are what will be generated."""
    if turns and turns[0][0] == "assistant":
        raise Dropped("assistant speaks first")
    kept = [(role, text) for role, text in turns if role != "assistant"]
    users = [text for role, text in kept if role == "user"]
    if not users:
        raise Dropped("no user turn")
    if any(not text.strip() for text in users):
        raise Dropped("empty turn")
    if any(role == "system" for role, _ in kept[1:]):
        raise Dropped("system turn inside the conversation")
    return kept


def _as_list(names: str | Path | Sequence[str | Path]) -> list[str | Path]:
    return [names] if isinstance(names, str | Path) else list(names)


def read_conversations(
    names: str | Path | Sequence[str | Path], *, keep_duplicates: bool = False, quiet: bool = False
) -> ConversationStream:
    """Streams conversations to train on from files, folders or hub dataset ids.

    Returns:
        An iterable with `.counts` (`ReadCounts`), complete after the iteration.

    Raises:
        UserError: at once for a missing file; while iterating for a wrong shape, with file:line.
    """
    return ConversationStream(_as_list(names), prompts=False, keep_duplicates=keep_duplicates, quiet=quiet)


def read_prompts(
    names: str | Path | Sequence[str | Path], *, keep_duplicates: bool = False, quiet: bool = False
) -> ConversationStream:
    """Streams prompts: the system turn, if any, and the user turns, without answers; the last turn is a user's.

    Several user turns in a row are the turns of one conversation, to be answered one after another.
    """
    return ConversationStream(_as_list(names), prompts=True, keep_duplicates=keep_duplicates, quiet=quiet)
