"""From records to the report: no model and no clock, so the same records always give the same figures."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Sequence

from medusa_train.evaluation.arm_report import arm_report
from medusa_train.evaluation.groups import GroupInfo, RunOptions
from medusa_train.evaluation.records import AnswerRecord, PromptRecord
from medusa_train.evaluation.schema import (
    AcceptanceReport,
    Divergence,
    GenerateArm,
    PlainArm,
    Setup,
    SuiteReport,
)
from medusa_train.evaluation.statistics import Bootstrap, spread
from medusa_train.evaluation.suites import Suite
from medusa_train.provenance import environment


def summarise(
    measured: Sequence[tuple[GroupInfo, Sequence[PromptRecord]]],
    suite: Suite,
    options: RunOptions,
    *,
    settings_hash: str,
    peak_memory: tuple[int, str],
    load_average: float = 0.0,
    command: str = "",
    created: str | None = None,
) -> AcceptanceReport:
    """The report over all groups; prompts that did not fit into a model's context are named in the notes."""
    plain: list[PlainArm] = []
    generate: list[GenerateArm] = []
    arms, notes = [], _notes(measured, options, load_average)
    for info, all_records in measured:
        records = [record for record in all_records if record.turns]
        bootstrap = Bootstrap(len(records), options.bootstrap_resamples, options.seed)
        index_of_law = {}
        for law in records[0].turns[0].plain if records else ():
            index_of_law[law] = len(plain)
            plain.append(_plain_arm(info, law, records, bootstrap))
        if records and records[0].turns[0].generate is not None:
            generate.append(_generate_arm(info, records, bootstrap))
        for number, arm in enumerate(info.arms):
            law = "sample" if arm.mode == "sample" else "greedy"
            arms.append(arm_report(arm, number, info.dtype, records, bootstrap, law, index_of_law.get(law)))
    first = measured[0][0]
    return AcceptanceReport(
        created=created or datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        command=command,
        suite=SuiteReport(
            name=suite.name,
            source=suite.source,
            sha256=suite.sha256,
            available=options.available_prompts or len(suite.prompts),
            used=len({record.prompt_id for _, records in measured for record in records if record.turns}),
            turns="all" if options.all_turns else "first",
        ),
        setup=Setup(
            base=", ".join(dict.fromkeys(info.base for info, _ in measured)),
            base_fingerprint=", ".join(dict.fromkeys(info.base_fingerprint for info, _ in measured)),
            dtype=first.dtype,
            device=first.device,
            quantization=first.quantization,
            attention=first.attention,
            max_new_tokens=options.max_new_tokens,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            typical_eps=options.typical_eps,
            typical_alpha=options.typical_alpha,
            seed=options.seed,
            bootstrap_resamples=options.bootstrap_resamples,
            settings_hash=settings_hash,
            peak_memory_bytes=peak_memory[0],
            peak_memory_kind=peak_memory[1],
        ),
        plain=plain,
        generate=generate,
        arms=arms,
        environment=environment(),
        notes=notes,
    )


def _notes(
    measured: Sequence[tuple[GroupInfo, Sequence[PromptRecord]]], options: RunOptions, load_average: float
) -> list[str]:
    notes = [
        "tokens_per_round counts the root: a round always publishes at least one token.",
        "Answers end at an end token or after "
        f"{options.max_new_tokens} tokens; the last round of an answer may be cut short by that and counts as it is.",
    ]
    if options.all_turns:
        notes.append("Later turns follow the plain arm's answers, the same history for every arm.")
    cores = os.cpu_count() or 1
    if load_average > cores + 1:
        notes.append(
            f"The machine was busy with other work (load average {load_average:.1f} on {cores} cores): times are "
            "unreliable, and the medians (overhead c, predicted speed) more telling than sums (measured speed)."
        )
    for info, records in measured:
        skipped = [record for record in records if record.skipped]
        if skipped:
            reasons = "; ".join(f"{record.prompt_id}: {record.skipped}" for record in skipped)
            notes.append(
                f"{info.checkpoint}: {len(skipped)} prompts were left out, wholly or from a turn on ({reasons})."
            )
    return notes


def _per_prompt(records: Sequence[PromptRecord], value: Callable[[AnswerRecord], float], law: str) -> list[float]:
    return [sum(value(turn.plain[law]) for turn in record.turns) for record in records]


def _plain_arm(info: GroupInfo, law: str, records: Sequence[PromptRecord], bootstrap: Bootstrap) -> PlainArm:
    answers = [turn.plain[law] for record in records for turn in record.turns]
    steps = [second for answer in answers for second in answer.step_seconds]
    return PlainArm(
        name="plain greedy decoding" if law == "greedy" else "plain sampling",
        checkpoint=info.checkpoint,
        prompts=len(records),
        steps=len(steps),
        tokens=sum(len(answer.token_ids) for answer in answers),
        step=spread(steps),
        prefill=spread([answer.prefill_s for answer in answers]),
        tokens_per_second=bootstrap.ratio(
            _per_prompt(records, lambda a: len(a.token_ids), law), _per_prompt(records, lambda a: a.decode_s, law)
        ),
    )


def _generate_arm(info: GroupInfo, records: Sequence[PromptRecord], bootstrap: Bootstrap) -> GenerateArm:
    def totals(value: Callable[[AnswerRecord], float]) -> list[float]:
        return [sum(value(turn.generate) for turn in record.turns if turn.generate) for record in records]

    def whole(answer: AnswerRecord) -> float:
        return answer.prefill_s + answer.decode_s

    divergences = [
        Divergence(prompt_id=record.prompt_id, turn=number, **{key: v for key, v in found.items() if key != "arm"})
        for record in records
        for number, turn in enumerate(record.turns)
        for found in turn.divergences
        if found["arm"] == -1
    ]
    seconds, tokens = totals(whole), totals(lambda a: len(a.token_ids))
    compared = "greedy" in records[0].turns[0].plain
    none = bootstrap.ratio([0.0] * len(records), [0.0] * len(records))
    return GenerateArm(
        checkpoint=info.checkpoint,
        prompts=len(records),
        tokens=int(sum(tokens)),
        tokens_per_second=bootstrap.ratio(tokens, seconds),
        plain_speed_against_generate=bootstrap.speedup(
            seconds,
            tokens,
            _per_prompt(records, whole, "greedy"),
            _per_prompt(records, lambda a: len(a.token_ids), "greedy"),
        )
        if compared
        else none,
        identical=sum(len(record.turns) for record in records) - len(divergences) if compared else 0,
        divergences=divergences,
    )
