"""Decodes a suite's prompts with every arm, interleaved prompt by prompt, and turns the records into a report.

Both arms of a comparison see the same prompt within the same minute of the same process, warmed up, and take turns in
going first, so that a machine that slows down slows both.
"""

from __future__ import annotations

import os
import resource
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from medusa_train.console import progress, say
from medusa_train.errors import UserError
from medusa_train.evaluation.divergence import judge
from medusa_train.evaluation.groups import Decoder, GroupInfo, OpenedGroup, RunOptions
from medusa_train.evaluation.journal import Journal, source_hash
from medusa_train.evaluation.records import AnswerRecord, PromptRecord, TurnRecord
from medusa_train.evaluation.schema import AcceptanceReport
from medusa_train.evaluation.suites import Suite, SuitePrompt
from medusa_train.provenance import environment

WARMUP_TOKENS = 16


def run_acceptance(
    groups: Iterable[OpenedGroup], suite: Suite, options: RunOptions, out: Path, *, command: str = ""
) -> tuple[AcceptanceReport, list[tuple[GroupInfo, list[PromptRecord]]]]:
    """Measures every group on every prompt of `suite` and returns the report with the records behind it.

    Finished prompts are kept in a journal inside `out`; running again with the same settings continues there.

    Args:
        groups: backbones with their arms, opened one after another (a generator keeps one in memory at a time).
        suite: prompts; already cut to the number wanted.
        out: folder for the journal.

    Raises:
        UserError: no prompt of the suite could be decoded, or the journal cannot be read.
    """
    from medusa_train.evaluation.summarise import summarise

    measured: list[tuple[GroupInfo, list[PromptRecord]]] = []
    hashes: list[str] = []
    busy = _load_average()
    for group in groups:
        journal = Journal(out, _settings(group, suite, options))
        hashes.append(journal.hash)
        measured.append((group.info, _measure(group, suite, options, journal)))
    if not any(not record.skipped for _, records in measured for record in records):
        raise UserError("no prompt of the suite fits into the model's context", where=suite.source)
    busy = max(busy, _load_average())
    report = summarise(
        measured,
        suite,
        options,
        settings_hash="-".join(hashes),
        peak_memory=_peak_memory(measured[0][0].device),
        load_average=busy,
        command=command,
    )
    return report, measured


def _settings(group: OpenedGroup, suite: Suite, options: RunOptions) -> dict[str, Any]:
    """What decides the content of a prompt's record, and nothing else (not where the suite's file lies)."""
    kept = asdict(options)
    # More prompts or more resamples do not change what was measured on one prompt.
    for name in ("bootstrap_resamples", "available_prompts"):
        del kept[name]
    info = asdict(group.info)
    # What the search predicted and what an arm is called is looked up anew; it does not change what was decoded.
    info["arms"] = [
        {"checkpoint": arm.checkpoint_hash, "mode": arm.mode, "paths": arm.tree.paths} for arm in group.info.arms
    ]
    del info["checkpoint"]
    return {
        "group": info,
        "machine": _machine(),
        "suite_sha256": suite.sha256,
        "options": kept,
        "plain": sorted(group.plain),
        "generate": group.generate is not None,
    }


def _machine() -> dict[str, Any]:
    """What times depend on beside the settings: records of two machines or thread counts are never mixed."""
    facts = environment()
    versions = {name: facts["versions"].get(name) for name in ("torch", "transformers")}
    return {
        "processor": facts["processor"],
        "threads": facts.get("torch_threads"),
        "medusa-train": source_hash(),
        **versions,
    }


def _measure(group: OpenedGroup, suite: Suite, options: RunOptions, journal: Journal) -> list[PromptRecord]:
    todo = [(index, prompt) for index, prompt in enumerate(suite.prompts) if prompt.id not in journal.records]
    done = len(suite.prompts) - len(todo)
    if done:
        say(f"{done} of {len(suite.prompts)} prompts were measured before with these settings ({journal.path.name})")
    if todo:
        turns = sum(len(prompt.turns) if options.all_turns else 1 for _, prompt in todo)
        # Counted in tokens: an answer takes long enough to look like a hang. What one leaves unused counts as done.
        total = turns * len(_decoders(group)) * options.max_new_tokens
        with progress(f"decoding {suite.name}", total=total, unit="tokens") as bar:
            _warm_up(group, [prompt for _, prompt in todo], options)
            rounds = tokens = 0
            for index, prompt in todo:
                record = measure_prompt(group, prompt, options, index, bar.advance)
                journal.append(record)
                for turn in record.turns:
                    rounds += len(turn.arms[0].rounds)
                    tokens += len(turn.arms[0].token_ids)
                if rounds:
                    bar.describe(f"decoding {suite.name}, {tokens / rounds:.2f} tokens per round")
    # The category is the suite's word, not the journal's: mt-bench and spec-bench name the same prompts differently.
    return [replace(journal.records[prompt.id], category=prompt.category) for prompt in suite.prompts]


def _warm_up(group: OpenedGroup, prompts: Sequence[SuitePrompt], options: RunOptions) -> None:
    """Runs every arm once on the first prompt that fits, uncounted: first calls pay for thread pools and kernels."""
    for prompt in prompts:
        prompt_ids = group.render([*prompt.context, ("user", prompt.turns[0])])
        if _refusal(group, prompt_ids, options) is None:
            for decoder in _decoders(group).values():
                decoder(prompt_ids, min(WARMUP_TOKENS, options.max_new_tokens), options.seed, lambda _: None)
            return


def _decoders(group: OpenedGroup) -> dict[tuple[str, str | int], Decoder]:
    """Every decoder of a group under its key: ("plain", law), ("generate", "greedy"), ("arm", number)."""
    found: dict[tuple[str, str | int], Decoder] = {("plain", law): d for law, d in group.plain.items()}
    if group.generate is not None:
        found["generate", "greedy"] = group.generate
    return found | {("arm", number): decoder for number, decoder in enumerate(group.arms)}


def _refusal(group: OpenedGroup, prompt_ids: Sequence[int], options: RunOptions) -> str | None:
    """Why some arm cannot answer this prompt; None where all can."""
    if group.context_length is not None and len(prompt_ids) >= group.context_length:
        return f"has {len(prompt_ids)} tokens, the model takes {group.context_length}"
    if group.rope_switch is not None:
        depth = max((len(path) for arm in group.info.arms for path in arm.tree.paths), default=0)
        try:
            group.rope_switch.check(len(prompt_ids), options.max_new_tokens, depth)
        except UserError as error:
            return f"cannot be decoded exactly: {error.what}"
    return None


def measure_prompt(
    group: OpenedGroup, prompt: SuitePrompt, options: RunOptions, index: int, advance: Callable[[int], object]
) -> PromptRecord:
    """Decodes one prompt with every arm, calling `advance` with the tokens done, max_new_tokens in all per answer.

    Later turns follow the plain arm's answer (the first arm's without one), the same history for all arms.
    """
    messages = list(prompt.context)
    turns: list[TurnRecord] = []
    skipped = None
    for number, text in enumerate(prompt.turns if options.all_turns else prompt.turns[:1]):
        messages.append(("user", text))
        prompt_ids = group.render(messages)
        if refusal := _refusal(group, prompt_ids, options):
            skipped = f"turn {number + 1} {refusal}"
            break
        # The seed follows the prompt, not its place, so that a record does not depend on how many prompts were taken.
        seed = options.seed + zlib.crc32(f"{prompt.id}/{number}".encode())
        turn = _measure_turn(group, prompt_ids, options, index, seed, advance)
        turns.append(turn)
        leading = turn.plain.get("greedy") or turn.arms[0]
        messages.append(("assistant", group.answer_text(leading.token_ids)))
    return PromptRecord(prompt.id, prompt.category, tuple(turns), skipped)


def _measure_turn(
    group: OpenedGroup,
    prompt_ids: list[int],
    options: RunOptions,
    index: int,
    seed: int,
    advance: Callable[[int], object],
) -> TurnRecord:
    decoders = _decoders(group)
    keys = list(decoders)
    # Whoever goes first meets the colder caches: the arms take turns in that.
    turned = keys[index % len(keys) :] + keys[: index % len(keys)]
    answers = {}
    for key in turned:
        done = 0

        def progressed(tokens: int) -> None:
            nonlocal done
            done += tokens
            advance(tokens)

        answers[key] = decoders[key](prompt_ids, options.max_new_tokens, seed, progressed)
        advance(options.max_new_tokens - done)
    plain = {law: answers["plain", law] for law in group.plain}
    arms = tuple(answers["arm", number] for number in range(len(group.arms)))
    generate = answers.get(("generate", "greedy"))
    return TurnRecord(
        len(prompt_ids), plain, generate, arms, tuple(_divergences(group, prompt_ids, plain, generate, arms))
    )


def _divergences(
    group: OpenedGroup,
    prompt_ids: list[int],
    plain: dict[str, AnswerRecord],
    generate: AnswerRecord | None,
    arms: Sequence[AnswerRecord],
) -> Iterator[dict[str, Any]]:
    """Every answer that promises plain greedy decoding's tokens and has others; arm -1 is `generate`."""
    if "greedy" not in plain:
        return
    compared = [(n, answer) for n, answer in enumerate(arms) if group.info.arms[n].mode == "greedy"]
    if generate is not None:
        compared.append((-1, generate))
    for number, answer in compared:
        found = judge(
            prompt_ids,
            plain["greedy"].token_ids,
            answer.token_ids,
            dtype=group.info.dtype,
            next_logits=group.next_logits,
            detokenize=group.detokenize,
        )
        if found is not None:
            yield {"arm": number, **found}


def _load_average() -> float:
    """Programs that wanted a processor over the last minute; 0 where the system does not say."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


def _peak_memory(device: str) -> tuple[int, str]:
    torch = sys.modules.get("torch")
    if device.startswith("cuda") and torch is not None:
        return torch.cuda.max_memory_allocated(device), "accelerator memory allocated by torch, at its peak"
    # Linux gives kibibytes, macOS bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, "resident memory of the process, at its peak"
