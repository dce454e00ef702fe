"""Telling a near-tie from a failure."""

from __future__ import annotations

import pytest

from medusa_train.decoding.near_tie import NEAR_TIE_ULPS, first_difference, ulp
from medusa_train.evaluation.divergence import bound_rule, judge


@pytest.mark.parametrize(
    ("a", "b", "place"),
    [((1, 2, 3), (1, 2, 3), None), ((1, 2, 3), (1, 9, 3), 1), ((1, 2), (1, 2, 3), 2), ((), (), None), ((), (1,), 0)],
)
def test_first_difference(a, b, place):
    assert first_difference(a, b) == place


def test_ulp_of_bfloat16_and_float16():
    # bfloat16 stores 7 bits: between 16 and 32 neighbours are 16/128 apart, between 32 and 64 twice that.
    assert ulp(20.0, "bfloat16") == 0.125
    assert ulp(31.9, "bfloat16") == 0.125
    assert ulp(-32.0, "bfloat16") == 0.25
    assert ulp(1.5, "bfloat16") == 1 / 128
    assert ulp(20.0, "float16") == 1 / 64


def verdict(logits, dtype="bfloat16", plain=(5, 1), other=(5, 2), by_rows=None, **kwargs):
    """`by_rows`: logits of the backbone alone by rows of a forward, where they differ from those of one forward."""
    seen = []

    def next_logits(ids, rows=None):
        if rows is None:
            seen.append(tuple(ids))
        return (by_rows or {}).get(rows, logits)

    found = judge(
        (7, 8), plain, other, dtype=dtype, next_logits=next_logits, detokenize=lambda ids: f"<{ids}>", **kwargs
    )
    return found, seen


def test_equal_answers_have_no_divergence():
    assert verdict([], plain=(1, 2), other=(1, 2)) == (None, [])


def test_a_near_tie_is_within_the_bound_of_the_highest_logit():
    found, seen = verdict([0.0, 20.0, 19.25])  # 6 units of 0.125 apart
    assert seen == [(7, 8, 5)]  # the logits after the prompt and the common text
    assert (found["verdict"], found["position"], found["bound"]) == ("near-tie", 1, NEAR_TIE_ULPS * 0.125)
    assert (found["plain_token"], found["arm_token"], found["plain_logit"], found["arm_logit"]) == (1, 2, 20.0, 19.25)


def test_one_unit_more_is_a_failure():
    assert verdict([0.0, 20.0, 19.125])[0]["verdict"] == "failure"


def test_two_tokens_that_tie_far_below_the_top_are_a_failure():
    """Their own margin is 0, but neither is what greedy decoding should have chosen."""
    assert verdict([30.0, 20.0, 20.0])[0]["verdict"] == "failure"


def test_a_second_opinion_of_the_backbone_alone_explains_what_the_bound_does_not():
    found, _ = verdict([0.0, 20.0, 19.0], by_rows={16: [0.0, 19.25, 19.5]})
    assert found["verdict"] == "near-tie"
    assert "1 below the highest logit, bound 0.75" in found["reason"]
    assert "but 16 rows at a time the backbone alone prefers it (19.5 against 19.25)" in found["reason"]


def test_a_second_opinion_must_prefer_this_very_token():
    assert (
        verdict([0.0, 20.0, 19.0], by_rows={16: [19.75, 19.25, 19.5], 64: [0.0, 20.0, 19.9]})[0]["verdict"] == "failure"
    )
    assert verdict([0.0, 20.0, 19.0], "float32", by_rows={16: [0.0, 19.25, 19.5]})[0]["verdict"] == "failure"


def test_nothing_excuses_a_divergence_in_float32():
    found, _ = verdict([0.0, 20.0, 20.0], dtype="float32")
    assert found["verdict"] == "failure"
    assert "every divergence is a failure" in bound_rule("float32")


def test_stopping_early_is_a_failure():
    found, seen = verdict([], plain=(5, 1), other=(5,))
    assert (found["verdict"], found["arm_token"], seen) == ("failure", None, [])
    assert "stopped earlier" in found["reason"]
