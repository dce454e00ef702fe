"""A report computed from a few records whose every figure is worked out by hand."""

from __future__ import annotations

import dataclasses
import json

import pytest

from medusa_train.evaluation.records import PromptRecord, TurnRecord
from medusa_train.evaluation.schema import SCHEMA_FILE, AcceptanceReport, schema_text
from medusa_train.evaluation.summarise import summarise
from tests.evaluation.made_up import (
    arm_info,
    group_info,
    options,
    plain_answer,
    random_records,
    round_record,
    suite_of,
    tree_answer,
)

DIVERGENCE = {
    "position": 2,
    "plain_token": 3,
    "plain_text": "a",
    "arm_token": 9,
    "arm_text": "b",
    "plain_logit": 20.0,
    "arm_logit": 19.875,
    "top_logit": 20.0,
    "bound": 0.5,
    "verdict": "near-tie",
    "reason": "0.125 below the highest logit, bound 0.5",
}


def hand_records(divergences=()):
    """Two prompts. First: 3 rounds, 6 tokens, 60 ms against 60 ms; second: 2 rounds, 2 tokens, 40 ms against 20 ms."""
    one = tree_answer(
        [
            round_record((0, 1), (1, 2, 3), ended="exhausted"),
            round_record((1,), (4, 5)),
            round_record((), (6,), ended="limit"),
        ]
    )
    two = tree_answer([round_record((), (7,)), round_record((), (8,), ended="stop")], finish="stop")
    return [
        PromptRecord(
            "first",
            "code",
            (TurnRecord(5, {"greedy": plain_answer((1, 2, 3, 4, 5, 6))}, None, (one,), tuple(divergences)),),
        ),
        PromptRecord("second", "lists", (TurnRecord(9, {"greedy": plain_answer((7, 8))}, None, (two,), ()),)),
    ]


def report_of(records, info=None, **changes) -> AcceptanceReport:
    return summarise(
        [(info or group_info(), records)],
        suite_of(records),
        options(**changes),
        settings_hash="abc",
        peak_memory=(1024, "made up"),
        command="made up",
        created="2026-01-01T00:00:00+00:00",
    )


def test_counts_histogram_survival_and_endings():
    arm = report_of(hand_records()).arms[0]
    assert (arm.rounds, arm.tokens, arm.num_accepted) == (5, 8, 3)
    assert arm.tokens_per_round.value == 8 / 5  # roots counted
    assert arm.accepted_histogram == [3, 1, 1]
    assert [(level.depth, level.rounds, level.share) for level in arm.survival] == [(1, 2, 0.4), (2, 1, 0.2)]
    # The tree's nodes of each depth: .5 + .1 and .25 + .05.
    assert [level.predicted for level in arm.survival] == [pytest.approx(0.6), pytest.approx(0.3)]
    assert arm.ended == {"mismatch": 2, "exhausted": 1, "stop": 1, "limit": 1}


def test_tree_nodes_count_every_node_of_the_accepted_path():
    tree = report_of(hand_records()).arms[0].tree
    assert (tree.nodes, tree.rows, tree.depth) == (4, 5, 2)
    reached = {tuple(node.path): node.reached for node in tree.node_list}
    assert reached == {(0,): 1, (1,): 1, (0, 0): 0, (0, 1): 1}
    assert tree.node_list[3].share == 0.2


def test_calibration_of_every_head_the_unused_one_too():
    arm = report_of(hand_records()).arms[0]
    assert [(head.offset, head.count, head.hits[:4]) for head in arm.tree.calibration] == [
        (2, 100, [50, 10, 5, 0]),
        (3, 99, [25, 5, 2, 0]),
        (4, 98, [10, 4, 3, 0]),
    ]
    assert arm.tree.calibration[2].accuracy[0] == 10 / 98


def test_times_and_speed():
    report = report_of(hand_records())
    arm, plain = report.arms[0], report.plain[0]
    assert plain.step.median_ms == pytest.approx(10)
    assert arm.times.total.median_ms == pytest.approx(20)
    assert arm.times.tree_forward.mean_ms == pytest.approx(14)
    assert arm.times.other_mean_ms == pytest.approx(0, abs=1e-9)
    speed = arm.speed
    assert speed.overhead_c.value == pytest.approx(2.0)
    assert speed.break_even_tokens_per_round == pytest.approx(2.0)
    assert speed.predicted_speedup.value == pytest.approx(1.6 / 2.0)
    assert speed.tree_predicted_speedup == pytest.approx(1.9 / 2.0)
    assert speed.measured_speedup.value == pytest.approx((0.08 / 8) / (0.1 / 8))
    # 0.05 s of prefill in every answer of either arm.
    assert speed.measured_speedup_with_prefill.value == pytest.approx(0.18 / 0.2)


def test_rows_per_prompt_and_per_category():
    arm = report_of(hand_records()).arms[0]
    first, second = arm.prompt_rows
    assert (first.rounds, first.tokens, first.num_accepted, first.tokens_per_round) == (3, 6, 3, 2.0)
    assert first.speedup == pytest.approx(1.0)
    assert second.speedup == pytest.approx(0.5)
    assert (first.identical, second.finish) == (True, "stop")
    assert [(row.category, row.tokens_per_round.value) for row in arm.categories] == [("code", 2.0), ("lists", 1.0)]
    assert arm.categories[0].measured_speedup.value == pytest.approx(1.0)


def test_rounds_without_a_forward_count_as_rounds_but_not_as_times():
    records = hand_records()
    turn = records[1].turns[0]
    free = dataclasses.replace(turn.arms[0].rounds[1], seconds=())
    answer = tree_answer([turn.arms[0].rounds[0], free])
    records[1] = dataclasses.replace(records[1], turns=(dataclasses.replace(turn, arms=(answer,)),))
    arm = report_of(records).arms[0]
    assert (arm.rounds, arm.times.total.count) == (5, 4)


def test_divergence_verdicts_decide_whether_the_report_passes():
    tie = report_of(hand_records([{"arm": 0, **DIVERGENCE}]))
    assert (tie.arms[0].exactness.identical, tie.arms[0].exactness.near_ties, tie.passed) == (1, 1, True)
    failed = report_of(hand_records([{"arm": 0, **DIVERGENCE, "verdict": "failure"}]))
    assert (failed.arms[0].exactness.failures, failed.passed) == (1, False)


@pytest.mark.parametrize("mode", ["typical", "sample"])
def test_modes_that_promise_no_identity_are_not_checked_for_it(mode):
    records = hand_records()
    records = [
        dataclasses.replace(
            r, turns=tuple(dataclasses.replace(t, plain={**t.plain, "sample": t.plain["greedy"]}) for t in r.turns)
        )
        for r in records
    ]
    arm = report_of(records, group_info(arm_info(mode=mode))).arms[0]
    assert (arm.exactness.checked, arm.exactness.passed) == (False, None)
    assert arm.prompt_rows[0].identical is None
    assert arm.promise.startswith({"typical": "a heuristic", "sample": "exact in law"}[mode])


def test_without_a_plain_arm_there_is_no_speed_and_no_claim_of_exactness():
    records = [
        dataclasses.replace(r, turns=tuple(dataclasses.replace(t, plain={}) for t in r.turns)) for r in hand_records()
    ]
    report = report_of(records)
    assert report.plain == []
    arm = report.arms[0]
    assert (arm.speed, arm.exactness.checked, arm.plain) == (None, False, None)
    assert arm.categories[0].measured_speedup.value is None


def test_skipped_prompts_are_named():
    records = [*hand_records(), PromptRecord("long", "qa", (), "turn 1 has 9000 tokens, the model takes 8192")]
    report = report_of(records)
    assert report.arms[0].prompts == 2
    assert any("long: turn 1 has 9000 tokens" in note for note in report.notes)


def test_several_arms_share_one_plain_arm():
    info = group_info(arm_info("a"), arm_info("b", mode="sample"))
    report = report_of(random_records(5, info), info)
    assert [(plain.name, plain.checkpoint) for plain in report.plain] == [
        ("plain greedy decoding", "heads"),
        ("plain sampling", "heads"),
    ]
    assert [arm.plain for arm in report.arms] == [0, 1]
    assert report.generate[0].identical == 5


def test_a_report_survives_its_own_json():
    info = group_info()
    report = report_of(random_records(7, info), info)
    assert AcceptanceReport.model_validate_json(report.model_dump_json()) == report


def test_the_shipped_schema_is_the_models_schema():
    assert SCHEMA_FILE.read_text(encoding="utf-8") == schema_text(), "write schema_text() to the file again"
    assert json.loads(schema_text())["properties"]["schema_version"]["const"] == 1


def test_tokens_that_do_not_add_up_are_a_defect():
    records = hand_records()
    turn = records[0].turns[0]
    broken = dataclasses.replace(turn.arms[0], token_ids=(*turn.arms[0].token_ids, 1))
    records[0] = dataclasses.replace(records[0], turns=(dataclasses.replace(turn, arms=(broken,)),))
    with pytest.raises(AssertionError, match="9 tokens published by 5 rounds"):
        report_of(records)
