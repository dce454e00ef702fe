"""One arm's part of the report: acceptance, tree, times, speed, exactness, categories, prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from medusa_train.evaluation.divergence import bound_rule
from medusa_train.evaluation.groups import ArmInfo, TreeInfo
from medusa_train.evaluation.records import ENDINGS, STAGES, AnswerRecord, PromptRecord, RoundRecord, TurnRecord
from medusa_train.evaluation.schema import (
    ArmReport,
    CategoryRow,
    Divergence,
    Exactness,
    PromptRow,
    RoundTimes,
    SpeedReport,
    SurvivalDepth,
    TreeNode,
    TreeReport,
)
from medusa_train.evaluation.statistics import Bootstrap, head_accuracy, histogram, rank_accuracy, spread

PROMISES = {
    "greedy": "exact: it gives the tokens of plain greedy decoding (all of them in fp32; in 16-bit formats but for "
    "near-ties, each listed)",
    "typical": "a heuristic: it keeps tokens that are probable enough under the model; neither the greedy text nor an "
    "exact sample",
    "sample": "exact in law: the text has the distribution of plain sampling with the same settings",
}
# One answer: its prompt, its turn's number, the turn, and this arm's answer.
_Row = tuple[PromptRecord, int, TurnRecord, AnswerRecord]


def arm_report(
    info: ArmInfo,
    number: int,
    dtype: str,
    records: Sequence[PromptRecord],
    bootstrap: Bootstrap,
    law: str,
    plain_index: int | None,
) -> ArmReport:
    """The report of arm `number` of a group over `records` (prompts with at least one answer)."""
    rows: list[_Row] = [(r, t, turn, turn.arms[number]) for r in records for t, turn in enumerate(r.turns)]
    rounds = [round_ for *_, answer in rows for round_ in answer.rounds]
    accepted = sum(round_.num_accepted for round_ in rounds)
    tokens = sum(len(answer.token_ids) for *_, answer in rows)
    if tokens != len(rounds) + accepted:
        raise AssertionError(f"{tokens} tokens published by {len(rounds)} rounds with {accepted} accepted guesses")
    depth = max((len(path) for path in info.tree.paths), default=0)
    exactness = _exactness(info, number, dtype, rows, plain_index is not None)
    return ArmReport(
        name=info.name,
        checkpoint=info.checkpoint,
        mode=info.mode,
        promise=PROMISES[info.mode],
        plain=plain_index,
        heads=info.heads,
        prompts=len(records),
        rounds=len(rounds),
        tokens=tokens,
        num_accepted=accepted,
        tokens_per_round=bootstrap.ratio(*_totals(records, number)),
        accepted_histogram=histogram([round_.num_accepted for round_ in rounds], depth + 1),
        ended={name: sum(round_.ended == name for round_ in rounds) for name in ENDINGS},
        head_accuracy=head_accuracy([(answer.token_ids, answer.rounds) for *_, answer in rows]),
        survival=_survival(info.tree, rounds, depth),
        tree=_tree(info.tree, rounds, depth),
        times=_times(rounds),
        speed=None if plain_index is None else _speed(info, number, records, bootstrap, law),
        exactness=exactness,
        categories=_categories(records, number, bootstrap, law if plain_index is not None else None),
        prompt_rows=[_prompt_row(row, number, law, exactness.checked) for row in rows],
    )


def _totals(records: Sequence[PromptRecord], number: int) -> tuple[list[float], list[float]]:
    """Tokens and rounds of every prompt."""
    tokens = [float(sum(len(turn.arms[number].token_ids) for turn in record.turns)) for record in records]
    rounds = [float(sum(len(turn.arms[number].rounds) for turn in record.turns)) for record in records]
    return tokens, rounds


def _survival(tree: TreeInfo, rounds: Sequence[RoundRecord], depth: int) -> list[SurvivalDepth]:
    result = []
    for level in range(1, depth + 1):
        reaching = sum(round_.num_accepted >= level for round_ in rounds)
        predicted = None
        if tree.probability is not None:
            # At most one node of a level lies on the accepted path, so the nodes' shares add up.
            predicted = sum(p for path, p in zip(tree.paths, tree.probability, strict=True) if len(path) == level)
        result.append(
            SurvivalDepth(depth=level, rounds=reaching, share=reaching / max(len(rounds), 1), predicted=predicted)
        )
    return result


def _tree(tree: TreeInfo, rounds: Sequence[RoundRecord], depth: int) -> TreeReport:
    reached = Counter(round_.path[:length] for round_ in rounds for length in range(1, round_.num_accepted + 1))
    expected = tree.probability or (None,) * len(tree.paths)
    by_path = dict(zip(tree.paths, expected, strict=True))
    return TreeReport(
        name=tree.name,
        method=tree.method,
        nodes=len(tree.paths),
        rows=len(tree.paths) + 1,
        depth=depth,
        expected_tokens_per_round=tree.expected_tokens_per_round,
        calibration=[rank_accuracy(j, hits, count) for j, (hits, count) in enumerate(tree.calibration)],
        node_list=[
            TreeNode(
                path=list(path),
                expected=by_path[path],
                reached=reached[path],
                share=reached[path] / max(len(rounds), 1),
            )
            for path in sorted(tree.paths, key=lambda path: (len(path), path))
        ],
    )


def _times(rounds: Sequence[RoundRecord]) -> RoundTimes:
    timed = [round_ for round_ in rounds if round_.seconds]
    columns = [spread([round_.seconds[i] for round_ in timed]) for i in range(1 + len(STAGES))]
    total, parts = columns[0], columns[1:]
    return RoundTimes(
        total=total,
        propose=parts[0],
        tree_forward=parts[1],
        accept=parts[2],
        commit=parts[3],
        other_mean_ms=max(total.mean_ms - sum(part.mean_ms for part in parts), 0.0),
    )


def _speed(info: ArmInfo, number: int, records: Sequence[PromptRecord], bootstrap: Bootstrap, law: str) -> SpeedReport:
    arm_steps = [
        [r.seconds[0] for turn in record.turns for r in turn.arms[number].rounds if r.seconds] for record in records
    ]
    plain_steps = [[s for turn in record.turns for s in turn.plain[law].step_seconds] for record in records]
    round_median, step_median = bootstrap.weighted_median(arm_steps), bootstrap.weighted_median(plain_steps)
    tokens, rounds = _totals(records, number)
    plain_tokens = [float(sum(len(turn.plain[law].token_ids) for turn in record.turns)) for record in records]

    def seconds(with_prefill: bool, plain: bool) -> list[float]:
        return [
            sum(
                answer.decode_s + (answer.prefill_s if with_prefill else 0.0)
                for answer in (turn.plain[law] if plain else turn.arms[number] for turn in record.turns)
            )
            for record in records
        ]

    overhead = bootstrap.apply(lambda w: round_median(w) / step_median(w))
    predicted = bootstrap.apply(lambda w: (w @ tokens) / (w @ rounds) / (round_median(w) / step_median(w)))
    expected = info.tree.expected_tokens_per_round
    return SpeedReport(
        tokens_per_second=bootstrap.ratio(tokens, seconds(False, False)),
        overhead_c=overhead,
        predicted_speedup=predicted,
        tree_predicted_speedup=expected / overhead.value if expected and overhead.value else None,
        measured_speedup=bootstrap.speedup(seconds(False, True), plain_tokens, seconds(False, False), tokens),
        measured_speedup_with_prefill=bootstrap.speedup(
            seconds(True, True), plain_tokens, seconds(True, False), tokens
        ),
        break_even_tokens_per_round=overhead.value,
    )


def _exactness(info: ArmInfo, number: int, dtype: str, rows: Sequence[_Row], has_plain: bool) -> Exactness:
    checked = info.mode == "greedy" and has_plain
    divergences = [
        Divergence(prompt_id=record.prompt_id, turn=t, **{k: v for k, v in found.items() if k != "arm"})
        for record, t, turn, _ in rows
        for found in turn.divergences
        if checked and found["arm"] == number
    ]
    failures = sum(found.verdict == "failure" for found in divergences)
    return Exactness(
        promise=PROMISES[info.mode],
        checked=checked,
        prompts=len(rows) if checked else 0,
        identical=len(rows) - len(divergences) if checked else 0,
        near_ties=len(divergences) - failures,
        failures=failures,
        bound_rule=bound_rule(dtype) if checked else None,
        divergences=divergences,
        passed=failures == 0 if checked else None,
    )


def _categories(
    records: Sequence[PromptRecord], number: int, bootstrap: Bootstrap, law: str | None
) -> list[CategoryRow]:
    result = []
    for category in dict.fromkeys(record.category for record in records):
        members = [record for record in records if record.category == category]
        part = Bootstrap(len(members), bootstrap.resamples, bootstrap.seed)
        tokens, rounds = _totals(members, number)
        result.append(
            CategoryRow(
                category=category,
                prompts=len(members),
                rounds=int(sum(rounds)),
                tokens=int(sum(tokens)),
                tokens_per_round=part.ratio(tokens, rounds),
                measured_speedup=_speedup(members, number, part, law),
            )
        )
    return result


def _speedup(members: Sequence[PromptRecord], number: int, part: Bootstrap, law: str | None):
    if law is None:
        return part.ratio([0.0] * len(members), [0.0] * len(members))
    plain = [[turn.plain[law] for turn in record.turns] for record in members]
    arm = [[turn.arms[number] for turn in record.turns] for record in members]
    return part.speedup(
        *(
            [float(sum(value(answer) for answer in answers)) for answers in side]
            for side in (plain, arm)
            for value in (lambda a: a.decode_s, lambda a: len(a.token_ids))
        )
    )


def _prompt_row(row: _Row, number: int, law: str, checked: bool) -> PromptRow:
    record, t, turn, answer = row
    plain = turn.plain.get(law)
    rounds, tokens = len(answer.rounds), len(answer.token_ids)
    speedup = None
    if plain is not None and plain.token_ids and tokens and answer.decode_s > 0:
        speedup = (plain.decode_s / len(plain.token_ids)) / (answer.decode_s / tokens)
    return PromptRow(
        prompt_id=record.prompt_id,
        category=record.category,
        turn=t,
        prompt_tokens=turn.prompt_tokens,
        rounds=rounds,
        tokens=tokens,
        num_accepted=sum(round_.num_accepted for round_ in answer.rounds),
        tokens_per_round=tokens / rounds if rounds else None,
        decode_s=answer.decode_s,
        plain_decode_s=None if plain is None else plain.decode_s,
        speedup=speedup,
        identical=plain is not None and plain.token_ids == answer.token_ids if checked else None,
        finish=answer.finish,
    )
