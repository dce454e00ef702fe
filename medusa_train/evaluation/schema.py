"""The acceptance report as data: what `report.json` holds, field by field.

`report.schema.json` beside this module is the JSON schema that these models produce; a test keeps the two equal. The
version goes up when a field changes its meaning or goes away; new optional fields do not raise it. Times are
milliseconds where a name ends in `_ms` and seconds where it ends in `_s`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

SCHEMA_VERSION = 1
SCHEMA_FILE = Path(__file__).with_name("report.schema.json")
Mode = Literal["greedy", "typical", "sample"]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Estimate(_Part):
    """A figure over all prompts with its 95 % bootstrap interval over prompts (null with fewer than two prompts)."""

    value: float | None = Field(description="The figure over all prompts; null where nothing was measured.")
    low: float | None = Field(None, description="2.5 % quantile over resampled prompts.")
    high: float | None = Field(None, description="97.5 % quantile over resampled prompts.")


class Spread(_Part):
    """How a time is distributed over steps or rounds, in milliseconds."""

    count: int = Field(description="Steps or rounds measured.")
    mean_ms: float
    median_ms: float
    p10_ms: float
    p90_ms: float


class HeadAccuracy(_Part):
    """How often the token that really came next stood at exactly rank r of one head's list."""

    head: int = Field(description="Zero-based head number j.")
    offset: int = Field(description="The head predicts token t+offset; offset = j + 2.")
    count: int = Field(description="Rounds whose true token at this offset is known.")
    hits: list[int] = Field(description="hits[r-1]: rounds whose true token had exactly rank r.")
    accuracy: list[float | None] = Field(description="hits / count, rank by rank; null where count is 0.")


class SurvivalDepth(_Part):
    """The share of rounds in which at least `depth` guesses were accepted."""

    depth: int
    rounds: int = Field(description="Rounds with num_accepted >= depth.")
    share: float
    predicted: float | None = Field(None, description="The same share as the tree search predicted it.")


class TreeNode(_Part):
    """One guess of the tree and how often the accepted path went through it."""

    path: list[int] = Field(description="Rank path: rank of head 0, rank of head 1, ... zero-based.")
    expected: float | None = Field(None, description="Share of rounds predicted by the tree search.")
    reached: int = Field(description="Rounds whose accepted path contains this node.")
    share: float = Field(description="reached / rounds.")


class TreeReport(_Part):
    """The verification tree of one arm."""

    name: str = Field(description="Where the tree came from: checkpoint, chain, a product, a file.")
    method: str | None = Field(None, description="Search method stored with the tree.")
    nodes: int = Field(description="Guessed tokens per round; the root is not counted.")
    rows: int = Field(description="Rows of the tree forward: nodes + 1, the root counted.")
    depth: int = Field(description="Length of the longest path.")
    expected_tokens_per_round: float | None = Field(
        None, description="What the search predicted, root counted; null for a tree that was not searched."
    )
    calibration: list[HeadAccuracy] = Field(
        description="Every head's exact-rank hits on the text the tree was searched on; empty for a tree not searched."
    )
    node_list: list[TreeNode] = Field(description="Every node in packed order (length, then path).")


class RoundTimes(_Part):
    """One round's time and its parts; `other` is what no part claims (Python between the parts)."""

    total: Spread
    propose: Spread
    tree_forward: Spread
    accept: Spread
    commit: Spread
    other_mean_ms: float


class SpeedReport(_Part):
    """Speed of one arm against plain decoding of the same prompts in the same run, prefill left out."""

    tokens_per_second: Estimate
    overhead_c: Estimate = Field(description="Median ms per round / median ms per plain step.")
    predicted_speedup: Estimate = Field(description="Measured tokens_per_round / overhead_c.")
    tree_predicted_speedup: float | None = Field(
        None, description="expected_tokens_per_round of the tree search / overhead_c."
    )
    measured_speedup: Estimate = Field(description="Seconds per token of plain decoding / of this arm.")
    measured_speedup_with_prefill: Estimate = Field(description="The same with reading the prompt counted.")
    break_even_tokens_per_round: float | None = Field(
        description="The tokens_per_round at which speed equals plain decoding: overhead_c itself."
    )


class Divergence(_Part):
    """The first place where an arm's text leaves plain greedy decoding's."""

    prompt_id: str
    turn: int
    position: int = Field(description="Index of the token among the generated ones.")
    plain_token: int
    plain_text: str
    arm_token: int | None = Field(description="null where the arm stopped one token early.")
    arm_text: str | None
    plain_logit: float | None
    arm_logit: float | None
    top_logit: float | None = Field(description="The highest logit at this place, one forward over the whole text.")
    bound: float | None = Field(description="Largest distance from the top that still counts as a near-tie.")
    verdict: Literal["near-tie", "failure"]
    reason: str


class Exactness(_Part):
    """Whether a greedy arm produced plain greedy decoding's tokens."""

    promise: str = Field(description="What this acceptance mode promises.")
    checked: bool = Field(description="False where the mode promises no identity or there was no plain arm.")
    prompts: int = Field(description="Answers compared.")
    identical: int = Field(description="Answers whose token ids are identical.")
    near_ties: int
    failures: int
    bound_rule: str | None = Field(description="How a near-tie is told from a failure.")
    divergences: list[Divergence]
    passed: bool | None = Field(description="No failure; null where not checked.")


class CategoryRow(_Part):
    """One category of prompts; Spec-Bench's MT-bench questions are one category there and eight in suite mt-bench."""

    category: str
    prompts: int
    rounds: int
    tokens: int
    tokens_per_round: Estimate
    measured_speedup: Estimate


class PromptRow(_Part):
    """One answer: one turn of one prompt."""

    prompt_id: str
    category: str
    turn: int
    prompt_tokens: int
    rounds: int
    tokens: int
    num_accepted: int = Field(description="Accepted guesses over all rounds; roots are not counted.")
    tokens_per_round: float | None
    decode_s: float
    plain_decode_s: float | None
    speedup: float | None = Field(description="Seconds per token of plain decoding / of this arm.")
    identical: bool | None = Field(description="Same token ids as plain greedy decoding; null where not checked.")
    finish: str


class PlainArm(_Part):
    """Plain decoding, one token per step: the baseline. The same code as the tree arms, with no tree."""

    name: str
    checkpoint: str = Field(description="The checkpoint whose backbone decodes here.")
    prompts: int
    steps: int
    tokens: int
    step: Spread
    prefill: Spread
    tokens_per_second: Estimate


class GenerateArm(_Part):
    """transformers' own `generate`, greedy, on the same prompts: a check from outside."""

    checkpoint: str
    prompts: int
    tokens: int
    tokens_per_second: Estimate = Field(description="Prefill counted: generate does not tell the two apart.")
    plain_speed_against_generate: Estimate = Field(
        description="generate's seconds per token / the plain arm's, prefill counted in both."
    )
    identical: int = Field(description="Prompts whose plain ids equal generate's.")
    divergences: list[Divergence]


class ArmReport(_Part):
    """One checkpoint with one tree in one acceptance mode."""

    name: str
    checkpoint: str
    mode: Mode
    promise: str = Field(description="What the mode promises of the text: exact, heuristic, exact in law.")
    plain: int | None = Field(description="Index into `plain` of the arm this one is compared with.")
    heads: int
    prompts: int
    rounds: int
    tokens: int = Field(description="Tokens published: rounds + num_accepted.")
    num_accepted: int = Field(description="Accepted guesses; the root of each round is not counted.")
    tokens_per_round: Estimate = Field(description="tokens / rounds, the root counted.")
    accepted_histogram: list[int] = Field(description="[a]: rounds with num_accepted == a.")
    ended: dict[str, int] = Field(
        description="Why rounds ended: mismatch (the next token was not in the tree), exhausted (a whole path was "
        "accepted), stop (end of the answer), limit (max_new_tokens)."
    )
    head_accuracy: list[HeadAccuracy] = Field(description="Of this run; heads deeper than the tree are not run.")
    survival: list[SurvivalDepth]
    tree: TreeReport
    times: RoundTimes
    speed: SpeedReport | None = Field(description="null without a plain arm (--no-baseline).")
    exactness: Exactness
    categories: list[CategoryRow]
    prompt_rows: list[PromptRow]


class SuiteReport(_Part):
    """The prompts that were decoded."""

    name: str
    source: str
    sha256: str
    available: int = Field(description="Prompts in the suite.")
    used: int = Field(description="Prompts decoded.")
    turns: Literal["first", "all"]


class Setup(_Part):
    """The settings that decide the figures; their hash keys the journal."""

    base: str
    base_fingerprint: str
    dtype: str
    device: str
    quantization: str | None = Field(None, description="8bit or 4bit weights (bitsandbytes).")
    attention: str | None = Field(None, description="transformers' name of the attention implementation.")
    max_new_tokens: int
    temperature: float
    top_k: int | None
    top_p: float | None
    typical_eps: float
    typical_alpha: float
    seed: int
    bootstrap_resamples: int
    settings_hash: str
    peak_memory_bytes: int = Field(description="Peak resident memory of the process, or of the accelerator.")
    peak_memory_kind: str


class AcceptanceReport(_Part):
    """What `medusa-train eval-acceptance` measured."""

    kind: Literal["medusa-train.acceptance"] = "medusa-train.acceptance"
    schema_version: Literal[1] = SCHEMA_VERSION
    created: str = Field(description="UTC, ISO 8601.")
    command: str
    suite: SuiteReport
    setup: Setup
    plain: list[PlainArm]
    generate: list[GenerateArm]
    arms: list[ArmReport]
    environment: dict[str, Any]
    notes: list[str] = Field(description="What a reader must know beside the figures.")

    @property
    def passed(self) -> bool:
        """False where an arm that promises plain greedy decoding's tokens broke its promise."""
        return all(arm.exactness.passed is not False for arm in self.arms)


def schema_text() -> str:
    """The JSON schema of the report, as `report.schema.json` holds it."""
    return json.dumps(AcceptanceReport.model_json_schema(), indent=1, ensure_ascii=False) + "\n"
