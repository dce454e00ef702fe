"""Token rows as the Trainer's data set and batches: packed bins, targets of all channels, supervised positions.

Everything that would make a GPU wait for the CPU (which positions are supervised, how many) is decided here, in the
data loader.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from medusa_train.dataset.rows import TokenRow, collate_bins, pack_rows
from medusa_train.training.losses import IGNORE, channel_labels, seen_tokens, supervised_rows


class BinDataset(Dataset):
    """Bins of rows; one bin is one row of a batch (`per_device_train_batch_size` counts bins)."""

    def __init__(self, rows: Sequence[TokenRow], max_length: int, packing: bool) -> None:
        self.bins = pack_rows(rows, max_length) if packing else [[row] for row in rows]
        self.max_length = max_length

    @property
    def supervised_share(self) -> float:
        """Supervised tokens over positions, were every bin `max_length` long."""
        supervised = sum(row.supervised for one in self.bins for row in one)
        return supervised / max(1, len(self.bins) * self.max_length)

    def __len__(self) -> int:
        return len(self.bins)

    def __getitem__(self, index: int) -> list[TokenRow]:
        return self.bins[index]


class BinCollator:
    """Bins -> what `Trainee.forward` takes; for error messages `row_ids` (file:line), `row_M` the index into them.

    Args:
        shifts: of the channels.
        inverse_map: token id -> row of a reduced projection, or None.
        sees: tokens that the heads see are in the batch.
        mask: builds what the backbone takes as attention_mask from (document_ids, position_ids).
    """

    def __init__(
        self,
        shifts: Sequence[int],
        inverse_map: Tensor | None,
        pad_to_multiple: int,
        mask: Any = None,
        sees: bool = False,
    ) -> None:
        self.shifts, self.inverse_map, self.pad_to_multiple, self.mask = shifts, inverse_map, pad_to_multiple, mask
        self.sees = sees

    def __call__(self, bins: list[list[TokenRow]]) -> dict[str, Any]:
        batch = collate_bins(bins, self.pad_to_multiple)
        labels_CBT = channel_labels(
            batch.input_ids_BT, batch.loss_mask_BT, batch.document_ids_BT, self.shifts, self.inverse_map
        )
        rows_M, labels_CM = supervised_rows(labels_CBT)
        first_B = torch.tensor([0, *(len(one) for one in bins[:-1])]).cumsum(0)
        seen = {}
        if self.sees:
            num_heads = sum(shift >= 2 for shift in self.shifts)
            seen = {"seen": seen_tokens(batch.input_ids_BT, num_heads).flatten(1)[:, rows_M]}
        row_BT = first_B[:, None] + batch.document_ids_BT
        return {
            "input_ids": batch.input_ids_BT,
            "position_ids": batch.position_ids_BT,
            "attention_mask": None if self.mask is None else self.mask(batch.document_ids_BT, batch.position_ids_BT),
            "rows": rows_M,
            "labels": labels_CM,
            "row_M": row_BT.flatten()[rows_M],
            **seen,
            "row_ids": [row.source for one in bins for row in one],
        }


def target_counts(labels_CM: Tensor) -> Tensor:
    """int64 [C]: targets of every channel."""
    return (labels_CM != IGNORE).sum(1)
