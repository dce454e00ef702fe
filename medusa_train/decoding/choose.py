"""How a walk chooses tokens: the argmax or a sample of the processed law, batch row by batch row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from medusa_train.decoding.settings import DecodeSettings
from medusa_train.modeling.argmax import argmax_rows


@dataclass(frozen=True)
class Chooser:
    """Chooses roots, and tokens along walks.

    Attributes:
        walks: the mode needs `walk_accept` (sampling, or a law that depends on the text so far).
        processors: transformers logits processors, applied to float32 logits with the whole text so far.
        generators: one per batch row, so that a row's text does not depend on its neighbours; None: argmax.
        prompts: the token ids before each row's answer, as processors see them (padding included where there is any).
        copies: rows to show the processors, all alike: generate's may hold one value for each row of its batch.
    """

    walks: bool
    processors: Any
    generators: tuple[torch.Generator, ...] | None
    prompts: tuple[tuple[int, ...], ...]
    copies: int = 1

    @classmethod
    def of(
        cls, settings: DecodeSettings, prompts: list[list[int]], device: torch.device, processors: Any = None
    ) -> Chooser:
        """The chooser that `settings` describe, with `processors` in place of theirs where given."""
        copies = 1 if processors is None else len(prompts)
        processors = settings.processors() if processors is None else processors
        generators = None
        if settings.mode == "sample":
            generators = tuple(torch.Generator(device).manual_seed(settings.seed + row) for row in range(len(prompts)))
        walks = settings.mode == "sample" or len(processors) > 0
        return cls(walks, processors, generators, tuple(map(tuple, prompts)), copies)

    def roots(self, logits_BV: Tensor) -> Tensor:
        """The first token of every answer."""
        if not self.walks:
            return argmax_rows(logits_BV)
        chosen = [self._choose(b, logits_V, []) for b, logits_V in enumerate(logits_BV)]
        return torch.tensor(chosen, device=logits_BV.device)

    def in_round(self, texts: list[list[int]], live: list[bool]) -> Callable[[int, Tensor, list[int]], int]:
        """The `choose` of a round that starts after `texts`; a row that is not live draws nothing."""

        def choose(b: int, logits_V: Tensor, round_tokens: list[int]) -> int:
            return self._choose(b, logits_V, [*texts[b], *round_tokens]) if live[b] else round_tokens[0]

        return choose

    def _choose(self, b: int, logits_V: Tensor, generated: list[int]) -> int:
        scores_1V = logits_V[None].float()
        if len(self.processors):
            ids = torch.tensor([[*self.prompts[b], *generated]], device=logits_V.device)
            scores_CV = scores_1V.repeat(self.copies, 1)
            scores_1V = self.processors(ids.repeat(self.copies, 1), scores_CV)[b % self.copies][None]
        if self.generators is None:
            return int(scores_1V.argmax(-1))
        law = torch.softmax(scores_1V, dim=-1)
        return int(torch.multinomial(law, 1, generator=self.generators[b]))
