"""Choosing the next token of many rows at once, reproducibly.

A sampled row draws one uniform number per step from its own seed and inverts the cumulative distribution with it. So a
row's tokens do not depend on which other rows shared its batch (up to the rounding of the logits), nor on resuming.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from medusa_train.modeling.argmax import argmax_rows


@dataclass(frozen=True)
class Decoding:
    """How tokens are chosen. ``temperature`` 0 is greedy; ``top_k`` 0 and ``top_p`` 1 keep the whole vocabulary."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    @property
    def greedy(self) -> bool:
        return self.temperature <= 0.0


def uniforms(seed: int, count: int) -> np.ndarray:
    """``count`` uniform numbers in [0, 1) of a row's own counter-based generator (float32)."""
    return np.random.Generator(np.random.Philox(key=seed)).random(count, dtype=np.float32)


def choose(logits_BV: torch.Tensor, decoding: Decoding, uniform_B: torch.Tensor | None) -> torch.Tensor:
    """Token ids ``[B]``: the argmax, or the inverse of the truncated distribution at ``uniform_B``.

    Order of the processors as in transformers: temperature, top-k, top-p; top-p keeps the smallest set of most likely
    tokens whose mass reaches p (the token that crosses p included).
    """
    if decoding.greedy:
        return argmax_rows(logits_BV)
    scores_BV = logits_BV.float() / decoding.temperature
    if decoding.top_k <= 0 and decoding.top_p >= 1.0:
        return _invert(torch.softmax(scores_BV, dim=-1), uniform_B)
    width = min(decoding.top_k, scores_BV.shape[-1]) if decoding.top_k > 0 else scores_BV.shape[-1]
    top_BW, ids_BW = (
        scores_BV.topk(width, dim=-1) if width < scores_BV.shape[-1] else scores_BV.sort(-1, descending=True)
    )
    probabilities_BW = torch.softmax(top_BW, dim=-1)
    if decoding.top_p < 1.0:
        before_BW = probabilities_BW.cumsum(dim=-1) - probabilities_BW
        probabilities_BW = probabilities_BW.masked_fill(before_BW >= decoding.top_p, 0.0)
    return ids_BW.gather(-1, _invert(probabilities_BW, uniform_B)[:, None])[:, 0]


def _invert(weights_BW: torch.Tensor, uniform_B: torch.Tensor) -> torch.Tensor:
    """Index ``[B]`` of the first entry whose cumulative weight exceeds ``uniform * total``."""
    cumulative_BW = weights_BW.cumsum(dim=-1)
    target_B1 = uniform_B[:, None].to(cumulative_BW.dtype) * cumulative_BW[:, -1:]
    index_B = torch.searchsorted(cumulative_BW, target_B1, right=True)[:, 0]
    # Rounding may place the target at the very end, past the last token of any weight.
    last_B = weights_BW.shape[-1] - 1 - (weights_BW.flip(-1) > 0).int().argmax(dim=-1)
    return torch.minimum(index_B, last_B)
