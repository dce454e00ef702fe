"""Which tree: search over rank paths, by frequencies measured along text.

A tree's expected accepted length is the sum over its nodes of w(path), the probability that the true next tokens carry
exactly those ranks. Any w that falls along paths makes the best tree of N nodes the N heaviest paths, found by growing
a frontier of children.

- `independent` (Medusa, arXiv 2401.10774, section 2.3.3): w is the product of the heads' exact-rank accuracies.
- `joint` (ours): w is the measured frequency of the whole path, smoothed towards independence where counts are small,
  and counted only where rounds of the tree itself begin: count, search, replay, until the tree stands still.

Shape letters: M positions, K heads, k ranks.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np

from medusa_train.decoding.ranks import Calibration, RankSpan
from medusa_train.decoding.replay import replay, visited
from medusa_train.decoding.tree import DraftTree, RankPath
from medusa_train.errors import UserError, unknown_name

Method = Literal["joint", "independent"]
Conditional = Callable[[RankPath], Sequence[float]]
SMOOTHING = 16.0
MAX_PASSES = 12


@dataclass(frozen=True)
class FoundTree:
    """A searched tree.

    Attributes:
        tree: the tree.
        weights: w(path) of each node, in the tree's order: the probability that a round reaches it.
        method: how w was measured.
        passes: how often the joint search counted; 1 for independent.
        settled: the last pass changed nothing.
    """

    tree: DraftTree
    weights: tuple[float, ...]
    method: Method
    passes: int = 1
    settled: bool = True

    @property
    def expected_tokens_per_round(self) -> float:
        """1 + the sum of w: what the search itself believes (replay on other rows is the honest number)."""
        return 1.0 + sum(self.weights)


def grow(conditional: Conditional, num_nodes: int, num_heads: int) -> tuple[DraftTree, tuple[float, ...]]:
    """The `num_nodes` heaviest paths, where w(path) multiplies the conditional chances of its ranks.

    Args:
        conditional: path -> chance of each next rank, given that the path holds.

    Returns:
        (tree, w of its paths in the tree's order). Fewer nodes where there are no more paths. Ties go to the
        shorter, then to the lower path.
    """
    weights: dict[RankPath, float] = {}
    frontier: list[tuple[float, int, RankPath]] = []

    def open_children(path: RankPath, weight: float) -> None:
        if len(path) < num_heads:
            for rank, chance in enumerate(conditional(path)):
                heapq.heappush(frontier, (-weight * chance, len(path) + 1, (*path, rank)))

    open_children((), 1.0)
    while frontier and len(weights) < num_nodes:
        negative, _, path = heapq.heappop(frontier)
        weights[path] = -negative
        open_children(path, -negative)
    tree = DraftTree.from_paths(weights)
    return tree, tuple(weights[path] for path in tree.paths)


def exact_rank_accuracies(hits_Kk: np.ndarray, counts_K: np.ndarray) -> np.ndarray:
    """a[j, i] = TopAcc_j(i+1) - TopAcc_j(i): the chance that head j's token of rank i is the true one."""
    return hits_Kk / np.maximum(1, counts_K)[:, None]


def independent_tree(accuracies_Kk: np.ndarray, num_nodes: int) -> FoundTree:
    """The paper's search: heads taken as independent of each other."""
    accuracies = np.asarray(accuracies_Kk, dtype=np.float64).tolist()
    tree, weights = grow(lambda path: accuracies[len(path)], num_nodes, len(accuracies))
    return FoundTree(tree, weights, "independent")


def path_counts(ranks_MK: np.ndarray) -> Counter[RankPath]:
    """How many positions spell each rank path; the empty path counts all positions."""
    counts: Counter[RankPath] = Counter({(): len(ranks_MK)})
    for ranks in ranks_MK.tolist():
        path: RankPath = ()
        for rank in ranks:
            if rank < 0:
                break
            path = (*path, rank)
            counts[path] += 1
    return counts


def joint_conditional(counts: Counter[RankPath], accuracies_Kk: np.ndarray, smoothing: float) -> Conditional:
    """Chance of each next rank: (count(path, rank) + s * a[depth, rank]) / (count(path) + s).

    Args:
        smoothing: s, in positions: how many imagined independent positions stand beside the counted ones.
    """
    accuracies = np.asarray(accuracies_Kk, dtype=np.float64)

    def conditional(path: RankPath) -> list[float]:
        prior, seen = accuracies[len(path)], counts[path]
        total = seen + smoothing
        if total == 0:
            return [0.0] * len(prior)
        return [(counts[(*path, rank)] + smoothing * a) / total for rank, a in enumerate(prior.tolist())]

    return conditional


def joint_tree(
    calibration: Calibration, num_nodes: int, *, smoothing: float = SMOOTHING, max_passes: int = MAX_PASSES
) -> FoundTree:
    """The joint search, repeated on the positions that replaying the found tree visits, until it stands still.

    If it circles, the tree that replayed best is kept.
    """
    spans, top_k, num_heads = calibration.spans, calibration.top_k, calibration.num_heads
    positions: list[np.ndarray] | None = None
    best: tuple[float, FoundTree] | None = None
    seen: set[DraftTree] = set()
    for passes in range(1, max_passes + 1):
        ranks_MK = _at(spans, positions)
        accuracies = _accuracies_at(ranks_MK, top_k)
        tree, weights = grow(joint_conditional(path_counts(ranks_MK), accuracies, smoothing), num_nodes, num_heads)
        score = replay(spans, tree, top_k).tokens_per_round
        settled = best is not None and tree == best[1].tree
        if best is None or score > best[0] or settled:
            best = (score, FoundTree(tree, weights, "joint", passes, settled))
        if tree in seen:
            break
        seen.add(tree)
        positions = visited(spans, tree, top_k)
    found = best[1]
    # What is reported of each node is measured where rounds of this very tree begin.
    ranks_MK = _at(spans, visited(spans, found.tree, top_k))
    conditional = joint_conditional(path_counts(ranks_MK), _accuracies_at(ranks_MK, top_k), smoothing)
    return replace(found, weights=path_weights(found.tree, conditional))


def path_weights(tree: DraftTree, conditional: Conditional) -> tuple[float, ...]:
    """w of each path of `tree`, in its order."""
    weights: dict[RankPath, float] = {(): 1.0}
    for path in tree.paths:
        weights[path] = weights[path[:-1]] * conditional(path[:-1])[path[-1]]
    return tuple(weights[path] for path in tree.paths)


def _at(spans: Sequence[RankSpan], positions: list[np.ndarray] | None) -> np.ndarray:
    if positions is None:
        return np.concatenate([span.ranks_SK for span in spans])
    return np.concatenate([span.ranks_SK[at] for span, at in zip(spans, positions, strict=True)])


def _accuracies_at(ranks_MK: np.ndarray, top_k: int) -> np.ndarray:
    hits = np.stack([(ranks_MK == rank).sum(0) for rank in range(top_k)], axis=1)
    # A position past the end of the text is a miss here: a round there accepts nothing either.
    return hits / max(1, len(ranks_MK))


def search(
    calibration: Calibration, num_nodes: int, method: Method = "joint", *, smoothing: float = SMOOTHING
) -> FoundTree:
    """The best tree of at most `num_nodes` nodes (the root not counted) by `method`.

    Raises:
        UserError: unknown method, or no nodes asked for.
    """
    if method not in get_args(Method):
        raise unknown_name("search method", str(method), get_args(Method))
    if num_nodes < 1:
        raise UserError(f"a tree of {num_nodes} nodes", allowed="1 or more")
    if method == "independent":
        return independent_tree(exact_rank_accuracies(*calibration.hits_and_counts()), num_nodes)
    return joint_tree(calibration, num_nodes, smoothing=smoothing)
