"""Attention masks of tree rows: every row sees the whole prefix, its ancestors and itself, within each layer's window.

What a row sees depends only on how far a slot lies from the committed length, so one wide buffer per layer type holds
all rounds: a round's mask is cut out of it (or gathered, for a batch of ragged lengths). Windows are measured by
position, that is by tree depth, not by slot. Masks and their rows begin at multiples of 16 bytes, as CUDA's attention
kernels demand.

Shape letters: B batch, N tree rows, P committed length.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from medusa_train.decoding.tree import TreeBuffers
from medusa_train.modeling.masks import additive, attention_windows


class TreeMasks:
    """The masks of one tree for one model, up to a capacity.

    Args:
        model: the backbone, for its layer types and windows.
        buffers: the tree.
        capacity: the largest committed length plus N.
        dtype: of the additive mask; the model's.
    """

    def __init__(self, model: nn.Module, buffers: TreeBuffers, capacity: int, dtype: torch.dtype) -> None:
        self.capacity, self.num_rows = capacity, buffers.num_rows
        device = buffers.depth_N.device
        windows = attention_windows(model)
        # Column c of the buffer stands for the slot at distance c - capacity from the committed length.
        self._wide = {
            kind: additive(wide_tree_mask(buffers, capacity, window), dtype) for kind, window in windows.items()
        }
        self._columns = torch.arange(capacity, device=device)

    def view(self, length: int, width: int | None = None) -> Any:
        """The mask [1, 1, N, length+N] of a common committed length, cut out of the wide buffer.

        Args:
            width: slots of the mask instead of length + N; the ones after the tree are hidden.
        """
        start = self.capacity - length
        end = start + (length + self.num_rows if width is None else width)
        return self._pack({kind: _aligned(wide[None, None, :, start:end]) for kind, wide in self._wide.items()})

    def ragged(self, lengths_B: Tensor, end: int) -> Any:
        """The mask [B, 1, N, end] of batch rows with committed lengths of their own."""
        columns_BS = self.capacity - lengths_B[:, None] + self._columns[:end]
        return self._pack(
            {kind: _aligned(wide[:, columns_BS].transpose(0, 1)[:, None]) for kind, wide in self._wide.items()}
        )

    @staticmethod
    def _pack(masks: dict[str, Tensor]) -> Any:
        return next(iter(masks.values())) if len(masks) == 1 else masks


def _aligned(mask: Tensor) -> Tensor:
    """A copy whose rows begin at multiples of 8 numbers, 16 bytes or more, whatever their width."""
    width = mask.shape[-1]
    room = torch.empty(*mask.shape[:-1], -(-width // 8) * 8, dtype=mask.dtype, device=mask.device)[..., :width]
    return room.copy_(mask)


def wide_tree_mask(buffers: TreeBuffers, capacity: int, window: int | None) -> Tensor:
    """bool [N, 2 * capacity]: column c is the slot c - capacity past the committed length.

    Columns below `capacity` are the prefix (one position a slot), the next N are the tree's rows, the rest nobody sees.
    """
    rows, device = buffers.num_rows, buffers.depth_N.device
    allowed = torch.zeros(rows, 2 * capacity, dtype=torch.bool, device=device)
    allowed[:, :capacity] = True
    allowed[:, capacity : capacity + rows] = buffers.tree_mask_NN
    if window is not None:
        offset = torch.full((2 * capacity,), 0, dtype=torch.int64, device=device)
        offset[:capacity] = torch.arange(-capacity, 0, device=device)
        offset[capacity : capacity + rows] = buffers.depth_N
        allowed &= buffers.depth_N[:, None] - offset < window
    return allowed
