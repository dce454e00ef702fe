"""Checkpoints that cannot be loaded wrongly: saving, loading, other programs' layouts. docs/CHECKPOINT.md is the page.

Names are imported where they are used, so that looking at a manifest costs no torch.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "BackboneId": "identity",
    "CheckpointError": "problems",
    "HeadsManifest": "manifest",
    "LoadedCheckpoint": "load",
    "Problem": "problems",
    "find_checkpoint": "load",
    "load_checkpoint": "load",
    "load_with_base": "load",
    "merge_adapter": "changed",
    "read_tree_file": "rank_paths",
    "save_checkpoint": "save",
    "store_tree": "save",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
