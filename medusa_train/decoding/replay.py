"""The exact rounds of any tree along known greedy text, without decoding.

Greedy decoding publishes the text itself, whatever the tree; the tree only decides where rounds begin. So with the true
tokens' ranks known, a round at root o accepts the longest path of the tree that the ranks spell, and the next begins
after it.

Shape letters: S tokens of a span, K heads.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from medusa_train.decoding.ranks import RankSpan
from medusa_train.decoding.tree import DraftTree


@dataclass(frozen=True)
class Replay:
    """Rounds of a tree along spans.

    Attributes:
        accepted: per span, num_accepted of every round.
    """

    accepted: tuple[tuple[int, ...], ...]

    @property
    def rounds(self) -> int:
        """Rounds of all spans."""
        return sum(map(len, self.accepted))

    @property
    def tokens(self) -> int:
        """Published tokens of all spans, roots counted."""
        return self.rounds + sum(map(sum, self.accepted))

    @property
    def tokens_per_round(self) -> float:
        """Tokens over rounds, the root counted."""
        return self.tokens / max(1, self.rounds)

    def histogram(self) -> list[int]:
        """Rounds by num_accepted, from 0."""
        counts = np.bincount([count for span in self.accepted for count in span])
        return counts.tolist()

    def interval(self, level: float = 0.95, samples: int = 2000, seed: int = 0) -> tuple[float, float]:
        """Bootstrap interval of tokens_per_round over spans."""
        rounds = np.array([len(span) for span in self.accepted], dtype=np.float64)
        tokens = rounds + np.array([sum(span) for span in self.accepted], dtype=np.float64)
        draws = np.random.default_rng(seed).integers(0, len(rounds), (samples, len(rounds)))
        ratios = tokens[draws].sum(1) / rounds[draws].sum(1)
        low, high = np.quantile(ratios, [(1 - level) / 2, (1 + level) / 2])
        return float(low), float(high)


class TreeWalker:
    """A tree as a table of next nodes, for walking many positions at once."""

    def __init__(self, tree: DraftTree, top_k: int) -> None:
        row = {path: index for index, path in enumerate(((), *tree.paths))}
        self.depth, self.top_k = tree.depth, top_k
        # Row and column -1 mean "fallen off": the last row leads nowhere, and MISS / END index the last column.
        self.next_node = np.full((len(row) + 1, max(top_k, tree.ranks_used) + 1), -1, dtype=np.int32)
        for path in tree.paths:
            self.next_node[row[path[:-1]], path[-1]] = row[path]

    def lengths(self, ranks_SK: np.ndarray) -> np.ndarray:
        """int [S]: edges that a round beginning at each position accepts."""
        node = np.zeros(len(ranks_SK), dtype=np.int32)
        accepted = np.zeros(len(ranks_SK), dtype=np.int64)
        for head in range(min(self.depth, ranks_SK.shape[1])):
            node = self.next_node[node, np.maximum(ranks_SK[:, head], -1)]
            accepted += node >= 0
        return accepted


def replay(spans: Iterable[RankSpan], tree: DraftTree, top_k: int) -> Replay:
    """The rounds of `tree` along each span."""
    walker = TreeWalker(tree, top_k)
    return Replay(tuple(tuple(_rounds(walker.lengths(span.ranks_SK))[1]) for span in spans))


def visited(spans: Iterable[RankSpan], tree: DraftTree, top_k: int) -> list[np.ndarray]:
    """Per span, the positions at which a round of `tree` begins."""
    walker = TreeWalker(tree, top_k)
    return [np.array(_rounds(walker.lengths(span.ranks_SK))[0], dtype=np.int64) for span in spans]


def _rounds(lengths_S: np.ndarray) -> tuple[list[int], list[int]]:
    starts, accepted, lengths, position = [], [], lengths_S.tolist(), 0
    while position < len(lengths):
        starts.append(position)
        accepted.append(lengths[position])
        position += lengths[position] + 1
    return starts, accepted
