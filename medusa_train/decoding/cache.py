"""One preallocated key/value cache for a whole request, with in-place compaction of the accepted rows.

Layers write into their place of a common slab and hand the model narrow views, so that a round allocates nothing and
the winning rows of all layers move in two operations. Sliding-window layers keep all rows too (a rejected guess must
be undone exactly); their window is in the mask.

Shape letters: B batch, H key/value heads, C capacity in slots, S layers x 2 tensors of a slab, A rows to move.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from medusa_train.errors import UserError


class _Cursor:
    """Where the next forward writes: one common start, or slots of its own for each batch row."""

    def __init__(self) -> None:
        self.start = 0
        self.end = 0
        self.slots_BN: Tensor | None = None
        self.batch_B1: Tensor | None = None
        self.fixed_slots_N: Tensor | None = None


class _SlabLayer(CacheLayerMixin):
    """One decoder layer's keys and values: [B, H, C, head_dim] views of a slab."""

    is_sliding = False

    def __init__(self, cursor: _Cursor) -> None:
        super().__init__()
        self._cursor = cursor
        self.first_chunk: tuple[Tensor, Tensor] | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Keeps the first chunk until every layer has shown its shape; the cache then builds its slabs."""
        self.first_chunk = (key_states, value_states)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Stages the rows of this forward; returns everything up to their end."""
        if self.keys is None:
            self.lazy_initialization(key_states, value_states)
            return key_states, value_states
        cursor = self._cursor
        if cursor.fixed_slots_N is not None:
            # Shapes and addresses that never change: what a CUDA graph records.
            self.keys.index_copy_(2, cursor.fixed_slots_N, key_states)
            self.values.index_copy_(2, cursor.fixed_slots_N, value_states)
        elif cursor.slots_BN is None:
            self.keys[:, :, cursor.start : cursor.end] = key_states
            self.values[:, :, cursor.start : cursor.end] = value_states
        else:
            self.keys[cursor.batch_B1, :, cursor.slots_BN] = key_states.transpose(1, 2)
            self.values[cursor.batch_B1, :, cursor.slots_BN] = value_states.transpose(1, 2)
        return self.keys[:, :, : cursor.end], self.values[:, :, : cursor.end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(slots seen, offset): all slots, from 0."""
        return self._cursor.start + query_length, 0

    def get_seq_length(self) -> int:
        """Committed slots before this forward."""
        return self._cursor.start

    def get_max_length(self) -> int:
        """-1: no limit that a mask would have to know."""
        return -1


class PreallocatedCache(Cache):
    """A cache of fixed capacity for `batch` rows of ragged length.

    Life of a round: `stage` says where the rows go, the model's forward writes them, `commit` moves the accepted ones
    behind the committed prefix. Lengths are kept by the caller.
    """

    def __init__(self, num_layers: int, batch: int, capacity: int) -> None:
        self._cursor = _Cursor()
        super().__init__(layers=[_SlabLayer(self._cursor) for _ in range(num_layers)])
        self.batch, self.capacity = batch, capacity
        self.slabs: list[Tensor] = []

    def stage(self, start: int, count: int) -> None:
        """The next forward writes `count` rows at slots start.. of every batch row."""
        self._check_fits(start + count)
        cursor = self._cursor
        cursor.start, cursor.end, cursor.slots_BN, cursor.fixed_slots_N = start, start + count, None, None

    def stage_ragged(self, slots_BN: Tensor, end: int) -> None:
        """The next forward writes row n of batch row b at slots_BN[b, n]; `end` is one past the largest slot."""
        self._check_fits(end)
        cursor = self._cursor
        cursor.start, cursor.end, cursor.slots_BN = end - slots_BN.shape[1], end, slots_BN
        cursor.fixed_slots_N = None
        if cursor.batch_B1 is None or cursor.batch_B1.shape[0] != slots_BN.shape[0]:
            cursor.batch_B1 = torch.arange(slots_BN.shape[0], device=slots_BN.device)[:, None]

    def stage_fixed(self, slots_N: Tensor, end: int) -> None:
        """The next forward writes row n at slot slots_N[n], a tensor that may be changed in place between forwards.

        Every layer returns its slots up to `end`, whatever the length: the mask hides what is not there yet.
        """
        self._check_fits(end)
        cursor = self._cursor
        cursor.start, cursor.end, cursor.slots_BN = end - slots_N.shape[0], end, None
        cursor.fixed_slots_N = slots_N

    def _check_fits(self, end: int) -> None:
        if end > self.capacity:
            raise UserError(f"cache of {self.capacity} slots, {end} needed")

    def build_slabs(self) -> None:
        """After the first chunk: one slab for all layers of one shape, the chunk moved in. Later calls do nothing."""
        groups: dict[tuple, list[tuple[_SlabLayer, str, Tensor]]] = {}
        for layer in self.layers:
            if layer.first_chunk is None:
                continue
            for name, chunk in zip(("keys", "values"), layer.first_chunk, strict=True):
                key = (chunk.shape[1], chunk.shape[3], chunk.dtype, chunk.device)
                groups.setdefault(key, []).append((layer, name, chunk))
            layer.first_chunk = None
        for (heads, size, dtype, device), members in groups.items():
            # Zeros, not empty: a masked slot still meets the softmax's 0, and 0 * nan is nan.
            slab = torch.zeros(len(members), self.batch, heads, self.capacity, size, dtype=dtype, device=device)
            self.slabs.append(slab)
            for view, (layer, name, chunk) in zip(slab, members, strict=True):
                view[:, :, : chunk.shape[2]] = chunk
                setattr(layer, name, view)
                layer.is_initialized = True

    def commit(self, start: int, rows: list[int]) -> None:
        """Moves the staged rows `rows` (ascending, the root's row 0 left out) to slots start+1, start+2, ...

        The root is already in its place. Rows that are in place already are not touched.
        """
        count = len(rows)
        if rows == list(range(1, count + 1)):
            return
        for slab in self.slabs:
            source = torch.tensor(rows, device=slab.device) + start
            # index_select makes the snapshot, so a row may move onto another's old place.
            slab[:, :, :, start + 1 : start + 1 + count] = slab.index_select(3, source)

    def commit_ragged(self, sources_BA: Tensor, targets_BA: Tensor) -> None:
        """Moves slot sources_BA[b, a] to targets_BA[b, a] in all layers; equal slots stay (padding of short rows)."""
        if sources_BA.numel() == 0:
            return
        for slab in self.slabs:
            batch = torch.arange(self.batch, device=slab.device)[:, None]
            source, target = sources_BA.to(slab.device), targets_BA.to(slab.device)
            slab[:, batch, :, target] = slab[:, batch, :, source]

    @property
    def num_bytes(self) -> int:
        """Bytes of all slabs."""
        return sum(slab.numel() * slab.element_size() for slab in self.slabs)
