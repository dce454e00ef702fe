"""When an answer ends: stop tokens, stop strings, the end of a learned position table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from medusa_train.decoding.settings import DecodeSettings
from medusa_train.errors import UserError
from medusa_train.modeling.backbone import plain_model


@dataclass(frozen=True)
class StopRules:
    """Stop tokens of one run, and transformers stopping criteria (stop strings are one)."""

    token_ids: frozenset[int]
    criteria: tuple[Callable, ...] = ()

    @classmethod
    def of(
        cls, model: nn.Module, tokenizer: Any, settings: DecodeSettings, criteria: Sequence[Callable] = ()
    ) -> StopRules:
        """The settings' stop tokens, else those of `eos_token_ids`; stop strings; `criteria`.

        Raises:
            UserError: stop strings without a tokenizer.
        """
        ids = eos_token_ids(model, tokenizer) if settings.stop_token_ids is None else settings.stop_token_ids
        if not settings.stop_strings:
            return cls(frozenset(ids), tuple(criteria))
        if tokenizer is None:
            raise UserError("stop strings need the tokenizer")
        from transformers import StopStringCriteria

        strings = StopStringCriteria(tokenizer, list(settings.stop_strings))
        return cls(frozenset(ids), (*criteria, strings))

    def at(self, prompt: list[int], generated: list[int], token: int) -> bool:
        """Whether the text ends with `token` after `generated`."""
        if token in self.token_ids:
            return True
        if not self.criteria:
            return False
        # The prompt counts, as it does in generate.
        ids = torch.tensor([[*prompt, *generated, token]])
        # A criterion answers for the row or, as generate allows, with a plain bool.
        return any(bool(torch.as_tensor(criterion(ids, None)).any()) for criterion in self.criteria)


def eos_token_ids(model: nn.Module, tokenizer: Any = None) -> tuple[int, ...]:
    """Every eos id of the model's generation_config (one, several or none) and the tokenizer's: distill's rule too."""
    eos = getattr(plain_model(model).generation_config, "eos_token_id", None)
    found = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
    own = getattr(tokenizer, "eos_token_id", None)
    if own is not None:
        found.append(own)
    return tuple(dict.fromkeys(int(token) for token in found))


def context_limit(config: Any) -> int | None:
    """Positions of a learned position table, which cannot be passed; None for rotary positions, as in generate."""
    text = config.get_text_config(decoder=True)
    if text.model_type in LEARNED_POSITIONS:
        return int(text.max_position_embeddings)
    return None


@dataclass(frozen=True)
class RopeSwitch:
    """Rotary frequencies that depend on how long the text is, so that cached keys can go stale.

    Attributes:
        kind: `longrope` (one set of frequencies up to the border, another past it) or `dynamic` (new ones each step).
        border: positions up to which nothing changes.
    """

    kind: str
    border: int

    def check(self, prompt_tokens: int, new_tokens: int, depth: int) -> None:
        """Refuses a request inside which the frequencies change: no cached decoder is exact there.

        Raises:
            UserError: naming the border and what fits.
        """
        end = prompt_tokens + new_tokens + depth
        if end <= self.border or (self.kind == "longrope" and prompt_tokens > self.border):
            return
        raise UserError(
            f"the model's {self.kind} positions change past {self.border} tokens; prompt, answer and tree reach {end}",
            allowed=f"at most {self.border} in all"
            + (f", or a prompt longer than {self.border}" if self.kind == "longrope" else ""),
            fix=f"ask for at most {max(0, self.border - depth - prompt_tokens)} new tokens",
        )


def rope_switch(config: Any) -> RopeSwitch | None:
    """The model's RopeSwitch, or None where its frequencies never change."""
    text = config.get_text_config(decoder=True)
    parameters = getattr(text, "rope_parameters", None) or {}
    groups = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    for group in groups:
        if group.get("rope_type") == "longrope":
            original = group.get("original_max_position_embeddings")
            return RopeSwitch("longrope", int(original or text.original_max_position_embeddings))
        if group.get("rope_type") == "dynamic":
            return RopeSwitch("dynamic", int(text.max_position_embeddings))
    return None


# Decoder families whose positions are rows of a table. max_position_embeddings is its length (GPT-2's n_positions).
LEARNED_POSITIONS = frozenset(
    {"gpt2", "gpt_bigcode", "gpt_neo", "openai-gpt", "opt", "biogpt", "xglm", "gptsan-japanese", "imagegpt"}
)
