"""Calibration, search and replay: toys by hand, optimality by enumeration."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from medusa_train.decoding.held_out import folds, held_out
from medusa_train.decoding.overhead import Overhead, monotone
from medusa_train.decoding.ranks import END, MISS, Calibration, RankSpan, supervised_spans
from medusa_train.decoding.replay import replay
from medusa_train.decoding.search import (
    SMOOTHING,
    exact_rank_accuracies,
    grow,
    independence,
    independent_tree,
    joint_tree,
    path_counts,
    search,
    smoothed,
)
from medusa_train.decoding.tree import DraftTree
from medusa_train.errors import UserError


def test_independent_toy_of_two_heads() -> None:
    """[.6,.2] and [.5,.1]: (0) .6, (0,0) .3, (1) .2, (1,0) .1, (0,1) .06, in this order."""
    order = [(0,), (0, 0), (1,), (1, 0), (0, 1)]
    for size in range(1, 6):
        assert set(independent_tree(np.array([[0.6, 0.2], [0.5, 0.1]]), size).tree.paths) == set(order[:size])
    found = independent_tree(np.array([[0.6, 0.2], [0.5, 0.1]]), 5)
    assert found.expected_tokens_per_round == pytest.approx(1 + 0.6 + 0.3 + 0.2 + 0.1 + 0.06)


def test_independent_toy_of_three_heads() -> None:
    """Ten nodes, every decision of the frontier.

    Heaviest open path each time: (0) .55; (0,0) .275 before (1) .25; (1) before (0,0,0) .12375; (1,0) .125;
    (0,0,0) .12375; (0,1) .11; (2) .10; (1,0,0) .05625; then (0,2) and (0,0,1), both .055, the shorter first.
    """
    accuracies = np.array([[0.55, 0.25, 0.10, 0.05], [0.50, 0.20, 0.10, 0.05], [0.45, 0.20, 0.10, 0.05]])
    order = [(0,), (0, 0), (1,), (1, 0), (0, 0, 0), (0, 1), (2,), (1, 0, 0), (0, 2), (0, 0, 1)]
    for size in (1, 2, 3, 4, 5, 6, 7, 8, 10):
        assert set(independent_tree(accuracies, size).tree.paths) == set(order[:size]), size
    found = independent_tree(accuracies, 10)
    assert found.expected_tokens_per_round == pytest.approx(2.7)
    weights = dict(zip(found.tree.paths, found.weights, strict=True))
    assert weights[(1, 0, 0)] == pytest.approx(0.25 * 0.5 * 0.45)


def test_exact_rank_accuracies() -> None:
    """a[i] = TopAcc(i+1) - TopAcc(i): 6 of 10 at rank 0, 2 at rank 1; a head with no targets has no accuracy."""
    found = exact_rank_accuracies(np.array([[6, 2], [0, 0]]), np.array([10, 0]))
    assert found.tolist() == [[0.6, 0.2], [0.0, 0.0]]


def spans_of(*ranks: list[list[int]]) -> tuple[RankSpan, ...]:
    return tuple(
        RankSpan(np.array(one, dtype=np.int16), np.ones(len(one), dtype=bool), f"row {index}")
        for index, one in enumerate(ranks)
    )


def test_replay_by_hand() -> None:
    """A span of six tokens, two heads, tree (0), (1), (0,0).

    Root 0: ranks (0, 0): 2 accepted, next root 3. Root 3: (1, 0): (1) is there, (1,0) is not: 1 accepted, next root 5.
    Root 5: nothing follows: 0 accepted. Three rounds, six tokens.
    """
    ranks = [[0, 0], [MISS, 0], [5, 5], [1, 0], [0, END], [END, END]]
    found = replay(spans_of(ranks), DraftTree.from_paths([[0], [1], [0, 0]]), 10)
    assert found.accepted == ((2, 1, 0),)
    assert (found.rounds, found.tokens, found.histogram()) == (3, 6, [1, 1, 1])
    assert found.tokens_per_round == 2.0
    assert replay(spans_of(ranks), DraftTree(), 10).accepted == ((0,) * 6,)


def test_a_miss_is_not_rank_minus_one() -> None:
    """MISS and END index nothing, also where the tree uses the last known rank."""
    ranks = [[MISS, 0], [9, END], [END, END]]
    found = replay(spans_of(ranks), DraftTree.from_paths([[9]]), 10)
    assert found.accepted == ((0, 1),)


def test_supervised_spans() -> None:
    assert supervised_spans([0, 0, 1, 1, 0, 1]) == [(2, 4), (5, 6)]
    assert supervised_spans([1, 1, 0]) == [(1, 2)]  # nothing comes before position 0
    assert supervised_spans([0, 0]) == []


def random_calibration(seed: int, rows: int = 12, length: int = 40, heads: int = 3, top_k: int = 4) -> Calibration:
    """Ranks whose heads depend on each other: a round that began well goes on well."""
    numbers = np.random.default_rng(seed)
    ranks = []
    for _ in range(rows):
        mood = numbers.random((length, 1)) < 0.5
        easy = numbers.choice([0, 1, MISS], (length, heads), p=[0.8, 0.1, 0.1])
        hard = numbers.choice([0, 1, 2, 3, MISS], (length, heads), p=[0.1, 0.2, 0.2, 0.1, 0.4])
        one = np.where(mood, easy, hard)
        for head in range(heads):
            one[length - 1 - head :, head] = END
        ranks.append(one.tolist())
    return Calibration(spans_of(*ranks), top_k)


def every_tree(paths: list[tuple[int, ...]], size: int):
    for chosen in itertools.combinations(paths, size):
        if all(not path[:-1] or path[:-1] in chosen for path in chosen):
            yield DraftTree.from_paths(chosen)


def test_joint_without_smoothing_is_the_optimum() -> None:
    """Counted at fixed positions, no prefix-closed tree of N nodes holds more weight: all of them are tried."""
    calibration = random_calibration(3, rows=4, length=20, heads=2, top_k=3)
    ranks = np.concatenate([span.ranks_SK for span in calibration.spans])
    counts = path_counts(ranks)
    conditional = smoothed(counts, independence(np.zeros((2, 3))), 0.0)
    paths = [(a,) for a in range(3)] + [(a, b) for a in range(3) for b in range(3)]
    for size in (1, 2, 3, 4, 5):
        tree, weights = grow(conditional, size, 2)
        best = max(sum(counts[path] for path in other.paths) for other in every_tree(paths, size))
        assert sum(counts[path] for path in tree.paths) == best
        assert sum(weights) == pytest.approx(best / len(ranks))


def test_path_counts_by_hand() -> None:
    counts = path_counts(np.array([[0, 1], [0, MISS], [0, 1], [MISS, 0], [2, END]]))
    assert counts == {(): 5, (0,): 3, (0, 1): 2, (2,): 1}


def test_smoothing_by_hand() -> None:
    """Two positions, both (0, 1). With s = 2 and independent chances (.5, .5): (2 + 2 * .5) / (2 + 2) = .75."""
    conditional = smoothed(path_counts(np.array([[0, 1], [0, 1]])), independence(np.full((2, 2), 0.5)), 2.0)
    assert conditional(()) == [0.75, 0.25]
    assert conditional((0,)) == [0.25, 0.75]
    assert conditional((1,)) == [0.5, 0.5]  # never seen: independence alone


def test_joint_settles_where_rounds_begin() -> None:
    """The weights of a settled tree are frequencies at its own rounds: without smoothing they add up to the replay."""
    for seed in range(5):
        calibration = random_calibration(seed)
        found = joint_tree(calibration, 8, smoothing=0.0)
        counted = replay(calibration.spans, found.tree, calibration.top_k)
        assert found.expected_tokens_per_round == pytest.approx(counted.tokens_per_round, abs=1e-9)


@pytest.mark.parametrize("size", [8, 16, 32, 64])
def test_joint_is_no_worse_than_independent(size: int) -> None:
    """On rows not used for the search, over random sources whose heads depend on each other."""
    joint = independent = 0.0
    for seed in range(6):
        calibration = moody_calibration(seed)
        joint += held_out(calibration, size, "joint", SMOOTHING).tokens_per_round
        independent += held_out(calibration, size, "independent", SMOOTHING).tokens_per_round
    assert joint >= independent


def moody_calibration(seed: int) -> Calibration:
    """64 rows of 96 tokens, four heads, ranks of a long tail; easy and hard places."""
    numbers, ranks = np.random.default_rng(seed), []
    known = np.array([0, 1, 2, 3, 4, 5, 6, 7, MISS])
    easy, hard = (
        [0.7, 0.1, 0.05, 0.03, 0.02, 0.02, 0.01, 0.01, 0.06],
        [0.2, 0.12, 0.1, 0.08, 0.06, 0.05, 0.04, 0.03, 0.32],
    )
    for _ in range(64):
        mood = numbers.random((96, 1)) < 0.5
        one = np.where(mood, numbers.choice(known, (96, 4), p=easy), numbers.choice(known, (96, 4), p=hard))
        for head in range(4):
            one[95 - head :, head] = END
        ranks.append(one.tolist())
    return Calibration(spans_of(*ranks), 8)


def test_folds_keep_rows_together() -> None:
    spans = [RankSpan(np.zeros((2, 1), np.int16), np.ones(2, bool), f"row {index % 7}") for index in range(20)]
    parts = folds(spans, 5)
    assert sum(map(len, parts)) == 20
    owners = [{span.row_id for span in part} for part in parts]
    assert all(not a & b for a, b in itertools.combinations(owners, 2))
    assert len(folds(spans[:1], 5)) == 1


def test_nothing_splits_into_nothing() -> None:
    first, second = Calibration((), 10).split()
    assert first.spans == second.spans == ()


def test_split_has_no_row_in_common() -> None:
    calibration = random_calibration(1, rows=20)
    first, second = calibration.split()
    assert not {span.row_id for span in first.spans} & {span.row_id for span in second.spans}
    assert len(first.spans) + len(second.spans) == 20


def test_interval_covers_and_is_seeded() -> None:
    found = replay(random_calibration(2, rows=40).spans, DraftTree.product([2, 2]), 4)
    low, high = found.interval()
    assert low < found.tokens_per_round < high
    assert (low, high) == found.interval()


def test_monotone_by_hand() -> None:
    assert monotone([1.0, 3.0, 2.0, 4.0]) == (1.0, 2.5, 2.5, 4.0)
    assert monotone([3.0, 2.0, 1.0]) == (2.0, 2.0, 2.0)


def test_overhead_between_sizes() -> None:
    found = Overhead((4, 8), 0.04, (0.048, 0.06), (1.2, 1.5))
    assert found.at(0) == 1.0
    assert found.at(2) == pytest.approx(1.1)
    assert found.at(6) == pytest.approx(1.35)
    assert found.at(16) == pytest.approx(3.0)  # past the last size: in proportion


def test_search_refusals() -> None:
    calibration = random_calibration(0)
    with pytest.raises(UserError, match="search method"):
        search(calibration, 8, "jiont")
    with pytest.raises(UserError, match="0 nodes"):
        search(calibration, 0)
    # More nodes than there are paths: all of them, no error.
    everything = search(Calibration(calibration.spans, 2), 10_000, "independent").tree
    assert everything.num_nodes == 2 + 4 + 8


def test_replay_is_fast_and_matches_a_walk() -> None:
    """The vectorised replay against a literal walk through a set of paths."""
    calibration = random_calibration(9, rows=5)
    draw = random.Random(0)
    from tests.decoding.helpers import random_tree

    for _ in range(20):
        tree = random_tree(draw, 3, 15, 4)
        paths, expected = set(tree.paths), []
        for span in calibration.spans:
            position, accepted = 0, []
            while position < len(span):
                path: tuple[int, ...] = ()
                for rank in span.ranks_SK[position].tolist():
                    if (*path, rank) not in paths:
                        break
                    path = (*path, rank)
                accepted.append(len(path))
                position += len(path) + 1
            expected.append(tuple(accepted))
        assert list(replay(calibration.spans, tree, 4).accepted) == expected
