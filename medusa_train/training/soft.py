"""Soft targets from the hidden-state cache: what the backbone itself holds likely at the place that a head guesses.

Head j at position t guesses token t+j+2. The row has one token there, drawn once; the backbone's own distribution there
follows from its hidden state at t+j+1, which the cache holds as well. Training on its k likeliest tokens is knowledge
distillation (Hinton et al., arXiv 1503.02531) and needs no further run of the backbone.

Shape letters: N positions of the cache, C channels, M rows of a batch, k soft tokens, D hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor

from medusa_train.console import progress
from medusa_train.modeling.backbone import OutputProjection
from medusa_train.training.cache import CachedRows
from medusa_train.training.losses import IGNORE

ROWS_AT_ONCE = 1024


class SoftTargets:
    """The k likeliest tokens at every cached position, and where each head of each position finds its own.

    Attaches itself to the cache, which hands out soft targets from then on.

    Args:
        cached: a cache whose labels have the channel of shift 1 first.
        projection: the backbone's.
        token_map: of reduced heads (tokens outside it get no weight), or None.
        count: k.
        share: of the target; the rest goes to the token in the row.
    """

    def __init__(
        self, cached: CachedRows, projection: OutputProjection, token_map: Tensor | None, count: int, share: float
    ) -> None:
        self.share = share
        self.tokens_Nk, self.weights_Nk = likeliest(cached, projection, token_map, count)
        # The channel of shift 1 was only there to have the last positions of an answer cached.
        self.source_NC = sources(cached.row_N, cached.position_N, cached.labels_NC.shape[1])[:, 1:]
        cached.labels_NC = cached.labels_NC[:, 1:]
        cached.select((cached.labels_NC != IGNORE).any(1))
        cached.soft = self

    def batch(self, indices_M: Tensor, labels_CM: Tensor) -> dict[str, Tensor]:
        """soft_tokens [C, M, k+1] and soft_weights; the last token is the row's own."""
        source_CM = self.source_NC[indices_M].T.long()
        known_CM = (source_CM >= 0) & (labels_CM != IGNORE)
        at_CM = source_CM.clamp(min=0)
        own_CM = torch.where(known_CM, 1.0 - self.share, 1.0)
        soft = self.weights_Nk[at_CM].float() * torch.where(known_CM, self.share, 0.0)[..., None]
        tokens = torch.cat([self.tokens_Nk[at_CM].long(), labels_CM.clamp(min=0)[..., None]], dim=-1)
        return {"soft_tokens": tokens, "soft_weights": torch.cat([soft, own_CM[..., None]], dim=-1)}


@torch.no_grad()
def likeliest(
    cached: CachedRows, projection: OutputProjection, token_map: Tensor | None, count: int
) -> tuple[Tensor, Tensor]:
    """(tokens int32 [N, k] in rows of the heads' projection, weights bf16 [N, k] summing to 1) of every position."""
    device = projection.weight.device
    tokens, weights = [], []
    with progress("soft targets", cached.size, "rows") as job:
        for indices_m in torch.arange(cached.size).split(ROWS_AT_ONCE):
            hidden_mD = cached.hidden(indices_m).to(device=device, dtype=projection.weight.dtype)
            if token_map is None:
                logits_mV = projection(hidden_mD)
            else:
                bias = None if projection.bias is None else projection.bias[token_map]
                raw = torch.nn.functional.linear(hidden_mD, projection.weight[token_map], bias)
                logits_mV = projection.finish(raw)
            top = logits_mV.float().topk(min(count, logits_mV.shape[1]), dim=-1)
            tokens.append(top.indices.to(torch.int32).cpu())
            weights.append(top.values.softmax(-1).bfloat16().cpu())
            job.advance(len(indices_m))
    return torch.cat(tokens), torch.cat(weights)


def sources(row_N: Tensor, position_N: Tensor, channels: int) -> Tensor:
    """int32 [N, C]: the index of (row, position + c), whose distribution is that of channel c's target; -1: not cached.

    Channel c here has shift c + 1, so its target t+c+1 is what the hidden state at t+c predicts.
    """
    key_N = row_N.long() * (1 << 32) + position_N.long()
    order = key_N.argsort()
    found = []
    for ahead in range(channels):
        wanted = key_N + ahead
        at = torch.searchsorted(key_N[order], wanted).clamp(max=len(order) - 1)
        index = order[at]
        found.append(torch.where(key_N[index] == wanted, index, -1).to(torch.int32))
    return torch.stack(found, dim=1)
