"""The report's arithmetic against numbers worked out by hand and against slow obvious oracles."""

from __future__ import annotations

import random
import statistics

import numpy as np
import pytest

from medusa_train.evaluation.statistics import Bootstrap, head_accuracy, histogram, spread
from tests.evaluation.made_up import round_record


def test_ratio_is_a_ratio_of_sums_and_not_a_mean_of_ratios():
    estimate = Bootstrap(2, 500, 0).ratio([30.0, 10.0], [10.0, 10.0])
    assert estimate.value == 2.0  # (30 + 10) / (10 + 10)
    # Resamples of two prompts: both the first (3.0), both the second (1.0), or one of each (2.0).
    assert (estimate.low, estimate.high) == (1.0, 3.0)


def test_one_prompt_has_no_interval():
    estimate = Bootstrap(1, 100, 0).ratio([3.0], [2.0])
    assert (estimate.value, estimate.low, estimate.high) == (1.5, None, None)


def test_nothing_measured_gives_no_figure():
    assert Bootstrap(3, 100, 0).ratio([0.0] * 3, [0.0] * 3).value is None


def test_intervals_are_reproducible_and_depend_on_the_seed():
    rng = random.Random(1)
    top, bottom = [rng.random() for _ in range(20)], [1 + rng.random() for _ in range(20)]
    first, again, other = (Bootstrap(20, 300, seed).ratio(top, bottom) for seed in (5, 5, 6))
    assert first == again
    assert first != other
    assert first.low < first.value < first.high


def test_bootstrap_interval_against_a_loop():
    rng = np.random.default_rng(3)
    top, bottom = rng.random(12), 1 + rng.random(12)
    draws = np.random.default_rng(99).integers(0, 12, (4000, 12))
    ratios = [top[d].sum() / bottom[d].sum() for d in draws]
    estimate = Bootstrap(12, 4000, 0).ratio(top.tolist(), bottom.tolist())
    assert estimate.low == pytest.approx(np.quantile(ratios, 0.025), abs=0.01)
    assert estimate.high == pytest.approx(np.quantile(ratios, 0.975), abs=0.01)


def test_speedup_by_hand():
    # plain: 10 s for 100 tokens, 0.1 s each; arm: 4 s for 80 tokens, 0.05 s each.
    assert Bootstrap(1, 100, 0).speedup([10.0], [100.0], [4.0], [80.0]).value == pytest.approx(2.0)


@pytest.mark.parametrize("seed", range(20))
def test_weighted_median_is_the_median_of_the_drawn_values(seed):
    rng = random.Random(seed)
    values = [[rng.random() for _ in range(rng.randrange(1, 6))] for _ in range(5)]
    weights = [rng.randrange(0, 4) for _ in range(5)]
    weights[0] += 1
    drawn = [v for w, vs in zip(weights, values, strict=True) for v in vs * w]
    median = Bootstrap(5, 100, 0).weighted_median(values)(np.array([weights], float))
    assert median[0] == pytest.approx(statistics.median(drawn))


def test_spread_by_hand():
    found = spread([0.001 * n for n in range(1, 12)])  # 1 .. 11 ms
    assert found.count == 11
    assert (found.mean_ms, found.median_ms) == (pytest.approx(6), pytest.approx(6))
    assert (found.p10_ms, found.p90_ms) == (pytest.approx(2), pytest.approx(10))


def test_histogram_counts_and_refuses_what_cannot_be():
    assert histogram([0, 2, 0, 1], 3) == [2, 1, 1]
    with pytest.raises(ValueError, match="3 accepted tokens in a tree of depth 2"):
        histogram([3], 3)


def test_exact_rank_accuracy_by_hand():
    """Text 10 11 12 13 14. Rounds: root 10 and one accepted; root 12, none; root 13, none; root 14, none."""
    rounds = [
        # true t+2 from the root's predecessor: 11 (head 0, rank 1), 12 (head 1, rank 3)
        round_record((0,), (10, 11), proposals=((11, 90, 91), (80, 81, 12))),
        # 13: head 0 has it nowhere; 14: head 1 rank 2
        round_record((), (12,), proposals=((11, 90, 91), (80, 14, 12))),
        # 14: head 0 rank 2; head 1's token lies past the end and does not count
        round_record((), (13,), proposals=((11, 14, 91), (80, 14, 12))),
        # nothing follows 14
        round_record((), (14,), proposals=((11, 14, 91), (80, 14, 12))),
    ]
    first, second = head_accuracy([((10, 11, 12, 13, 14), rounds)])
    assert (first.offset, second.offset) == (2, 3)
    assert (first.count, second.count) == (3, 2)
    assert first.hits == [1, 1, 0, 0, 0, 0, 0, 0, 0, 0]
    assert second.hits == [0, 1, 1, 0, 0, 0, 0, 0, 0, 0]
    assert first.accuracy[:3] == [pytest.approx(1 / 3), pytest.approx(1 / 3), 0.0]
    assert second.accuracy[1] == 0.5


def test_a_rank_is_the_place_in_the_list_and_not_past_ten():
    ids = tuple(range(100, 112))
    rounds = [round_record((), (1,), proposals=(ids,))]
    (head,) = head_accuracy([((1, 111), rounds)])  # 111 stands at place 12
    assert (head.count, sum(head.hits)) == (1, 0)
