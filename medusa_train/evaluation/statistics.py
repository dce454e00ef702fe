"""The report's arithmetic on plain numbers: ratios, intervals, quantiles, ranks. No model, no files."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from medusa_train.evaluation.records import RoundRecord
from medusa_train.evaluation.schema import Estimate, HeadAccuracy, Spread

REPORTED_RANKS = 10


class Bootstrap:
    """Resamples prompts, not rounds: rounds of one prompt resemble each other, and prompts are what a user varies.

    The same resamples serve every figure of a report, so that two arms are compared on the same draws.
    """

    def __init__(self, prompts: int, resamples: int, seed: int) -> None:
        self.prompts, self.resamples, self.seed = prompts, resamples, seed
        rng = np.random.default_rng(seed)
        # counts[s, p]: how often prompt p was drawn in resample s.
        self.counts_SP = rng.multinomial(prompts, np.full(prompts, 1 / max(prompts, 1)), size=resamples)

    def ratio(self, top_P: Sequence[float], bottom_P: Sequence[float]) -> Estimate:
        """sum(top) / sum(bottom) over prompts, the ratio of sums in each resample too."""
        return self.apply(lambda w: _divide(w @ np.asarray(top_P, float), w @ np.asarray(bottom_P, float)))

    def speedup(
        self,
        plain_s: Sequence[float],
        plain_n: Sequence[float],
        arm_s: Sequence[float],
        arm_n: Sequence[float],
    ) -> Estimate:
        """(plain seconds per token) / (arm seconds per token), each a ratio of sums over prompts."""
        a, b, c, d = (np.asarray(x, float) for x in (plain_s, plain_n, arm_s, arm_n))
        return self.apply(lambda w: _divide((w @ a) * (w @ d), (w @ b) * (w @ c)))

    def apply(self, statistic: Callable[[np.ndarray], np.ndarray]) -> Estimate:
        """`statistic` maps weights [S, P] to values [S]; non-finite resamples are left out of the quantiles."""
        value = float(statistic(np.ones((1, self.prompts)))[0])
        if not np.isfinite(value):
            return Estimate(value=None)
        if self.prompts < 2:
            return Estimate(value=value)
        drawn = statistic(self.counts_SP.astype(float))
        drawn = drawn[np.isfinite(drawn)]
        if drawn.size == 0:
            return Estimate(value=value)
        low, high = np.quantile(drawn, [0.025, 0.975])
        return Estimate(value=value, low=float(low), high=float(high))

    def weighted_median(self, values_P: Sequence[Sequence[float]]) -> Callable[[np.ndarray], np.ndarray]:
        """A statistic: the median of all values of the drawn prompts; `values_P` holds each prompt's values."""
        owner = np.repeat(np.arange(len(values_P)), [len(v) for v in values_P])
        flat = np.concatenate([np.asarray(v, float) for v in values_P]) if len(owner) else np.zeros(0)
        order = np.argsort(flat, kind="stable")
        flat, owner = flat[order], owner[order]

        def statistic(weights_SP: np.ndarray) -> np.ndarray:
            if flat.size == 0:
                return np.full(len(weights_SP), np.nan)
            result = np.empty(len(weights_SP))
            for s, weights_P in enumerate(weights_SP):
                # The mean of the lower and the upper median, as np.median does for an even count.
                cumulative = np.cumsum(weights_P[owner])
                total = cumulative[-1]
                low = np.searchsorted(cumulative, total / 2, side="left")
                high = np.searchsorted(cumulative, total / 2, side="right")
                result[s] = (flat[low] + flat[min(high, flat.size - 1)]) / 2 if total else np.nan
            return result

        return statistic


def _divide(top: np.ndarray, bottom: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(bottom != 0, top / bottom, np.nan)


def spread(seconds: Sequence[float]) -> Spread:
    """Mean, median and the 10 % and 90 % quantiles of times in seconds, given in milliseconds; zeros where none."""
    if not len(seconds):
        return Spread(count=0, mean_ms=0.0, median_ms=0.0, p10_ms=0.0, p90_ms=0.0)
    ms = np.asarray(seconds, float) * 1e3
    low, middle, high = np.quantile(ms, [0.1, 0.5, 0.9])
    return Spread(
        count=len(ms),
        mean_ms=float(ms.mean()),
        median_ms=float(middle),
        p10_ms=float(low),
        p90_ms=float(high),
    )


def histogram(values: Sequence[int], length: int) -> list[int]:
    """[a]: how many values equal a, for a in 0..length-1; ValueError for a value outside."""
    counts = [0] * length
    for value in values:
        if not 0 <= value < length:
            raise ValueError(f"{value} accepted tokens in a tree of depth {length - 1}")
        counts[value] += 1
    return counts


def head_accuracy(answers: Sequence[tuple[Sequence[int], Sequence[RoundRecord]]]) -> list[HeadAccuracy]:
    """Exact-rank hits of every head over the rounds of `answers` (token ids, rounds).

    A round that starts with generated token i as its root proposes, with head j, token i + 1 + j; the true one is
    what the text has there. Rounds whose text ends earlier do not count for that head.
    """
    heads = max((len(r.proposals) for _, rounds in answers for r in rounds), default=0)
    hits, counts = np.zeros((heads, REPORTED_RANKS), int), np.zeros(heads, int)
    for token_ids, rounds in answers:
        start = 0
        for record in rounds:
            for head, proposed in enumerate(record.proposals):
                place = start + 1 + head
                if place >= len(token_ids):
                    break
                counts[head] += 1
                ranked = list(proposed[:REPORTED_RANKS])
                if token_ids[place] in ranked:
                    hits[head, ranked.index(token_ids[place])] += 1
            start += len(record.tokens)
    return [rank_accuracy(j, hits[j].tolist(), int(counts[j])) for j in range(heads)]


def rank_accuracy(head: int, hits: Sequence[int], count: int) -> HeadAccuracy:
    """One head's hits by rank (cut or filled up to ten ranks) with their shares of `count`."""
    ranked = [*hits, *[0] * REPORTED_RANKS][:REPORTED_RANKS]
    return HeadAccuracy(
        head=head,
        offset=head + 2,
        count=count,
        hits=ranked,
        accuracy=[hit / count if count else None for hit in ranked],
    )
