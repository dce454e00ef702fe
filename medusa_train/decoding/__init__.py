"""Trees, the decoder that verifies them, and the search for the best one.

Names are imported on first use, so that importing the package brings no torch. Functions that share their module's name
(`decode.decode`, `search.search`, ...) are imported from there.
"""

from __future__ import annotations

import importlib

_HOMES = {
    "Calibration": "ranks",
    "DecodeSettings": "settings",
    "Decoded": "settings",
    "DraftTree": "tree",
    "PROMISES": "settings",
    "RoundTrace": "settings",
    "TreeDecoder": "decode",
    "build_buffers": "tree",
    "draw_tree": "tree_text",
    "first_divergence": "compare",
    "measure_overhead": "overhead",
    "medusa_generate": "generation",
    "parse_tree": "tree_text",
}

__all__ = list(_HOMES)


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
