"""Where two answers part, and whether it was a near-tie.

In float32 greedy answers must be identical. In bfloat16 the shape of a matrix product decides its last bit, so two
right programs may part where two logits are as good as equal; each such place is shown with both logits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from medusa_train.modeling.backbone import hidden_states, output_projection

# Measured on a bfloat16 model over a thousand greedy positions and three forward shapes: the difference of the two top
# logits moved by 2 units in the last place (99th percentile) and 5 at most.
NEAR_TIE_ULPS = 6


@dataclass(frozen=True)
class Divergence:
    """The first place where two answers differ.

    Attributes:
        index: position in the answers.
        token_a, token_b: what each has there; None where it had ended.
        logit_a, logit_b: the model's logits of both there, after their common text; None if either had ended.
        tolerance: the largest difference that counts as a tie.
    """

    index: int
    token_a: int | None
    token_b: int | None
    logit_a: float | None
    logit_b: float | None
    tolerance: float

    @property
    def margin(self) -> float | None:
        """|logit_a - logit_b|."""
        return None if self.logit_a is None else abs(self.logit_a - self.logit_b)

    @property
    def near_tie(self) -> bool:
        """Accepted as rounding; in float32 the tolerance is rounding of float32."""
        return self.margin is not None and self.margin <= self.tolerance


@torch.inference_mode()
def first_divergence(
    model: nn.Module, prompt_ids: Sequence[int], ids_a: Sequence[int], ids_b: Sequence[int]
) -> Divergence | None:
    """None where the answers are equal."""
    ids_a, ids_b = list(ids_a), list(ids_b)
    if ids_a == ids_b:
        return None
    shorter = min(len(ids_a), len(ids_b))
    index = next((i for i in range(shorter) if ids_a[i] != ids_b[i]), shorter)
    if index == shorter:
        ended_a, ended_b = index >= len(ids_a), index >= len(ids_b)
        return Divergence(index, None if ended_a else ids_a[index], None if ended_b else ids_b[index], None, None, 0.0)
    projection = output_projection(model)
    ids = torch.tensor([[*map(int, prompt_ids), *ids_a[:index]]], device=projection.weight.device)
    logits_V = projection(hidden_states(model, ids)[:, -1])[0]
    logit_a, logit_b = float(logits_V[ids_a[index]]), float(logits_V[ids_b[index]])
    ulp = torch.finfo(logits_V.dtype).eps * 2.0 ** math.floor(math.log2(max(abs(logit_a), abs(logit_b), 1e-30)))
    return Divergence(index, ids_a[index], ids_b[index], logit_a, logit_b, NEAR_TIE_ULPS * ulp)
