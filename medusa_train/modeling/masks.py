"""Additive attention masks from allowed pairs, per layer type, windows measured by position.

Additive in the model's dtype, because eager attention adds a boolean mask in silence.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from medusa_train.errors import UserError
from medusa_train.modeling.backbone import plain_model

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"


def attention_windows(model: nn.Module) -> dict[str, int | None]:
    """Layer type -> window in positions (None: all earlier positions), one entry for each type the model has."""
    config = plain_model(model).config.get_text_config(decoder=True)
    types = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    chunk = getattr(config, "attention_chunk_size", None)
    if types is None:
        types = [SLIDING if window is not None else CHUNKED if chunk is not None else FULL]
    windows: dict[str, int | None] = {}
    for kind in dict.fromkeys(types):
        if kind == FULL:
            windows[kind] = None
        elif kind == SLIDING and window is not None:
            windows[kind] = int(window)
        else:
            raise UserError(
                f"{type(plain_model(model)).__name__} has layers of type {kind!r}",
                allowed=f"{FULL}, {SLIDING}",
                fix="such layers keep no exact per-position cache that a tree could be verified on",
            )
    return windows


def additive(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where allowed, the dtype's lowest finite value elsewhere (same shape)."""
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, torch.finfo(dtype).min)


def per_layer_type(
    windows: dict[str, int | None], allowed: Tensor, distance: Tensor, dtype: torch.dtype
) -> Tensor | dict[str, Tensor]:
    """What the model's forward takes as `attention_mask`.

    Args:
        windows: from `attention_windows`.
        allowed: bool [B, 1, Q, S], causal or tree-shaped, windows not applied.
        distance: int [B, 1, Q, S], query position minus key position.

    Returns:
        One additive tensor where all layers are of one type, else a dict by layer type.
    """
    masks = {
        kind: additive(allowed if window is None else allowed & (distance < window), dtype)
        for kind, window in windows.items()
    }
    return next(iter(masks.values())) if len(masks) == 1 else masks


def packed_attention_mask(
    model: nn.Module, document_ids_BT: Tensor, position_ids_BT: Tensor, dtype: torch.dtype
) -> Tensor | dict[str, Tensor]:
    """Causal attention that stays inside each packed document; padding (document -1) sees only itself.

    Args:
        document_ids_BT: which conversation a position belongs to, -1 on padding.
        position_ids_BT: position inside its document, from 0.
    """
    rows = torch.arange(document_ids_BT.shape[1], device=document_ids_BT.device)
    causal = rows[:, None] >= rows[None, :]
    same = document_ids_BT[:, :, None] == document_ids_BT[:, None, :]
    real = (document_ids_BT >= 0)[:, :, None]
    itself = rows[:, None] == rows[None, :]
    allowed = (same & causal & (real | itself))[:, None]
    distance = (position_ids_BT[:, :, None] - position_ids_BT[:, None, :])[:, None]
    return per_layer_type(attention_windows(model), allowed, distance, dtype)
