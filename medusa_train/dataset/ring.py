"""A key/value cache of fixed size for a batch whose rows begin and end at different steps.

Keys carry their rotary position already, so attention does not care in which slot a key lies. That allows a ring:
every step all rows write slot ``step % capacity``; a row that ends is replaced by another whose prompt is copied into
the slots just before the write position; a mask per row says which slots are its own. Nothing is ever moved, and the
memory is exactly rows x capacity as long as no row outgrows the capacity.

Shape letters: B rows, C capacity in slots, W slots attended (<= C), H key/value heads, d head size, S prompt slots.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers.cache_utils import Cache, DynamicLayer


class RingClock:
    """Where the next token of every row goes: shared by all layers, so that moving it is one assignment."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.step = 0
        self.width = 0

    @property
    def slot(self) -> int:
        return self.step % self.capacity

    def slots_before(self, count: int) -> list[int]:
        """The ``count`` slots that precede the write position, oldest first."""
        return [(self.step - count + offset) % self.capacity for offset in range(count)]

    def claim(self, count: int) -> None:
        """Makes the ``count`` slots before the write position visible to attention."""
        self.width = self.capacity if self.step < count else max(self.width, min(self.step, self.capacity))

    def advance(self) -> None:
        self.step += 1
        self.width = max(self.width, min(self.step, self.capacity))


class RingLayer(DynamicLayer):
    """One layer's keys and values ``[B, H, C, d]``, written one token per row and step."""

    is_croppable = False

    def __init__(self, clock: RingClock, keys_BHCd: torch.Tensor, values_BHCd: torch.Tensor):
        super().__init__()
        self.clock = clock
        self.keys, self.values = keys_BHCd, values_BHCd
        self.device = keys_BHCd.device
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        slot = self.clock.slot
        width = max(self.clock.width, slot + 1)
        self.keys[:, :, slot : slot + 1] = key_states
        self.values[:, :, slot : slot + 1] = value_states
        return self.keys[:, :, :width], self.values[:, :, :width]

    def get_seq_length(self) -> int:
        return self.clock.width

    def get_max_length(self) -> int:
        return self.clock.capacity


class Ring:
    """The cache of a decoding batch plus its per-row bookkeeping tensors.

    Attributes: ``tokens_B1`` the token each row feeds next, ``positions_B1`` its position, ``mask_BC`` additive
    (0 own slot, the dtype's minimum elsewhere), ``slot_positions_BC`` the position held by each slot.
    """

    def __init__(self, like: Cache, rows: int, capacity: int, mask_dtype: torch.dtype):
        first = like.layers[0]
        device = first.keys.device
        self.rows, self.capacity = rows, capacity
        self.clock = RingClock(capacity)
        self.blocked = torch.finfo(mask_dtype).min
        # Zeros, not empty: a masked slot has weight exactly 0, and 0 times an uninitialised NaN is NaN.
        self.cache = Cache(
            layers=[
                RingLayer(
                    self.clock,
                    layer.keys.new_zeros(rows, layer.keys.shape[1], capacity, layer.keys.shape[3]),
                    layer.values.new_zeros(rows, layer.values.shape[1], capacity, layer.values.shape[3]),
                )
                for layer in like.layers
            ]
        )
        self.mask_BC = torch.full((rows, capacity), self.blocked, dtype=mask_dtype, device=device)
        self.slot_positions_BC = torch.zeros((rows, capacity), dtype=torch.long, device=device)
        self.positions_B1 = torch.zeros((rows, 1), dtype=torch.long, device=device)
        self.tokens_B1 = torch.zeros((rows, 1), dtype=torch.long, device=device)

    def insert(
        self,
        rows: Sequence[int],
        prefilled: Cache,
        valid_GS: torch.Tensor,
        positions_GS: torch.Tensor,
        tokens_G: torch.Tensor,
    ) -> None:
        """Copies G prefilled prompts (right-aligned in S slots) into rows, ready to feed ``tokens_G`` next."""
        span = valid_GS.shape[1]
        if self.clock.step == 0:
            self.clock.step = span
        self.clock.claim(span)
        device = self.mask_BC.device
        row_index = torch.tensor(list(rows), device=device)
        slots = torch.tensor(self.clock.slots_before(span), device=device)
        for ring, source in zip(self.cache.layers, prefilled.layers, strict=True):
            ring.keys[row_index[:, None], :, slots[None, :]] = source.keys.transpose(1, 2)
            ring.values[row_index[:, None], :, slots[None, :]] = source.values.transpose(1, 2)
        mask = torch.full((len(row_index), self.capacity), self.blocked, dtype=self.mask_BC.dtype, device=device)
        mask[:, slots] = torch.zeros_like(valid_GS, dtype=mask.dtype).masked_fill_(~valid_GS, self.blocked)
        self.mask_BC[row_index] = mask
        self.slot_positions_BC[row_index[:, None], slots[None, :]] = positions_GS
        self.positions_B1[row_index] = positions_GS[:, -1:] + 1
        self.tokens_B1[row_index, 0] = tokens_G

    def open_slot(self) -> None:
        """Marks the slot about to be written as every row's own; rows that have ended compute on, unread."""
        slot = self.clock.slot
        self.mask_BC[:, slot] = 0.0
        self.slot_positions_BC[:, slot] = self.positions_B1[:, 0]

    def window(self) -> int:
        """Slots that this step's attention reads."""
        return max(self.clock.width, self.clock.slot + 1)

    def advance(self, tokens_B: torch.Tensor) -> None:
        """Moves on one step: ``tokens_B`` are fed next."""
        self.clock.advance()
        self.tokens_B1 = tokens_B[:, None]
        # Ended rows go on counting; the clamp keeps them inside learned position tables.
        self.positions_B1 = (self.positions_B1 + 1).clamp_(max=self.capacity - 1)

    def rebuilt(self, keep: Sequence[int], oldest_step: int, rows: int, capacity: int) -> tuple[Ring, int]:
        """A ring of another size that holds the kept rows first; also how far the step count moved back.

        ``oldest_step`` is the step at which the longest kept row's first slot was written.
        """
        span = self.clock.step - oldest_step
        device = self.mask_BC.device
        row_index = torch.tensor(list(keep), dtype=torch.long, device=device)
        slots = torch.tensor(self.clock.slots_before(span), dtype=torch.long, device=device)
        new = Ring.__new__(Ring)
        new.rows, new.capacity, new.blocked = rows, capacity, self.blocked
        new.clock = RingClock(capacity)
        new.clock.step = new.clock.width = span
        moved = self.clock.step - span
        layers = []
        for layer in self.cache.layers:
            pair = []
            for name in ("keys", "values"):
                old = getattr(layer, name)
                fresh = old.new_zeros(rows, old.shape[1], capacity, old.shape[3])
                if len(row_index):
                    fresh[: len(row_index), :, :span] = old[row_index[:, None], :, slots[None, :]].transpose(1, 2)
                pair.append(fresh)
                setattr(layer, name, None)  # one layer at a time is held twice, never the whole cache
            layers.append(RingLayer(new.clock, *pair))
        new.cache = Cache(layers=layers)

        def carry(old_tensor: torch.Tensor, fill: float, width: int | None) -> torch.Tensor:
            fresh = old_tensor.new_full((rows, width or 1), fill)
            part = old_tensor[row_index][:, slots] if width else old_tensor[row_index]
            fresh[: len(row_index), : part.shape[1]] = part
            return fresh

        new.mask_BC = carry(self.mask_BC, self.blocked, capacity)
        new.slot_positions_BC = carry(self.slot_positions_BC, 0, capacity)
        new.positions_B1 = carry(self.positions_B1, 0, None)
        new.tokens_B1 = carry(self.tokens_B1, 0, None)
        return new, moved
