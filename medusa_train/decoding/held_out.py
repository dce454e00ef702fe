"""What a search is worth on rows that it did not see.

Rows are cut into folds by the hash of their id; the tree that is replayed on a fold was searched on the others. Every
row is used for both, never at once. The tree that is stored is searched on all rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from medusa_train.decoding.ranks import Calibration, RankSpan
from medusa_train.decoding.replay import Replay, replay
from medusa_train.decoding.search import Method, search

FOLDS = 5


def folds(spans: Sequence[RankSpan], count: int = FOLDS) -> list[list[RankSpan]]:
    """Spans by fold; all spans of one row are in one fold. Fewer folds where there are fewer rows."""
    ids = sorted({span.row_id for span in spans}, key=lambda row: hashlib.sha256(row.encode()).hexdigest())
    count = max(1, min(count, len(ids)))
    fold_of = {row: index % count for index, row in enumerate(ids)}
    found: list[list[RankSpan]] = [[] for _ in range(count)]
    for span in spans:
        found[fold_of[span.row_id]].append(span)
    return found


@dataclass(frozen=True)
class HeldOut:
    """A method at one size, on rows not used for its search.

    Attributes:
        nodes, method: what was searched.
        replay: the rounds on all rows, each by the tree that did not see it.
    """

    nodes: int
    method: Method
    replay: Replay

    @property
    def tokens_per_round(self) -> float:
        """The estimate."""
        return self.replay.tokens_per_round


def held_out(calibration: Calibration, nodes: int, method: Method, smoothing: float) -> HeldOut:
    """Cross-fitted rounds. With one row only there is nothing to hold out, and the row judges itself."""
    parts = folds(calibration.spans)
    accepted: list[tuple[int, ...]] = []
    for index, part in enumerate(parts):
        others = [span for at, other in enumerate(parts) if at != index for span in other] or part
        found = search(Calibration(tuple(others), calibration.top_k), nodes, method, smoothing=smoothing)
        accepted.extend(replay(part, found.tree, calibration.top_k).accepted)
    return HeldOut(nodes, method, Replay(tuple(accepted)))
