"""Records made by hand or by a seeded generator: what a run leaves behind, without a model."""

from __future__ import annotations

import random

from medusa_train.evaluation.groups import ArmInfo, GroupInfo, RunOptions, TreeInfo
from medusa_train.evaluation.records import AnswerRecord, PromptRecord, RoundRecord, TurnRecord
from medusa_train.evaluation.suites import Suite, SuitePrompt

TREE = TreeInfo(
    name="stored tree, 4 nodes",
    paths=((0,), (1,), (0, 0), (0, 1)),
    method="joint",
    probability=(0.5, 0.1, 0.25, 0.05),
    expected_tokens_per_round=1.9,
    calibration=(((50, 10, 5), 100), ((25, 5, 2), 99), ((10, 4, 3), 98)),
)


def arm_info(name: str = "stored tree, 4 nodes, greedy", mode: str = "greedy", tree: TreeInfo = TREE) -> ArmInfo:
    """An arm of a checkpoint called `heads` with two heads."""
    return ArmInfo(name=name, checkpoint="heads", checkpoint_hash="0" * 64, mode=mode, heads=2, tree=tree)


def group_info(*arms: ArmInfo, dtype: str = "bfloat16") -> GroupInfo:
    """A group on a made-up base."""
    return GroupInfo("made-up-base", "f" * 64, "heads", dtype, "cpu", arms or (arm_info(),))


def round_record(
    path: tuple[int, ...], tokens: tuple[int, ...], seconds: float = 0.02, ended: str = "mismatch", proposals=()
) -> RoundRecord:
    """A round that took `seconds`: a tenth to propose, 7 tenths forward, a tenth each to accept and to commit."""
    return RoundRecord(
        path=path,
        tokens=tokens,
        proposals=proposals,
        tree_tokens=(tokens[0], 1, 2, 3, 4),
        target_tokens=(1, 2, 3, -1, -1),
        ended=ended,
        seconds=(seconds, 0.1 * seconds, 0.7 * seconds, 0.1 * seconds, 0.1 * seconds),
    )


def tree_answer(rounds: list[RoundRecord], finish: str = "length") -> AnswerRecord:
    """The answer that publishes these rounds."""
    ids = tuple(token for r in rounds for token in r.tokens)
    return AnswerRecord(ids, tuple(rounds), (), 0.05, sum(r.seconds[0] for r in rounds if r.seconds), finish)


def plain_answer(token_ids: tuple[int, ...], step: float = 0.01) -> AnswerRecord:
    """Plain decoding of these ids, every step `step` seconds."""
    return AnswerRecord(token_ids, (), (step,) * len(token_ids), 0.05, step * len(token_ids), "length")


def suite_of(records: list[PromptRecord]) -> Suite:
    """The suite these records answer."""
    prompts = tuple(SuitePrompt(r.prompt_id, r.category, (), ("?",)) for r in records)
    return Suite("made up", "nowhere", "a" * 64, prompts)


def random_records(prompts: int, info: GroupInfo, seed: int = 0, tokens: int = 90) -> list[PromptRecord]:
    """Plausible records: shares fall with depth and rank, times vary, one answer in nine diverges."""
    rng = random.Random(seed)
    categories = ("writing", "explanation", "code", "maths", "extraction", "rewriting", "role-play", "lists")
    records = []
    for index in range(prompts):
        text = tuple(rng.randrange(1000) for _ in range(tokens))
        arms = tuple(tree_answer(_random_rounds(rng, arm.tree, text)) for arm in info.arms)
        plain = plain_answer(text, 0.030 * rng.uniform(0.9, 1.2))
        divergences = ()
        if index % 9 == 4:
            divergences = tuple(
                _divergence(rng, number) for number, arm in enumerate(info.arms) if arm.mode == "greedy"
            )
        turn = TurnRecord(40 + index, {"greedy": plain, "sample": plain}, plain, arms, divergences)
        records.append(PromptRecord(f"prompt-{index:03d}", categories[index % len(categories)], (turn,)))
    return records


def _random_rounds(rng: random.Random, tree: TreeInfo, text: tuple[int, ...]) -> list[RoundRecord]:
    rounds, at = [], 0
    while at < len(text):
        ranks = tuple(min(int(rng.expovariate(0.9 / (1 + depth))), 99) for depth in range(4))
        path: tuple[int, ...] = ()
        for depth in range(4):
            if ranks[: depth + 1] in tree.paths and at + depth + 1 < len(text):
                path = ranks[: depth + 1]
        proposals = []
        for depth in range(4):
            listed = [2000 + rank for rank in range(10)]
            if at + 1 + depth < len(text) and ranks[depth] < 10:
                listed[ranks[depth]] = text[at + 1 + depth]
            proposals.append(tuple(listed))
        chunk = text[at : at + 1 + len(path)]
        rounds.append(
            round_record(
                path, chunk, 0.039 * rng.uniform(0.9, 1.3), rng.choice(("mismatch", "exhausted")), tuple(proposals)
            )
        )
        at += len(chunk)
    return rounds


def _divergence(rng: random.Random, arm: int) -> dict:
    return {
        "arm": arm,
        "position": rng.randrange(90),
        "plain_token": 5,
        "plain_text": " <b>the",
        "arm_token": 7,
        "arm_text": ' "a',
        "plain_logit": 18.125,
        "arm_logit": 18.0,
        "top_logit": 18.125,
        "bound": 0.5,
        "verdict": "near-tie",
        "reason": "0.125 below the highest logit, bound 0.5",
    }


def options(**changes) -> RunOptions:
    """Options with few resamples."""
    return RunOptions(**{"bootstrap_resamples": 200, **changes})
