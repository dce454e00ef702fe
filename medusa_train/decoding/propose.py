"""What the heads guess: their best tokens at one hidden row per batch row.

Shape letters: B batch, D hidden, J heads run, k ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from medusa_train.modeling.backbone import OutputProjection
from medusa_train.modeling.heads import MedusaHeads


def top_tokens(
    heads: MedusaHeads, hidden_BD: Tensor, projection: OutputProjection, *, num_heads: int, k: int
) -> Tensor:
    """The k likeliest tokens of the first `num_heads` heads, best first: ids of the full vocabulary, [B, J, k].

    `shared` heads go through the one projection together, so its weight is read once.
    """
    features = [heads.features(hidden_BD, head) for head in range(num_heads)]
    if heads.config.contract == "shared":
        logits_BJV = projection(torch.stack(features, dim=1))
    else:
        logits_BJV = torch.stack(
            [heads.project(feature, head, projection) for head, feature in enumerate(features)], dim=1
        )
    if heads.token_map is None and projection.valid_vocab_size is not None:
        # Rows past the tokenizer are padding of the weight: no token, so no guess.
        logits_BJV = logits_BJV[..., : projection.valid_vocab_size]
    return heads.to_token_ids(logits_BJV.topk(k, dim=-1).indices)


def ranks_available(heads: MedusaHeads, projection: OutputProjection) -> int:
    """How many different tokens a head can propose."""
    rows = heads.config.projection_rows
    if heads.token_map is None and projection.valid_vocab_size is not None:
        rows = min(rows, projection.valid_vocab_size)
    return rows
