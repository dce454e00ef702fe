"""Rows side by side in one batch: best-fit packing, positions that restart, document ids for attention and shifts.

Shape letters: B batch, T positions.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from medusa_train.errors import UserError

if TYPE_CHECKING:
    from medusa_train.dataset.rows import TokenRow


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """``input_ids_BT`` int64, ``loss_mask_BT`` bool, ``document_ids_BT`` int64 (-1 on padding), ``position_ids_BT``
    int64."""

    input_ids_BT: torch.Tensor
    loss_mask_BT: torch.Tensor
    document_ids_BT: torch.Tensor
    position_ids_BT: torch.Tensor

    @property
    def padding_fraction(self) -> float:
        """Share of positions that hold no token."""
        return float((self.document_ids_BT < 0).float().mean())

    def to(self, device: torch.device | str) -> TokenBatch:
        """The same batch on another device."""
        return TokenBatch(
            *(
                tensor.to(device, non_blocking=True)
                for tensor in (self.input_ids_BT, self.loss_mask_BT, self.document_ids_BT, self.position_ids_BT)
            )
        )


def pack_rows(rows: Sequence[TokenRow], max_length: int) -> list[list[TokenRow]]:
    """Bins of rows, each at most `max_length` tokens long, by best fit decreasing; rows are never cut here.

    Raises:
        UserError: a row is longer than `max_length`.
    """
    return [[rows[index] for index in line] for line in best_fit([len(row) for row in rows], max_length)]


def best_fit(lengths: Sequence[int], max_length: int) -> list[list[int]]:
    """Bins of row indices, each at most `max_length` tokens long, by best fit decreasing.

    Rows are never cut here. Deterministic: equal lengths keep their order.

    Raises:
        UserError: a row is longer than `max_length`.
    """
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    if order and lengths[order[0]] > max_length:
        raise UserError(f"a row of {lengths[order[0]]} tokens does not fit", allowed=f"at most {max_length} tokens")
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free tokens, bin), sorted: the first that suffices is the best fit
    for index in order:
        at = bisect.bisect_left(room, (lengths[index], -1))
        if at == len(room):
            bins.append([index])
            free, number = max_length - lengths[index], len(bins) - 1
        else:
            free, number = room.pop(at)
            bins[number].append(index)
            free -= lengths[index]
        if free > 0:
            bisect.insort(room, (free, number))
    return bins


def collate(
    rows: Sequence[TokenRow],
    max_length: int | None = None,
    pad_to_multiple: int = 1,
    packing: bool = False,
    *,
    pad_token_id: int = 0,
) -> TokenBatch:
    """One batch of rows, packed into lines of `max_length` tokens or one row per line.

    Args:
        max_length: the longest line; rows must not be longer. By default the longest row.
        pad_to_multiple, pad_token_id: see `collate_bins`.
    """
    limit = max((len(row) for row in rows), default=0) if max_length is None else max_length
    if not packing and any(len(row) > limit for row in rows):
        raise UserError(f"a row of {max(map(len, rows))} tokens does not fit", allowed=f"at most {limit} tokens")
    bins = pack_rows(rows, limit) if packing else [[row] for row in rows]
    return collate_bins(bins, pad_to_multiple, pad_token_id=pad_token_id)


def collate_bins(bins: Sequence[Sequence[TokenRow]], pad_to_multiple: int = 1, *, pad_token_id: int = 0) -> TokenBatch:
    """One batch, a line for each bin; rows of a bin stand side by side as documents 0, 1, ... with positions from 0.

    Args:
        pad_to_multiple: the line length is rounded up to a multiple of this.
        pad_token_id: fills padding; any id does, since attention and losses go by `document_ids_BT`.
    """
    if not bins:
        raise ValueError("an empty batch")
    longest = max(sum(len(row) for row in line) for line in bins)
    width = -(-longest // pad_to_multiple) * pad_to_multiple
    shape = (len(bins), width)
    ids = torch.full(shape, pad_token_id, dtype=torch.long)
    mask = torch.zeros(shape, dtype=torch.bool)
    documents = torch.full(shape, -1, dtype=torch.long)
    positions = torch.zeros(shape, dtype=torch.long)
    for number, line in enumerate(bins):
        at = 0
        for document, row in enumerate(line):
            end = at + len(row)
            ids[number, at:end] = torch.from_numpy(row.input_ids.astype("int64"))
            mask[number, at:end] = torch.from_numpy(row.loss_mask.astype(bool))
            documents[number, at:end] = document
            positions[number, at:end] = torch.arange(len(row))
            at = end
    return TokenBatch(ids, mask, documents, positions)


def packing_report(lengths: Sequence[int], max_length: int) -> dict[str, float]:
    """Padding waste of packed lines against one row per line (both padded to `max_length`)."""
    bins = best_fit(lengths, max_length)
    tokens = sum(lengths)
    return {
        "rows": len(lengths),
        "lines": len(bins),
        "padding_packed": 1 - tokens / (len(bins) * max_length) if bins else 0.0,
        "padding_unpacked": 1 - tokens / (len(lengths) * max_length) if lengths else 0.0,
    }
