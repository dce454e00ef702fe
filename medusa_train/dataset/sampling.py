"""Choosing the next token of many rows at once, reproducibly.

A sampled row draws one uniform number per step from its own seed and inverts the cumulative distribution with it. So a
row's tokens do not depend on which other rows shared its batch (up to the rounding of the logits), nor on resuming.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from medusa_train.modeling.argmax import argmax_rows

BLOCK = 128
# float32 numbers worked on at once on a CPU: 2 MiB.
CACHED_NUMBERS = 1 << 19
# Tokens that are sorted for top-p before the whole vocabulary is.
HEAD = 64


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
    if decoding.top_k <= 0 and decoding.top_p >= 1.0:
        return _sample_whole(logits_BV, decoding.temperature, uniform_B)
    scores_BV = logits_BV.float() / decoding.temperature
    if decoding.top_k > 0:
        return _from_sorted(*_top(scores_BV, min(decoding.top_k, scores_BV.shape[-1])), decoding.top_p, uniform_B)
    # Sorting a vocabulary takes longer than a decode step, and nearly every nucleus lies in its first few tokens.
    whole_B1 = torch.logsumexp(scores_BV, -1, keepdim=True)
    top_BW, ids_BW = _top(scores_BV, min(HEAD, scores_BV.shape[-1]))
    chosen_B = _from_sorted(top_BW, ids_BW, decoding.top_p, uniform_B, whole_B1)
    longer_B = (torch.logsumexp(top_BW, -1) - whole_B1[:, 0]).exp() < decoding.top_p
    if bool(longer_B.any()):
        sorted_bV, ids_bV = scores_BV[longer_B].sort(-1, descending=True)
        chosen_B[longer_B] = _from_sorted(sorted_bV, ids_bV, decoding.top_p, uniform_B[longer_B], whole_B1[longer_B])
    return chosen_B


def _from_sorted(
    top_BW: torch.Tensor,
    ids_BW: torch.Tensor,
    top_p: float,
    uniform_B: torch.Tensor,
    log_mass_B1: torch.Tensor | None = None,
) -> torch.Tensor:
    """A draw from scores in falling order, cut where their mass before reaches top_p of the whole (of themselves, or of
    `exp(log_mass_B1)` where they are only the head)."""
    weights_BW = torch.exp(top_BW - top_BW[:, :1])
    if top_p < 1.0:
        mass_B1 = weights_BW.sum(-1, keepdim=True) if log_mass_B1 is None else torch.exp(log_mass_B1 - top_BW[:, :1])
        before_BW = weights_BW.cumsum(dim=-1) - weights_BW
        weights_BW = weights_BW.masked_fill(before_BW >= top_p * mass_B1, 0.0)
    return ids_BW.gather(-1, _invert(weights_BW, uniform_B)[:, None])[:, 0]


def _top(scores_BV: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`topk`, scores in falling order: the `count` best tokens lie in the `count` blocks with the highest maxima."""
    size = scores_BV.shape[-1]
    if size % BLOCK or size < 4 * count * BLOCK:
        return scores_BV.topk(count, dim=-1)
    blocks_BNK = scores_BV.unflatten(-1, (-1, BLOCK))
    block_BC = blocks_BNK.amax(-1).topk(count, dim=-1).indices
    inside_BCK = blocks_BNK.gather(1, block_BC[..., None].expand(*block_BC.shape, BLOCK))
    top_BW, at_BW = inside_BCK.flatten(1).topk(count, dim=-1)
    return top_BW, block_BC.gather(1, at_BW // BLOCK) * BLOCK + at_BW % BLOCK


def _sample_whole(logits_BV: torch.Tensor, temperature: float, uniform_B: torch.Tensor) -> torch.Tensor:
    """A draw from softmax(logits / T) over the whole vocabulary, a few rows at a time so that they stay in cache."""
    rows = max(1, CACHED_NUMBERS // logits_BV.shape[-1]) if logits_BV.device.type == "cpu" else len(logits_BV)
    drawn = []
    for part_bV, uniform_b in zip(logits_BV.split(rows), uniform_B.split(rows), strict=True):
        scores_bV = part_bV.float()
        weights_bV = (scores_bV - scores_bV.amax(-1, keepdim=True)).div_(temperature).exp_()
        drawn.append(_invert(weights_bV, uniform_b))
    return torch.cat(drawn)


def _invert(weights_BW: torch.Tensor, uniform_B: torch.Tensor) -> torch.Tensor:
    """Index ``[B]`` of the first entry whose cumulative weight exceeds ``uniform * total``: its block first."""
    width = weights_BW.shape[-1]
    if width <= 2 * BLOCK:
        return _walk(weights_BW, uniform_B * weights_BW.sum(-1))
    if width % BLOCK:
        weights_BW = torch.nn.functional.pad(weights_BW, (0, BLOCK - width % BLOCK))
    blocks_BNK = weights_BW.unflatten(-1, (-1, BLOCK))
    sums_BN = blocks_BNK.sum(-1)
    target_B = uniform_B * sums_BN.sum(-1)
    block_B = _walk(sums_BN, target_B)
    before_B = (sums_BN.cumsum(-1) - sums_BN).gather(-1, block_B[:, None])[:, 0]
    inside_BK = blocks_BNK.gather(1, block_B[:, None, None].expand(-1, 1, BLOCK))[:, 0]
    return block_B * BLOCK + _walk(inside_BK, (target_B - before_B).clamp(min=0.0))


def _walk(weights_BW: torch.Tensor, target_B: torch.Tensor) -> torch.Tensor:
    """Index of the first entry whose cumulative weight exceeds the target; the last one of any weight where rounding
    has put the target at the very end."""
    index_B = torch.searchsorted(weights_BW.cumsum(dim=-1), target_B[:, None].contiguous(), right=True)[:, 0]
    last_B = weights_BW.shape[-1] - 1 - (weights_BW.flip(-1) > 0).int().argmax(dim=-1)
    return torch.minimum(index_B, last_B)
