"""Losses that are not finite: where they began, with rows and counts, found without waiting for the device.

On an accelerator whether a loss is finite is known only once the device has computed it, and asking would make it idle.
So the first bad micro-batch is kept on the device and looked at when something is logged, saved or scored; by then the
weights have moved on, and all its rows are named. On a CPU the run stops at once, and the rows at fault can be told
from the others by computing the loss of some of them.

Shape letters: C channels, M supervised positions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from medusa_train.errors import UserError

SHOWN = 8  # rows that a message names
CULPRITS = 4  # that are looked for one by one; more are no matter of single rows

Name = Callable[[int], str]
SumsOf = Callable[[Tensor], Tensor]


class MicroBatch(NamedTuple):
    """What is remembered of a micro-batch.

    Attributes:
        step: of the optimizer, from 1.
        row_M: int [M], the row of each supervised position.
        name: a row's number -> what messages call it.
    """

    step: int
    row_M: Tensor
    name: Name


class FiniteWatch:
    """Remembers the first micro-batch whose loss was NaN or infinite.

    Args:
        channels: their names.
    """

    def __init__(self, channels: Sequence[str]) -> None:
        self.channels = tuple(channels)
        # Micro-batches since the last look; `_number` counts them from the beginning of the run.
        self._recent: deque[MicroBatch] = deque(maxlen=512)
        self._number = 0
        self._first: Tensor | None = None

    @torch.no_grad()
    def add(self, batch: MicroBatch, loss: Tensor, sums_C: Tensor, counts_C: Tensor) -> None:
        """Takes note of a micro-batch; nothing here waits for the device.

        Kept there: [number of the first bad micro-batch, from 1; its step; its sums; its counts], or zeros.
        """
        self._number += 1
        self._recent.append(batch)
        head = [torch.full_like(sums_C[:1], number, dtype=torch.float64) for number in (self._number, batch.step)]
        facts = torch.cat([*head, sums_C, counts_C])
        if self._first is None:
            self._first = torch.zeros_like(facts)
        new = (self._first[0] == 0) & ~torch.isfinite(loss)
        self._first = torch.where(new, facts, self._first)

    def check(self, sums_of: SumsOf | None) -> None:
        """Ends the run where the loss of the newest micro-batch was not finite. Waits for the device.

        Args:
            sums_of: keep_M -> [C], the sums over some positions of that micro-batch alone, where they can be had.

        Raises:
            UserError: with step, rows, sums and counts.
        """
        step, problem = self.problem(sums_of)
        if step:
            raise problem

    def check_ranks(self, ranks: int) -> None:
        """Ends the run of all ranks where one had a loss that was not finite; every rank must call it.

        A rank's bad gradient makes the next losses of all others bad: what the first one met is what all say.

        Raises:
            UserError: with step, rows, sums and counts of the first bad micro-batch.
        """
        found = [self.problem()]
        if ranks > 1:
            from accelerate.utils import gather_object

            found = gather_object(found)
        bad = [one for one in found if one[0]]
        if bad:
            raise min(bad, key=lambda one: one[0])[1]

    def problem(self, sums_of: SumsOf | None = None) -> tuple[int, UserError | None]:
        """The step (from 1) of the first bad micro-batch, and what there is to say; (0, None) forgets what was fine."""
        if self._first is None:
            return 0, None
        number, step, *facts = self._first.tolist()
        if number == 0:
            self._recent.clear()
            return 0, None
        age = self._number - int(number)  # in micro-batches
        batch = self._recent[-1 - age] if age < len(self._recent) else None
        sums, counts = facts[: len(self.channels)], facts[len(self.channels) :]
        pairs = zip(self.channels, sums, counts, strict=True)
        told = ", ".join(f"{name} {total:g} over {count:.0f}" for name, total, count in pairs)
        return int(step), UserError(
            f"the loss is not finite; sums {told}",
            where=f"step {step:.0f}, {'rows unknown' if batch is None else _rows(batch, sums_of)}",
            fix="lower training.learning_rate or set training.max_grad_norm; look at the rows with `medusa-train show`",
        )


def _rows(batch: MicroBatch, sums_of: SumsOf | None) -> str:
    row_M = batch.row_M.cpu()
    rows, note = row_M.unique().tolist(), " (the whole micro-batch)"
    if sums_of is not None:
        found = culprits(rows, lambda some: sums_of(torch.isin(row_M, torch.tensor(some))))
        rows, note = (found, "") if found else (rows, note)
    more = "" if len(rows) <= SHOWN else f" and {len(rows) - SHOWN} more"
    return f"rows {', '.join(batch.name(row) for row in rows[:SHOWN])}{more}{note}"


def culprits(rows: list[int], sums_of: Callable[[list[int]], Any]) -> list[int]:
    """The few rows whose own losses are not finite; [] where there are many, or none alone is to blame.

    Args:
        sums_of: some of the rows -> their sums.
    """

    def bad(some: list[int]) -> bool:
        return bool(some) and not torch.isfinite(sums_of(some)).all()

    found: list[int] = []
    while bad(rest := [row for row in rows if row not in found]):
        if len(found) == CULPRITS:
            return []
        while len(rest) > 1:
            half = len(rest) // 2
            part = next((some for some in (rest[:half], rest[half:]) if bad(some)), None)
            if part is None:
                return []  # finite in parts, and too large together
            rest = part
        found += rest
    return found
