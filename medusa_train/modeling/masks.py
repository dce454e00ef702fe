"""What a model's forward takes so that attention sees the allowed pairs alone, in the terms of its implementation.

eager and sdpa take additive masks per layer type, windows measured by position; additive in the model's dtype, because
eager attention adds a boolean mask in silence. flex attention takes block masks, flash attention no mask at all but
where documents begin and end: both are made from the document ids right before the forward, on the model's device.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from medusa_train.errors import UserError
from medusa_train.modeling.backbone import plain_model

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
# The key under which document ids travel in place of a mask, for implementations that take none.
DOCUMENTS = "document_ids"


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


def attention_kind(model: nn.Module) -> str:
    """transformers' name of the attention implementation that `model` runs."""
    return plain_model(model).config._attn_implementation or "eager"


def packed_attention_mask(
    model: nn.Module, document_ids_BT: Tensor, position_ids_BT: Tensor, dtype: torch.dtype
) -> Tensor | dict[str, Tensor]:
    """Causal attention that stays inside each packed document; padding (document -1) sees only itself.

    Args:
        document_ids_BT: which conversation a position belongs to, -1 on padding.
        position_ids_BT: position inside its document, from 0.

    Returns:
        What `hidden_states` takes as `attention_mask`: one tensor, a dict by layer type, or, for flex and flash
        attention, the document ids themselves under `DOCUMENTS`. Always tensors, so that it moves between devices.
    """
    if attention_kind(model) == "flex_attention" or _is_flash(model):
        return {DOCUMENTS: document_ids_BT}
    rows = torch.arange(document_ids_BT.shape[1], device=document_ids_BT.device)
    causal = rows[:, None] >= rows[None, :]
    same = document_ids_BT[:, :, None] == document_ids_BT[:, None, :]
    real = (document_ids_BT >= 0)[:, :, None]
    itself = rows[:, None] == rows[None, :]
    allowed = (same & causal & (real | itself))[:, None]
    distance = (position_ids_BT[:, :, None] - position_ids_BT[:, None, :])[:, None]
    return per_layer_type(attention_windows(model), allowed, distance, dtype)


def _is_flash(model: nn.Module) -> bool:
    return "flash_attention" in attention_kind(model)


def document_arguments(model: nn.Module, document_ids_BT: Tensor, position_ids_BT: Tensor) -> dict[str, Any]:
    """Arguments of the decoder's forward that keep attention inside each document, for flex and flash attention.

    Raises:
        UserError: the model's forward does not hand flash attention's arguments on.
    """
    if not _is_flash(model):
        return {"attention_mask": block_masks(model, document_ids_BT, position_ids_BT)}
    parameters = inspect.signature(plain_model(model).get_decoder().forward).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        raise UserError(
            f"{type(plain_model(model)).__name__} does not tell flash attention where packed documents begin",
            fix="base.attn_implementation: sdpa, or data.packing: false",
        )
    starts, longest = document_starts(document_ids_BT)
    return {
        "attention_mask": None,
        "cu_seq_lens_q": starts,
        "cu_seq_lens_k": starts,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def document_starts(document_ids_BT: Tensor) -> tuple[Tensor, int]:
    """Where each document begins in the lines laid end to end, and the end: int32 [documents + 1]; the longest one.

    A stretch of padding counts as a document of its own: nothing looks into it, and nothing reads it.
    """
    begins_BT = torch.ones_like(document_ids_BT, dtype=torch.bool)
    begins_BT[:, 1:] = document_ids_BT[:, 1:] != document_ids_BT[:, :-1]
    starts = torch.nonzero(begins_BT.flatten()).flatten()
    starts = torch.cat([starts, starts.new_tensor([document_ids_BT.numel()])]).to(torch.int32)
    return starts, int(starts.diff().max())


def block_masks(model: nn.Module, document_ids_BT: Tensor, position_ids_BT: Tensor) -> Any:
    """flex attention's form of `packed_attention_mask`: one BlockMask, or a dict by layer type."""
    from torch.nn.attention.flex_attention import create_block_mask

    lines, length = document_ids_BT.shape
    masks = {}
    for kind, window in attention_windows(model).items():

        def allowed(line: Tensor, head: Tensor, query: Tensor, key: Tensor, window: int | None = window) -> Tensor:
            inside = (query >= key) & (document_ids_BT[line, query] == document_ids_BT[line, key])
            inside = inside & ((document_ids_BT[line, query] >= 0) | (query == key))
            if window is not None:
                inside = inside & (position_ids_BT[line, query] - position_ids_BT[line, key] < window)
            return inside

        masks[kind] = create_block_mask(
            allowed, B=lines, H=None, Q_LEN=length, KV_LEN=length, device=document_ids_BT.device
        )
    return next(iter(masks.values())) if len(masks) == 1 else masks
