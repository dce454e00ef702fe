"""Token rows: what a model is trained and measured on, from distilled journals or rendered conversations."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from medusa_train.console import say
from medusa_train.dataset.conversations import ReadCounts, read_conversations
from medusa_train.dataset.packing import TokenBatch, collate, collate_bins, pack_rows
from medusa_train.dataset.render import Rendered, RowOptions, render_conversation
from medusa_train.dataset.templates import WAY_OUT, Unmaskable
from medusa_train.errors import UserError, unknown_name

__all__ = [
    "RowCounts", "RowOptions", "RowSet", "TokenBatch", "TokenRow", "collate", "collate_bins", "iter_rows", "load_rows",
    "pack_rows", "row_options", "split_rows",
]  # fmt: skip

# Conversations after which a template that let none be masked is refused.
HOPELESS_AFTER = 20


@dataclass(frozen=True, eq=False)
class TokenRow:
    """One row. ``loss_mask[t]`` is 1 where the token AT position t is supervised, before any shift.

    Attributes:
        input_ids: int32 [T].
        loss_mask: uint8 [T].
        source: where it was read.
        id: unique name of the row.
        group: rows of one prompt share it; they stay on one side of a split.
        category: the kind of task, where the prompts said so.
        prompt_id: the prompt's own id, where it had one.
    """

    input_ids: np.ndarray
    loss_mask: np.ndarray
    source: str
    id: str
    group: str = ""
    category: str | None = None
    prompt_id: str | None = None

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def supervised(self) -> int:
        """Supervised tokens."""
        return int(self.loss_mask.sum())


@dataclass
class RowCounts:
    """What became of the conversations: ``conversations_in == conversations_kept + sum(drops)``."""

    read: ReadCounts = field(default_factory=ReadCounts)
    rows: int = 0
    truncated: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    inexact: int = 0
    unmaskable: Counter = field(default_factory=Counter)

    @property
    def conversations_in(self) -> int:
        return self.read.rows_in

    @property
    def conversations_kept(self) -> int:
        return self.read.kept

    @property
    def drops(self) -> dict[str, int]:
        return dict(self.read.drops)

    def as_dict(self) -> dict[str, Any]:
        """For manifests and logs."""
        return {
            **self.read.as_dict(),
            "rows": self.rows,
            "truncated": self.truncated,
            "tokens": self.tokens,
            "supervised_tokens": self.supervised_tokens,
            "retokenized": self.inexact,
        }

    def summary(self) -> str:
        """One line for the person at the terminal."""
        share = self.supervised_tokens / self.tokens if self.tokens else 0.0
        text = (
            f"{self.conversations_in:,} conversations in = {self.conversations_kept:,} trained"
            f" + {self.read.dropped:,} dropped ({self.read.summary()});"
            f" {self.rows:,} rows, {self.tokens:,} tokens, {share:.0%} supervised"
        )
        if self.truncated:
            text += f"; {self.truncated:,} rows cut at the length limit"
        if self.inexact:
            text += f"; {self.inexact:,} rows re-tokenized by a server's text"
        return text


@dataclass(frozen=True)
class RowSet:
    """Rows with their counts; `manifest_hash` is a hash over every id and mask bit in order."""

    rows: list[TokenRow]
    counts: RowCounts
    manifest_hash: str

    def __len__(self) -> int:
        return len(self.rows)


def row_options(data: Any) -> RowOptions:
    """The options of a recipe's data section (`max_length`, `max_drop_fraction` and the names under `render`).

    Raises:
        UserError: an unknown name under `render`.
    """
    names = {item.name for item in fields(RowOptions)} - {"max_length", "max_drop_fraction"}
    for name in data.render:
        if name not in names:
            raise unknown_name("render option", name, names, where="data.render")
    return RowOptions(max_length=data.max_length, max_drop_fraction=data.max_drop_fraction, **data.render)


def load_rows(paths: str | Path | Sequence[str | Path], base: Any, options: RowOptions | None = None) -> RowSet:
    """Reads rows from distilled folders (exact ids) and from conversations in any shape (rendered).

    Args:
        paths: folders written by `distill`, files, folders of files, or hub dataset ids.
        base: a BaseTokenizer or Base.

    Raises:
        UserError: unreadable data, more drops than allowed, rows of another tokenizer, a template that cannot be
        masked.
    """
    options = options or RowOptions()
    counts, rows = RowCounts(), []
    for row in iter_rows(paths, base, options, counts):
        rows.append(row)
    if counts.unmaskable and not counts.read.kept:
        raise _refusal(base, counts, ", ".join(map(str, [paths] if isinstance(paths, str | Path) else paths)))
    counts.read.check(options.max_drop_fraction)
    say(counts.summary())
    digest = hashlib.sha256()
    for row in rows:
        digest.update(row.input_ids.tobytes())
        digest.update(row.loss_mask.tobytes())
    return RowSet(rows, counts, digest.hexdigest())


def _refusal(base: Any, counts: RowCounts, where: str) -> UserError:
    """The template, by name, with the way out: it let no conversation be masked exactly."""
    reasons = ", ".join(reason for reason, _ in counts.unmaskable.most_common(3))
    return UserError(
        f"the chat template of {base.name} allows no exact mask: {reasons}",
        where=f"{where}, {counts.read.rows_in} conversations",
        fix=WAY_OUT,
    )


def iter_rows(
    paths: str | Path | Sequence[str | Path], base: Any, options: RowOptions, counts: RowCounts
) -> Iterator[TokenRow]:
    """The streaming form of `load_rows`: fills `counts` as it goes and checks nothing at the end."""
    from medusa_train.dataset.journal import is_journal

    for path in [paths] if isinstance(paths, str | Path) else paths:
        yield from (_from_journal if is_journal(path) else _from_conversations)(path, base, options, counts)


def _from_conversations(path: str | Path, base: Any, options: RowOptions, counts: RowCounts) -> Iterator[TokenRow]:
    stream = read_conversations(path)
    # One ledger for all paths: drops of reading and of rendering add up.
    stream.counts = counts.read
    for conversation in stream:
        try:
            rendered = render_conversation(base, conversation, options)
        except Unmaskable as error:
            counts.read.kept -= 1
            counts.read.drop(error.reason, conversation.source)
            counts.unmaskable[error.reason] += 1
            if counts.read.rows_in == HOPELESS_AFTER and not counts.read.kept:
                raise _refusal(base, counts, str(path)) from error
            continue
        key, many = conversation.key, len(rendered) > 1
        kept = False
        for number, row in enumerate(rendered):
            finished = _finish(row, options, counts)
            if finished is None:
                continue
            kept = True
            yield TokenRow(
                *finished,
                source=conversation.source,
                id=f"{key}-{number}" if many else key,
                group=conversation.prompt_key,
                category=conversation.category,
                prompt_id=conversation.id,
            )
        if not kept:
            counts.read.kept -= 1
            counts.read.drop("no supervised token", conversation.source)


def _finish(row: Rendered, options: RowOptions, counts: RowCounts) -> tuple[np.ndarray, np.ndarray] | None:
    """Cuts a row at the length limit and counts it; None where nothing supervised is left."""
    ids, mask = row.input_ids, row.loss_mask
    if len(ids) > options.max_length:
        counts.truncated += 1
        ids, mask = ids[: options.max_length], mask[: options.max_length]
    if not mask.any():
        return None
    counts.rows += 1
    counts.tokens += len(ids)
    counts.supervised_tokens += int(mask.sum())
    return ids, mask


def _from_journal(path: str | Path, base: Any, options: RowOptions, counts: RowCounts) -> Iterator[TokenRow]:
    from medusa_train.dataset.journal import check_journal_base, journal_records, rows_of_record

    check_journal_base(path, base)
    vocabulary = len(base.tokenizer)
    for where, record in journal_records(path):
        counts.read.rows_in += 1
        counts.read.kept += 1
        counts.inexact += not record["ids_exact"]
        rendered = rows_of_record(record)
        if any(len(row.input_ids) and int(row.input_ids.max()) >= vocabulary for row in rendered):
            raise UserError(
                f"a token id is outside the tokenizer of {base.name} ({vocabulary} tokens)",
                where=where,
                fix="give the base that generated these rows",
            )
        kept = False
        for number, row in enumerate(rendered):
            finished = _finish(row, options, counts)
            if finished is None:
                continue
            kept = True
            yield TokenRow(
                *finished,
                source=where,
                id=record["id"] if len(rendered) == 1 else f"{record['id']}-{number}",
                group=record.get("prompt_key") or record["prompt_id"],
                category=record.get("category"),
                prompt_id=record["prompt_id"],
            )
        if not kept:
            counts.read.kept -= 1
            counts.read.drop("no supervised token", where)


def split_rows(rows: Iterable[TokenRow], fraction: float, seed: int = 0) -> tuple[list[TokenRow], list[TokenRow]]:
    """(train, heldout). A row's side is a hash of its group, so all answers to one prompt are on one side, and a side
    does not change when other rows come or go."""
    if not 0.0 <= fraction < 1.0:
        raise UserError(f"held-out fraction {fraction}", allowed="0 <= fraction < 1")
    train, heldout = [], []
    for row in rows:
        digest = hashlib.sha256(f"{seed}:{row.group or row.id}".encode()).digest()
        aside = int.from_bytes(digest[:8], "big") < fraction * 2**64
        (heldout if aside else train).append(row)
    return train, heldout
