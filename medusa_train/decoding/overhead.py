"""c(N): what a round of N nodes costs here, in plain steps. Measured with the decoder itself, so everything counts.

The sizes and the plain arm are interleaved, so that a machine that slows down slows all of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from medusa_train.decoding.decode import TreeDecoder
from medusa_train.decoding.settings import DecodeSettings
from medusa_train.decoding.tree import DraftTree
from medusa_train.modeling.heads import MedusaHeads

TOKENS = 9  # per decode: about as many rounds, less where guesses are accepted


@dataclass(frozen=True)
class Overhead:
    """Round times by tree size.

    Attributes:
        nodes: sizes, ascending; rows of the forward are one more.
        plain_seconds: median plain step.
        round_seconds: median round of each size.
        overhead: c of each size, made non-decreasing (a larger tree is never cheaper; noise can say so).
    """

    nodes: tuple[int, ...]
    plain_seconds: float
    round_seconds: tuple[float, ...]
    overhead: tuple[float, ...]

    def at(self, nodes: int) -> float:
        """c between measured sizes, on straight lines; c(0) = 1."""
        sizes, values = (0, *self.nodes), (1.0, *self.overhead)
        for low, high, below, above in zip(sizes, sizes[1:], values, values[1:], strict=False):
            if nodes <= high:
                return below + (above - below) * (nodes - low) / (high - low)
        return values[-1] * nodes / sizes[-1]


def measure_overhead(
    model: nn.Module,
    heads: MedusaHeads,
    trees: Mapping[int, DraftTree],
    prompt_ids: Sequence[int],
    *,
    repeats: int = 2,
    on_pass: Callable[[], None] | None = None,
) -> Overhead:
    """Times `repeats` short decodes of each tree and of plain decoding after `prompt_ids`.

    Args:
        trees: number of nodes -> tree.
        on_pass: called after each decode (there are (len(trees) + 1) * (repeats + 1)).
    """
    sizes = sorted(trees)
    decoders = [TreeDecoder(model, check=False)]
    decoders += [TreeDecoder(model, heads, trees[size], check=False) for size in sizes]
    seconds: list[list[float]] = [[] for _ in decoders]
    for repeat in range(repeats + 1):
        for decoder, times in zip(decoders, seconds, strict=True):
            settings = DecodeSettings(max_new_tokens=TOKENS if repeat else 2, stop_token_ids=())
            rounds = decoder.decode([prompt_ids], settings)[0].rounds
            if repeat:  # the first pass warms up
                times.extend(done.seconds.total for done in rounds if done.seconds is not None)
            if on_pass is not None:
                on_pass()
    plain, *medians = (statistics.median(times) for times in seconds)
    return Overhead(tuple(sizes), plain, tuple(medians), monotone([max(1.0, m / plain) for m in medians]))


def monotone(values: Sequence[float]) -> tuple[float, ...]:
    """The nearest non-decreasing sequence in least squares (pool adjacent violators)."""
    blocks: list[list[float]] = []
    for value in values:
        blocks.append([value, 1])
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            mean, count = blocks.pop()
            before, number = blocks[-1]
            blocks[-1] = [(before * number + mean * count) / (number + count), number + count]
    return tuple(mean for mean, count in blocks for _ in range(int(count)))
