"""Conversations and token rows: reading, rendering with exact masks, packing, distillation.

Names are imported on first use, so that importing the package costs nothing and brings no torch.
"""

from __future__ import annotations

import importlib

_HOMES = {
    "Message": "conversations",
    "Conversation": "conversations",
    "ConversationStream": "conversations",
    "ReadCounts": "conversations",
    "read_conversations": "conversations",
    "read_prompts": "conversations",
    "RowOptions": "render",
    "Rendered": "render",
    "render_conversation": "render",
    "render_prompt": "render",
    "TokenRow": "rows",
    "RowSet": "rows",
    "load_rows": "rows",
    "row_options": "rows",
    "split_rows": "rows",
    "TokenBatch": "packing",
    "collate": "packing",
    "collate_bins": "packing",
    "pack_rows": "packing",
    "packing_report": "packing",
}

__all__ = list(_HOMES)


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
