"""What `show` prints: rows with the supervised tokens coloured, what each head is taught at a position, statistics."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.text import Text

from medusa_train.dataset.packing import packing_report
from medusa_train.dataset.rows import TokenRow

SUPERVISED, CONTEXT, MARKED = "bold green", "dim", "reverse"


def token_text(base: Any, token: int) -> str:
    """A token as it can be printed: its own text, line ends and other invisible characters made visible."""
    text = base.tokenizer.decode([int(token)], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    if not text or "\ufffd" in text:
        text = str(base.tokenizer.convert_ids_to_tokens(int(token)))
    return text


def coloured(base: Any, row: TokenRow, position: int | None = None) -> Text:
    """The row's text, supervised tokens coloured; `position` is marked.

    Neighbouring tokens of one kind are decoded together, so that characters of several tokens appear.
    """
    text = Text()
    edges = [0, *(np.flatnonzero(np.diff(row.loss_mask)) + 1).tolist(), len(row)]
    if position is not None:
        edges = sorted({*edges, position, position + 1})
    for start, end in itertools.pairwise(edges):
        piece = base.tokenizer.decode(
            row.input_ids[start:end].tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        style = SUPERVISED if row.loss_mask[start] else CONTEXT
        text.append(piece, f"{style} {MARKED}" if start == position else style)
    return text


def plain_marks(base: Any, row: TokenRow) -> str:
    """The same where colours cannot be seen: supervised stretches between ⟦ and ⟧."""
    pieces = []
    edges = [0, *(np.flatnonzero(np.diff(row.loss_mask)) + 1).tolist(), len(row)]
    for start, end in itertools.pairwise(edges):
        piece = base.tokenizer.decode(
            row.input_ids[start:end].tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        pieces.append(f"⟦{piece}⟧" if row.loss_mask[start] else piece)
    return "".join(pieces)


@dataclass(frozen=True)
class Target:
    """What one channel is taught at a position: lm_head (head -1) predicts t+1, head j predicts t+j+2."""

    head: int
    position: int
    token: int | None
    supervised: bool


def targets_at(row: TokenRow, position: int, num_heads: int) -> list[Target]:
    """The token under the lm_head and each head for the hidden state at `position`."""
    found = []
    for head in range(-1, num_heads):
        at = position + head + 2
        inside = 0 <= at < len(row)
        found.append(
            Target(head, at, int(row.input_ids[at]) if inside else None, bool(row.loss_mask[at]) if inside else False)
        )
    return found


def default_position(row: TokenRow) -> int:
    """The hidden state before the first supervised token: where the first guess of the answer is made."""
    return max(0, int(np.flatnonzero(row.loss_mask)[0]) - 1) if row.loss_mask.any() else 0


def statistics(rows: Sequence[TokenRow], max_length: int) -> list[tuple[str, str]]:
    """(name, value) lines about lengths, masks and packing."""
    lengths = np.array([len(row) for row in rows])
    supervised = np.array([row.supervised for row in rows])
    share = supervised / lengths
    quantiles = [0, 25, 50, 75, 95, 100]

    def spread(values: np.ndarray, form: str) -> str:
        return " / ".join(format(float(value), form) for value in np.percentile(values, quantiles))

    packing = packing_report(lengths.tolist(), max_length)
    return [
        ("rows", f"{len(rows):,}"),
        ("tokens", f"{int(lengths.sum()):,}"),
        ("supervised tokens", f"{int(supervised.sum()):,} ({supervised.sum() / lengths.sum():.0%})"),
        ("row length, min / 25 / 50 / 75 / 95 % / max", spread(lengths, ".0f")),
        ("supervised tokens per row, the same", spread(supervised, ".0f")),
        ("supervised share per row, the same", spread(share, ".2f")),
        (f"packed into {max_length}", f"{packing['lines']:,} lines, padding {packing['padding_packed']:.1%}"),
        ("one row a line", f"padding {packing['padding_unpacked']:.1%}"),
    ]
