"""Where two answers part, and whether it was a near-tie.

In float32 greedy answers must be identical. In bfloat16 the shape of a matrix product decides its last bit, so two
right programs may part where two logits are as good as equal; each such place is shown with both logits. The bound is
`near_tie`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from medusa_train.decoding.near_tie import first_difference, near_tie_bound
from medusa_train.modeling.backbone import hidden_states, output_projection


@dataclass(frozen=True)
class Divergence:
    """The first place where two answers differ.

    Attributes:
        index: position in the answers.
        token_a, token_b: what each has there; None where it had ended.
        logit_a, logit_b: the model's logits of both there, after their common text; None if either had ended.
        logit_top: the highest logit there.
        tolerance: how far below it both tokens may stand and still count as a tie; 0 in float32.
    """

    index: int
    token_a: int | None
    token_b: int | None
    logit_a: float | None
    logit_b: float | None
    logit_top: float | None
    tolerance: float

    @property
    def margin(self) -> float | None:
        """The distance of the lower of the two from the highest logit."""
        return None if self.logit_top is None else self.logit_top - min(self.logit_a, self.logit_b)

    @property
    def near_tie(self) -> bool:
        """Accepted as rounding."""
        return self.margin is not None and self.tolerance > 0 and self.margin <= self.tolerance


@torch.inference_mode()
def first_divergence(
    model: nn.Module, prompt_ids: Sequence[int], ids_a: Sequence[int], ids_b: Sequence[int]
) -> Divergence | None:
    """None where the answers are equal."""
    ids_a, ids_b = list(ids_a), list(ids_b)
    index = first_difference(ids_a, ids_b)
    if index is None:
        return None
    if index == min(len(ids_a), len(ids_b)):
        ended_a, ended_b = index >= len(ids_a), index >= len(ids_b)
        token_a, token_b = None if ended_a else ids_a[index], None if ended_b else ids_b[index]
        return Divergence(index, token_a, token_b, None, None, None, 0.0)
    projection = output_projection(model)
    ids = torch.tensor([[*map(int, prompt_ids), *ids_a[:index]]], device=projection.weight.device)
    logits_V = projection(hidden_states(model, ids)[:, -1])[0]
    tokens, top = (ids_a[index], ids_b[index]), float(logits_V.max())
    logit_a, logit_b = (float(logits_V[token]) for token in tokens)
    bound = near_tie_bound(top, str(logits_V.dtype).removeprefix("torch."))
    return Divergence(index, *tokens, logit_a, logit_b, top, bound)
