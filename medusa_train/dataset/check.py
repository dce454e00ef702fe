"""How likely a base finds the answers in its rows: whether the data is the model's own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from medusa_train.dataset.packing import collate
from medusa_train.dataset.rows import TokenRow

# A model agrees greedily with about nine of ten tokens of what it said itself (sampling at 1.0: seven of ten); with
# other people's text with about half.
OWN_GREEDY_AGREEMENT = 0.65


@dataclass(frozen=True)
class OwnText:
    """Sums over supervised tokens that have a predecessor in their row."""

    tokens: int
    log_prob: float
    agreements: int

    @property
    def mean_log_prob(self) -> float:
        """Nats per supervised token."""
        return self.log_prob / max(1, self.tokens)

    @property
    def greedy_agreement(self) -> float:
        """Share of supervised tokens that are the base's own argmax."""
        return self.agreements / max(1, self.tokens)

    @property
    def is_own(self) -> bool:
        return self.greedy_agreement >= OWN_GREEDY_AGREEMENT


def how_own(base: Any, rows: Sequence[TokenRow], *, batch_tokens: int = 4096) -> Iterator[tuple[TokenRow, OwnText]]:
    """Each row with how likely the base finds its supervised tokens; rows of similar length share a forward."""
    from medusa_train.modeling.backbone import hidden_states, output_projection
    from medusa_train.modeling.masks import packed_attention_mask

    project = output_projection(base.model)
    order = sorted(rows, key=len)
    while order:
        count = max(1, min(len(order), batch_tokens // len(order[-1])))
        group, order = order[-count:], order[:-count]
        batch = collate(group).to(base.model.device)
        mask = packed_attention_mask(base.model, batch.document_ids_BT, batch.position_ids_BT, base.model.dtype)
        with torch.inference_mode():
            hidden_BTD = hidden_states(
                base.model, batch.input_ids_BT, attention_mask=mask, position_ids_BT=batch.position_ids_BT
            )
            for index, row in enumerate(group):
                at = torch.nonzero(batch.loss_mask_BT[index, 1:]).flatten()
                wanted = batch.input_ids_BT[index, 1:][at]
                logits = project(hidden_BTD[index, at]).float()
                chosen = torch.log_softmax(logits, -1).gather(-1, wanted[:, None])
                agreements = int((logits.argmax(-1) == wanted).sum())
                yield row, OwnText(len(at), float(chosen.sum()), agreements)
