"""Targets and losses: the one shift of the program, sums with their counts, and the plain reference.

    head j at position t:  label tokens[t+j+2], kept where loss_mask[t+j+2] is set and both lie in one document
    L_j = sum(CE) / N_j,   L_medusa = sum_j lambda_j L_j          (DESIGN section 6; Medusa, arXiv 2401.10774, eq. 1)

The reference here materialises logits; `fused.py` gives the same values without them.
Shape letters: B batch, T positions, D hidden, V vocabulary, K heads, C channels (lm_head and/or heads), M rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from medusa_train.modeling.backbone import OutputProjection
from medusa_train.modeling.heads import MedusaHeads

IGNORE = -100


class LossTerms(NamedTuple):
    """A loss before its one division: the sum over supervised targets, and how many there were."""

    sum: Tensor
    count: Tensor

    def mean(self) -> Tensor:
        """sum / count; 0, still connected to the graph, where nothing was supervised."""
        return self.sum / self.count.clamp(min=1)


def shift_labels(input_ids_BT: Tensor, loss_mask_BT: Tensor, document_ids_BT: Tensor, shift: int) -> Tensor:
    """labels_BT: at position t the token at t+shift, or IGNORE where that is not supervised.

    Not supervised: the mask AT t+shift is 0, t+shift lies past the row, or in another document than t, or on padding
    (document -1).
    """
    labels_BT = torch.full_like(input_ids_BT, IGNORE)
    length = input_ids_BT.shape[1] - shift
    if length <= 0:
        return labels_BT
    document_BL = document_ids_BT[:, shift:]
    keep_BL = loss_mask_BT[:, shift:].bool() & (document_BL == document_ids_BT[:, :length]) & (document_BL >= 0)
    labels_BT[:, :length] = torch.where(keep_BL, input_ids_BT[:, shift:], IGNORE)
    return labels_BT


def channel_labels(
    input_ids_BT: Tensor,
    loss_mask_BT: Tensor,
    document_ids_BT: Tensor,
    shifts: Sequence[int],
    inverse_token_map_V: Tensor | None = None,
) -> Tensor:
    """labels_CBT, one channel per shift: shift 1 is the lm_head, shift j+2 is head j.

    Args:
        inverse_token_map_V: for reduced heads, token id -> row of the heads' projection or IGNORE. Applied to
            the heads' channels only. A token outside the map cannot be proposed, so it is no target and is not counted.
    """
    labels = []
    for shift in shifts:
        labels_BT = shift_labels(input_ids_BT, loss_mask_BT, document_ids_BT, shift)
        if inverse_token_map_V is not None and shift >= 2:
            labels_BT = torch.where(labels_BT == IGNORE, IGNORE, inverse_token_map_V[labels_BT.clamp(min=0)])
        labels.append(labels_BT)
    return torch.stack(labels)


def inverse_token_map(token_map: Tensor, vocab_size: int) -> Tensor:
    """int64 [V]: token id -> its row in the reduced projection, IGNORE for tokens outside the map."""
    inverse_V = torch.full((vocab_size,), IGNORE, dtype=torch.int64, device=token_map.device)
    inverse_V[token_map] = torch.arange(token_map.numel(), device=token_map.device)
    return inverse_V


def token_map_of(inverse_V: Tensor) -> Tensor:
    """The token map that `inverse_token_map` was made from."""
    tokens = (inverse_V != IGNORE).nonzero().squeeze(1)
    return tokens[inverse_V[tokens].argsort()]


def seen_tokens(input_ids_BT: Tensor, num_heads: int) -> Tensor:
    """seen_KBT: what head j sees at position t, the token at t+j+1: the one before its target t+j+2.

    Where that lies past the end there is no target either; a 0 stands there. A target lies in the document of t, so the
    token before it does too.
    """
    everything, one_document = torch.ones_like(input_ids_BT), torch.zeros_like(input_ids_BT)
    seen = [shift_labels(input_ids_BT, everything, one_document, head + 1) for head in range(num_heads)]
    return torch.stack(seen).clamp(min=0)


def supervised_rows(labels_CBT: Tensor) -> tuple[Tensor, Tensor]:
    """Positions that any channel has a target at: (flat positions int64 [M], labels_CM)."""
    labels_CN = labels_CBT.flatten(1)
    rows_M = (labels_CN != IGNORE).any(0).nonzero().squeeze(1)
    return rows_M, labels_CN[:, rows_M]


def cross_entropy_terms(logits_MV: Tensor, labels_M: Tensor) -> LossTerms:
    """The plain way: fp32 softmax cross entropy, summed over labels that are not IGNORE."""
    loss = F.cross_entropy(logits_MV.float(), labels_M, ignore_index=IGNORE, reduction="sum")
    return LossTerms(loss, (labels_M != IGNORE).sum())


def reference_medusa_terms(
    heads: MedusaHeads, projection: OutputProjection, hidden_MD: Tensor, labels_KM: Tensor
) -> list[LossTerms]:
    """Per head LossTerms with all logits of a head in memory: slow, obvious, what the fused loss is tested against."""
    return [
        cross_entropy_terms(heads.logits(hidden_MD, head, projection), labels_KM[head])
        for head in range(heads.config.medusa_num_heads)
    ]


def reference_kl_terms(teacher_logits_MV: Tensor, student_logits_MV: Tensor, labels_M: Tensor) -> LossTerms:
    """KL(teacher || student) in fp32, summed over the rows whose label is not IGNORE (CE's own denominator)."""
    keep_M = labels_M != IGNORE
    teacher_MV = F.log_softmax(teacher_logits_MV.float(), -1)
    student_MV = F.log_softmax(student_logits_MV.float(), -1)
    kl_M = (teacher_MV.exp() * (teacher_MV - student_MV)).sum(-1)
    return LossTerms(torch.where(keep_M, kl_M, 0.0).sum(), keep_M.sum())


def weighted_sum(terms: Sequence[LossTerms], weights: Sequence[float], counts_C: Tensor) -> Tensor:
    """sum_c weight_c sum_c / N_c, N the counts of the whole optimizer step. A channel with N = 0 adds 0."""
    parts = [
        weight * term.sum / counts_C[index].clamp(min=1)
        for index, (term, weight) in enumerate(zip(terms, weights, strict=True))
    ]
    return torch.stack(parts).sum()
