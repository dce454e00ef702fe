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

from medusa_train.decoding.ranks import Calibration
from medusa_train.decoding.replay import replay, visited
from medusa_train.decoding.tree import DraftTree, RankPath
from medusa_train.errors import UserError, unknown_name

Method = Literal["joint", "independent"]
Conditional = Callable[[RankPath], Sequence[float]]
SMOOTHING = 128.0
# Few positions begin a round, so counts taken there lean on counts taken anywhere. On real heads (93 answers, 9,400
# positions, rows not searched) this pair was worse than independence at none of 8, 16, 32 and 64 nodes.
ROUNDS_TO_ANYWHERE = 32.0
MAX_PASSES = 12


@dataclass(frozen=True)
class FoundTree:
    """A searched tree.

    Attributes:
        tree: the tree.
        weights: w(path) of each node, in the tree's order: the probability that a round reaches it.
        method: how w was measured.
        passes: the pass of the joint search that found it; 1 for independent.
        settled: searching again where its own rounds begin gives the same tree.
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
    tree, weights = grow(independence(accuracies_Kk), num_nodes, len(accuracies_Kk))
    return FoundTree(tree, weights, "independent")


def path_counts(ranks_MK: np.ndarray) -> Counter[RankPath]:
    """How many positions spell each rank path; the empty path counts all positions."""
    counts: Counter[RankPath] = Counter({(): len(ranks_MK)})
    for depth in range(1, ranks_MK.shape[1] + 1):
        ranks = ranks_MK[(ranks_MK[:, :depth] >= 0).all(1), :depth]
        for path, count in zip(*np.unique(ranks, axis=0, return_counts=True), strict=True):
            counts[tuple(path.tolist())] = int(count)
    return counts


def smoothed(counts: Counter[RankPath], prior: Conditional, strength: float) -> Conditional:
    """Chance of each next rank: (count(path, rank) + s * prior(rank | path)) / (count(path) + s).

    Args:
        strength: s, in positions: how many imagined positions of the prior stand beside the counted ones.
    """

    def conditional(path: RankPath) -> list[float]:
        chances, total = prior(path), counts[path] + strength
        if total == 0:
            return [0.0] * len(chances)
        return [(counts[(*path, rank)] + strength * chance) / total for rank, chance in enumerate(chances)]

    return conditional


def independence(accuracies_Kk: np.ndarray) -> Conditional:
    """Each head's ranks have their own chances, whatever came before."""
    accuracies = np.asarray(accuracies_Kk, dtype=np.float64).tolist()
    return lambda path: accuracies[len(path)]


def joint_tree(
    calibration: Calibration, num_nodes: int, *, smoothing: float = SMOOTHING, max_passes: int = MAX_PASSES
) -> FoundTree:
    """The joint search, repeated on the positions that replaying the found tree visits, until it stands still.

    Counts where rounds begin are few, so they lean on counts taken anywhere, and those on independence. If the search
    circles, the tree that replayed best is kept.
    """
    spans, top_k, num_heads = calibration.spans, calibration.top_k, calibration.num_heads
    anywhere_MK = np.concatenate([span.ranks_SK for span in spans])
    accuracies = exact_rank_accuracies(*calibration.hits_and_counts())
    anywhere = smoothed(path_counts(anywhere_MK), independence(accuracies), smoothing)

    def at_rounds_of(tree: DraftTree) -> Conditional:
        starts = visited(spans, tree, top_k)
        ranks_MK = np.concatenate([span.ranks_SK[at] for span, at in zip(spans, starts, strict=True)])
        return smoothed(path_counts(ranks_MK), anywhere, ROUNDS_TO_ANYWHERE * smoothing)

    conditional, best, seen = anywhere, None, set()
    for passes in range(1, max_passes + 1):
        tree, _ = grow(conditional, num_nodes, num_heads)
        conditional = at_rounds_of(tree)
        settled = tree in seen
        score = replay(spans, tree, top_k).tokens_per_round
        if best is None or score > best[0]:
            # What is reported of a node is measured where rounds of this very tree begin.
            best = (score, FoundTree(tree, path_weights(tree, conditional), "joint", passes))
        if settled:
            break
        seen.add(tree)
    return replace(best[1], settled=grow(at_rounds_of(best[1].tree), num_nodes, num_heads)[0] == best[1].tree)


def path_weights(tree: DraftTree, conditional: Conditional) -> tuple[float, ...]:
    """w of each path of `tree`, in its order."""
    weights: dict[RankPath, float] = {(): 1.0}
    for path in tree.paths:
        weights[path] = weights[path[:-1]] * conditional(path[:-1])[path[-1]]
    return tuple(weights[path] for path in tree.paths)


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
