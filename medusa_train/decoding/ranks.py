"""Ranks of the true next tokens along text: what every tree search and replay is made from.

A span is a run of supervised tokens. With its token o as a round's root, head j guesses token o+1+j from the hidden
state before the root, so ranks_SK[o, j] is the rank that token o+1+j has in head j (MISS: not among the top_k; END:
past the span).

Shape letters: S tokens of a span, K heads, M rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MISS, END = -1, -2


@dataclass(frozen=True)
class RankSpan:
    """One answer's ranks.

    Attributes:
        ranks_SK: int16 [S, K].
        greedy_S: bool [S]; whether the backbone's argmax at its place is this very token.
        row_id: of the row the span is from (of its group, where rows share a prompt).
        source: where the row was read.
    """

    ranks_SK: np.ndarray
    greedy_S: np.ndarray
    row_id: str = ""
    source: str = ""

    def __len__(self) -> int:
        return len(self.ranks_SK)


@dataclass(frozen=True)
class Calibration:
    """Ranks of many spans.

    Attributes:
        spans: the ranks.
        top_k: ranks 0..top_k-1 are known.
    """

    spans: tuple[RankSpan, ...]
    top_k: int

    @property
    def num_heads(self) -> int:
        """K."""
        return self.spans[0].ranks_SK.shape[1]

    @property
    def num_tokens(self) -> int:
        """Tokens of all spans."""
        return sum(map(len, self.spans))

    @property
    def greedy_fraction(self) -> float:
        """Part of the tokens that are the backbone's argmax; 1 on greedy text in exact arithmetic."""
        return sum(int(span.greedy_S.sum()) for span in self.spans) / max(1, self.num_tokens)

    def hits_and_counts(self) -> tuple[np.ndarray, np.ndarray]:
        """(hits [K, top_k], counts [K]): how often the true token had each exact rank, of how many true tokens."""
        ranks_MK = np.concatenate([span.ranks_SK for span in self.spans])
        hits = np.stack([(ranks_MK == rank).sum(0) for rank in range(self.top_k)], axis=1)
        return hits, (ranks_MK != END).sum(0)

    def split(self, fraction: float = 0.5) -> tuple[Calibration, Calibration]:
        """Two parts with no row in common, by the hash of the row's id: (search, report).

        A single row is both parts: there is nothing to hold out, and it judges itself.
        """
        import hashlib

        if not self.spans:
            return self, self
        hashes = {span.row_id: hashlib.sha256(span.row_id.encode()).digest()[:8] for span in self.spans}
        limit = fraction * 2**64
        early = {row for row, digest in hashes.items() if int.from_bytes(digest, "big") < limit}
        if len(early) in (0, len(hashes)):
            # All of the few rows fell on one side: the row with the lowest hash stands against the others.
            early = {min(hashes, key=hashes.__getitem__)}
        first = tuple(span for span in self.spans if span.row_id in early)
        second = tuple(span for span in self.spans if span.row_id not in early)
        return Calibration(first, self.top_k), Calibration(second or first, self.top_k)


def supervised_spans(loss_mask: Sequence[int] | np.ndarray) -> list[tuple[int, int]]:
    """Runs [start, end) of supervised tokens; a token at position 0 has no hidden state before it and is left out."""
    mask = np.asarray(loss_mask, dtype=np.int8).copy()
    mask[:1] = 0
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]])))
    return [(int(start), int(end)) for start, end in edges.reshape(-1, 2)]
