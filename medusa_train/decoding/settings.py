"""What a decoding run is told, and what it gives back: plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from medusa_train.errors import UserError, unknown_name

Mode = Literal["greedy", "typical", "sample"]
Ending = Literal["mismatch", "exhausted", "stop", "limit"]

PROMISES: dict[str, str] = {
    "greedy": "exact: the token ids equal plain greedy decoding's",
    "typical": "heuristic: plausible tokens are kept, the output law is not the model's",
    "sample": "exact in distribution: every token has the model's own (processed) law",
}


@dataclass(frozen=True)
class DecodeSettings:
    """How to choose tokens and when to stop.

    Attributes:
        mode: `greedy` (exact), `typical` (a heuristic) or `sample` (exact in distribution); see PROMISES.
        max_new_tokens: exactly so many at most, the stop token counted.
        stop_token_ids: generation ends after any of these; None: every eos id of the model's generation_config, and
            the tokenizer's where the decoder has one.
        stop_strings: generation ends after the token that completes one of these (needs the tokenizer).
        temperature: `typical` and `sample`; > 0.
        top_k, top_p, typical_p, min_p: truncations of the law in `sample`, as transformers defines them; None: off.
        epsilon, alpha: thresholds of `typical`.
        repetition_penalty: as transformers; `greedy` and `sample`.
        seed: of `sample`; batch row b uses seed + b.
        prefill_chunk: prompt tokens per forward.
    """

    mode: Mode = "greedy"
    max_new_tokens: int = 128
    stop_token_ids: tuple[int, ...] | None = None
    stop_strings: tuple[str, ...] = ()
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    typical_p: float | None = None
    min_p: float | None = None
    epsilon: float = 0.09
    alpha: float = 0.3
    repetition_penalty: float | None = None
    seed: int = 0
    prefill_chunk: int = 512

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise unknown_name("acceptance mode", str(self.mode), get_args(Mode))
        _within("max_new_tokens", self.max_new_tokens, self.max_new_tokens >= 1, "1 or more")
        _within("temperature", self.temperature, self.temperature > 0, "more than 0 (greedy mode for 0)")
        _within("epsilon", self.epsilon, 0 <= self.epsilon <= 1, "0..1")
        _within("alpha", self.alpha, self.alpha >= 0, "0 or more")
        _within("top_k", self.top_k, self.top_k is None or self.top_k >= 1, "1 or more")
        _within("prefill_chunk", self.prefill_chunk, self.prefill_chunk >= 1, "1 or more")
        for name in ("top_p", "typical_p", "min_p"):
            value = getattr(self, name)
            _within(name, value, value is None or 0 < value <= 1, "more than 0, at most 1")
        penalty = self.repetition_penalty
        _within("repetition_penalty", penalty, penalty is None or penalty > 0, "more than 0")
        truncated = [name for name in ("top_k", "top_p", "typical_p", "min_p") if getattr(self, name) is not None]
        if truncated and self.mode != "sample":
            raise UserError(
                f"{', '.join(truncated)} with mode {self.mode!r}", allowed="mode `sample`", fix="leave it out"
            )
        if penalty is not None and self.mode == "typical":
            raise UserError("repetition_penalty with mode 'typical'", allowed="modes `greedy` and `sample`")

    def processors(self) -> Any:
        """The transformers processors that define the law of `sample` (or of a penalised `greedy`), in order."""
        from transformers import LogitsProcessorList
        from transformers.generation import logits_process as lp

        found = LogitsProcessorList()
        if self.repetition_penalty is not None and self.repetition_penalty != 1.0:
            found.append(lp.RepetitionPenaltyLogitsProcessor(self.repetition_penalty))
        if self.mode == "sample":
            if self.temperature != 1.0:
                found.append(lp.TemperatureLogitsWarper(self.temperature))
            if self.top_k is not None:
                found.append(lp.TopKLogitsWarper(self.top_k))
            if self.top_p is not None and self.top_p < 1:
                found.append(lp.TopPLogitsWarper(self.top_p))
            if self.min_p is not None:
                found.append(lp.MinPLogitsWarper(self.min_p))
            if self.typical_p is not None and self.typical_p < 1:
                found.append(lp.TypicalLogitsWarper(mass=self.typical_p))
        return found


def _within(name: str, value: Any, holds: bool, allowed: str) -> None:
    if not holds:
        raise UserError(f"{name} is {value}", allowed=allowed)


@dataclass(frozen=True)
class Seconds:
    """One round's wall time in seconds; `total` runs from its start to the next round's, Python included."""

    propose: float = 0.0
    forward: float = 0.0
    accept: float = 0.0
    commit: float = 0.0
    total: float = 0.0


@dataclass(frozen=True)
class RoundTrace:
    """One round.

    Attributes:
        root: the token that was already decided.
        path: accepted ranks; len(path) == num_accepted, after a cut by a stop or the limit.
        tokens: published tokens, the root first.
        num_accepted: len(tokens) - 1.
        ended: `mismatch` (a child was there, none was right), `exhausted` (the tree ended), `stop` or `limit`.
        seconds: None where the round needed no forward: its root alone ended the text.
        proposals: [heads run][top_k] ids in rank order; only with trace.
        tree_tokens, target_tokens: [N] ids of the rows and the verifier's choices after them (-1: not computed); only
            with trace.
    """

    root: int
    path: tuple[int, ...]
    tokens: tuple[int, ...]
    num_accepted: int
    ended: Ending
    seconds: Seconds | None = None
    proposals: tuple[tuple[int, ...], ...] = ()
    tree_tokens: tuple[int, ...] = ()
    target_tokens: tuple[int, ...] = ()


@dataclass(frozen=True)
class Decoded:
    """One answer.

    Attributes:
        token_ids: generated ids, the stop token included, the prompt not.
        rounds: every round in order.
        finish_reason: `stop` or `length`.
        prefill_seconds, decode_seconds: wall time before and after the first token was decided; for a batch, the whole
            batch's.
        mode: the acceptance mode.
    """

    token_ids: tuple[int, ...]
    rounds: tuple[RoundTrace, ...]
    finish_reason: Literal["stop", "length"]
    prefill_seconds: float
    decode_seconds: float
    mode: Mode = "greedy"
    cache_bytes: int = field(default=0, compare=False)

    @property
    def tokens_per_round(self) -> float:
        """Published tokens per round, the root counted."""
        return len(self.token_ids) / max(1, len(self.rounds))
