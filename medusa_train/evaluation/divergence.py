"""Where a greedy arm leaves plain greedy decoding's text, and whether rounding can explain it.

The rule and the reason for its bound are in `decoding.near_tie`; the logits are recomputed by one forward over the
whole text. Rounding grows with the text: behind 823 tokens of a Spec-Bench prompt the same two bf16 logits of SmolLM2
were 0.44, 0.31, 0.19, 0.13 and -0.19 apart (a unit is 0.06; in fp32 0.23), by how many rows a forward had. So a place
outside the bound gets second opinions: the backbone alone, with an ordinary cache, other numbers of rows at a time. If
it then prefers the arm's token itself, its own rounding explains the place; else it is a failure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from medusa_train.decoding.near_tie import NEAR_TIE_ULPS, SIGNIFICAND_BITS, first_difference, near_tie_bound

# (token ids of the whole text so far, rows of a forward or None for one forward over it all) -> the next token's logits
NextLogits = Callable[..., Sequence[float]]
OTHER_ROWS = (512, 64, 16)


def bound_rule(dtype: str) -> str:
    """The rule in words, for the report."""
    if dtype not in SIGNIFICAND_BITS:
        return f"{dtype}: every divergence is a failure"
    bits = SIGNIFICAND_BITS[dtype]
    return (
        f"{dtype}: a divergence is a near-tie when both tokens' logits lie within {NEAR_TIE_ULPS} units in the last "
        f"place of the highest logit (one unit is {2.0 ** (4 - bits):g} for logits of 16 to 32), or when the backbone "
        "alone, computing the same text in other numbers of rows, prefers this arm's token; else it is a failure. "
        "Other matrix heights alone were seen to move the difference of the two best logits by 5 units in short texts, "
        "by 10 behind 823 tokens"
    )


def judge(
    prompt_ids: Sequence[int],
    plain: Sequence[int],
    other: Sequence[int],
    *,
    dtype: str,
    next_logits: NextLogits,
    detokenize: Callable[[Sequence[int]], str],
) -> dict[str, Any] | None:
    """The divergence of `other` from `plain` after the same prompt, judged; None where the ids are equal.

    Returns:
        The fields of `schema.Divergence` but prompt_id and turn.
    """
    place = first_difference(plain, other)
    if place is None:
        return None
    found: dict[str, Any] = {
        "position": place,
        "plain_token": plain[place] if place < len(plain) else -1,
        "plain_text": detokenize(plain[place : place + 1]),
        "arm_token": other[place] if place < len(other) else None,
        "arm_text": detokenize(other[place : place + 1]) if place < len(other) else None,
        "plain_logit": None,
        "arm_logit": None,
        "top_logit": None,
        "bound": None,
        "verdict": "failure",
    }
    if place >= len(plain) or place >= len(other):
        return {**found, "reason": "same tokens, but one of the two stopped earlier"}
    logits = next_logits([*prompt_ids, *plain[:place]])
    top = float(max(logits))
    found["plain_logit"], found["arm_logit"] = float(logits[plain[place]]), float(logits[other[place]])
    found["top_logit"] = top
    if dtype not in SIGNIFICAND_BITS:
        return {**found, "reason": f"{dtype} arms must agree token for token"}
    found["bound"] = near_tie_bound(top, dtype)
    gap = top - min(found["plain_logit"], found["arm_logit"])
    near = gap <= found["bound"]
    found["verdict"] = "near-tie" if near else "failure"
    found["reason"] = f"{gap:.4g} below the highest logit, bound {found['bound']:.4g}"
    if not near and (
        opinion := _second_opinion(next_logits, [*prompt_ids, *plain[:place]], plain[place], other[place])
    ):
        found["verdict"] = "near-tie"
        found["reason"] += f"; {opinion}"
    return found


def _second_opinion(next_logits: NextLogits, ids: Sequence[int], plain: int, other: int) -> str | None:
    """A way of computing the same logits in which the backbone alone prefers the arm's token; None where none does."""
    for rows in OTHER_ROWS:
        logits = next_logits(ids, rows)
        if float(logits[other]) == float(max(logits)):
            said = f"{float(logits[other]):.4g} against {float(logits[plain]):.4g}"
            return f"but {rows} rows at a time the backbone alone prefers it ({said})"
    return None
