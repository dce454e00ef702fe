"""Calibration: one forward over known text, the ranks of its true next tokens in every head.

Shape letters: S tokens of a span, D hidden, K heads, k ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from medusa_train.decoding.propose import best_tokens, ranks_available, top_tokens
from medusa_train.decoding.ranks import END, MISS, Calibration, RankSpan, supervised_spans
from medusa_train.errors import UserError
from medusa_train.modeling.backbone import (
    OutputProjection,
    hidden_states_and_middle,
    input_embeddings,
    output_projection,
)
from medusa_train.modeling.heads import MedusaHeads, Seen

ROWS_AT_ONCE = 256


class Row(Protocol):
    """What a row needs to have; the dataset's TokenRow does."""

    input_ids: np.ndarray
    loss_mask: np.ndarray
    source: str
    id: str


@torch.inference_mode()
def calibrate(
    model: nn.Module,
    heads: MedusaHeads,
    rows: Iterable[Row],
    *,
    top_k: int = 10,
    valid_vocab_size: int | None = None,
    on_row: Callable[[int], None] | None = None,
) -> Calibration:
    """Ranks of the true next tokens along the supervised tokens of `rows`.

    Args:
        top_k: ranks kept; fewer where the heads know fewer tokens.
        on_row: called after each row with its number of supervised tokens.

    Raises:
        UserError: no row has a supervised token.
    """
    projection = output_projection(model, valid_vocab_size)
    top_k = min(top_k, ranks_available(heads, projection))
    device = projection.weight.device
    spans: list[RankSpan] = []
    for row in rows:
        ids = torch.as_tensor(np.asarray(row.input_ids, dtype=np.int64), device=device)
        found = supervised_spans(row.loss_mask)
        if found:
            hidden_1TD, middle_1TD = hidden_states_and_middle(model, ids[None], reads_layer=heads.config.reads_layer)
        for start, end in found:
            before = slice(start - 1, end - 1)
            middle_SD = None if middle_1TD is None else middle_1TD[0, before]
            ranks, greedy = span_ranks(
                heads, projection, hidden_1TD[0, before], ids[start:end], top_k, middle_SD, input_embeddings(model)
            )
            # Answers to one prompt belong together when rows are held out from a search.
            spans.append(RankSpan(ranks, greedy, getattr(row, "group", "") or row.id, row.source))
        if on_row is not None:
            on_row(sum(end - start for start, end in found))
    if not spans:
        raise UserError("no row has a supervised token to calibrate on")
    return Calibration(tuple(spans), top_k)


def span_ranks(
    heads: MedusaHeads,
    projection: OutputProjection,
    hidden_SD: Tensor,
    tokens_S: Tensor,
    top_k: int,
    middle_SD: Tensor | None = None,
    embedding: nn.Module | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Ranks and greedy flags of one span.

    Heads that see the parent are shown the true one: a round accepts along the true tokens only, so a rank given the
    true parent is the rank that decides.

    Args:
        hidden_SD: hidden_SD[o] is the state BEFORE token o, the one whose lm_head logits chose it.
        tokens_S: the span's tokens.
        middle_SD: the middle layer's states at the same places, where the heads read one.
        embedding: the backbone's input embedding, for heads that see the parent.

    Returns:
        (ranks_SK int16, greedy_S bool); see RankSpan.
    """
    length, num_heads = len(tokens_S), heads.config.medusa_num_heads
    proposed, greedy = [], []
    for start in range(0, length, ROWS_AT_ONCE):
        hidden = hidden_SD[start : start + ROWS_AT_ONCE]
        if heads.config.sees == "hidden":
            proposed.append(top_tokens(heads, hidden, projection, num_heads=num_heads, k=top_k))
        else:
            part = slice(start, start + ROWS_AT_ONCE)
            middle = None if middle_SD is None else middle_SD[part]
            proposed.append(_given_true_parents(heads, projection, hidden, middle, tokens_S, start, top_k, embedding))
        greedy.append(projection(hidden).argmax(-1) == tokens_S[start : start + ROWS_AT_ONCE])
    proposed_SKk = torch.cat(proposed)
    ranks_SK = np.full((length, num_heads), END, dtype=np.int16)
    for head in range(num_heads):
        ahead = head + 1
        if ahead >= length:
            break
        equal = proposed_SKk[: length - ahead, head] == tokens_S[ahead:, None]
        found = torch.where(equal.any(-1), equal.int().argmax(-1), MISS)
        ranks_SK[: length - ahead, head] = found.cpu().numpy()
    return ranks_SK, torch.cat(greedy).cpu().numpy()


def _given_true_parents(
    heads: MedusaHeads,
    projection: OutputProjection,
    hidden_mD: Tensor,
    middle_mD: Tensor | None,
    tokens_S: Tensor,
    start: int,
    top_k: int,
    embedding: nn.Module,
) -> Tensor:
    """The best tokens [m, K, k] of heads that see the parent; head j at place o sees token o + j of the span.

    Past the span's end there is no such token and no rank either: the last one stands in.
    """
    at_m = torch.arange(start, start + len(hidden_mD), device=tokens_S.device)
    proposed = []
    for head in range(heads.config.medusa_num_heads):
        parent_mD = embedding(tokens_S[(at_m + head).clamp(max=len(tokens_S) - 1)])
        logits_mV = heads.logits(hidden_mD, head, projection, Seen(parent_mD, middle_mD))
        proposed.append(best_tokens(heads, logits_mV, projection, top_k))
    return torch.stack(proposed, dim=1)
