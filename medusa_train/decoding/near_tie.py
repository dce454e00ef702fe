"""When two tokens of a 16-bit model are as good as equal: the one bound that every comparison of answers uses.

In fp32 nothing explains a divergence. In bf16 and fp16 two right programs multiply the same numbers in matrices of
other heights, sums are rounded in another order, and two candidates whose logits nearly tie can change places. A
divergence is a near-tie when BOTH tokens stand within `NEAR_TIE_ULPS` units in the last place of the highest logit:
two tokens that tie with each other far below it are no choice of greedy decoding.

Why 6: three stock ways of computing the same logits (the whole text in one forward, 16 rows at a time, one row at a
time) were compared at 1,026 places of SmolLM2-135M's greedy answers in bf16. The difference between the two best logits
moved by 0 units at the median, 2 at the 99 % quantile and 5 at most. The bound is the first above what was seen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

NEAR_TIE_ULPS = 6
# Stored bits of the significand: one unit in the last place of x is 2**(floor(log2 |x|) - bits).
SIGNIFICAND_BITS = {"bfloat16": 7, "float16": 10}


def ulp(value: float, dtype: str) -> float:
    """One unit in the last place of `value` in a 16-bit format."""
    return 2.0 ** (math.floor(math.log2(max(abs(value), 1e-6))) - SIGNIFICAND_BITS[dtype])


def near_tie_bound(top_logit: float, dtype: str) -> float:
    """How far below the highest logit a token may stand; 0 in formats that excuse nothing."""
    return NEAR_TIE_ULPS * ulp(top_logit, dtype) if dtype in SIGNIFICAND_BITS else 0.0


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """The first index where the two differ, one ending early included; None where they are equal."""
    for index, (one, other) in enumerate(zip(a, b, strict=False)):
        if one != other:
            return index
    return None if len(a) == len(b) else min(len(a), len(b))
