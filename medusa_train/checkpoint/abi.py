"""The on-disk layout of a checkpoint, versions 1 and 2: names, shapes, constants. docs/CHECKPOINT.md is its page.

Version 2 is version 1 with two more manifest fields (`sees`, `reads_layer`) and one more tensor (`hidden_rms`). Only
heads that see more than the hidden state are written as version 2; a program that knows version 1 alone refuses them by
name.

A checkpoint of version 1 stays readable for good. A change that an old reader would misread raises `ABI_VERSION`; the
readers of older versions stay in `load.py`. No torch here, so that inspection is cheap.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

ABI_VERSION = 2
PLAIN_VERSION = 1
MANIFEST_FILE = "medusa_manifest.json"
HEADS_FILE = "medusa_heads.safetensors"
CONFIG_FILE = "config.json"
TREE_FILE = "tree.json"
ADAPTER_FOLDER = "adapter"
BACKBONE_FOLDER = "backbone"
# Not "medusa": a server that takes that word would read this folder by its own layout, in silence.
MODEL_TYPE = "medusa-train-heads"

CONTRACTS = ("own", "shared", "reduced")
POLICIES = ("heads_only", "joint", "self_distill")
# safetensors dtype names that heads may have
HEAD_DTYPES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}

BLOCK_NAME = "blocks.{head}.{layer}.linear.{part}"
PROJECTION_NAME = "projections.{head}.{part}"
TOKEN_MAP_NAME = "token_map"
HIDDEN_RMS_NAME = "hidden_rms"
# Tensors whose dtype is fixed, whatever the heads' own is.
FIXED_DTYPES = {TOKEN_MAP_NAME: "I64", HIDDEN_RMS_NAME: "F32"}
_BLOCK = re.compile(r"blocks\.(0|[1-9]\d*)\.(0|[1-9]\d*)\.linear\.(weight|bias)")
_PROJECTION = re.compile(r"projections\.(0|[1-9]\d*)\.(weight|bias)")


def expected_tensors(
    *,
    contract: str,
    heads: int,
    layers: int,
    hidden_size: int,
    vocab_size: int,
    reduced_vocab_size: int | None,
    projection_bias: bool,
    sees: str = "hidden",
    reads_layer: int | None = None,
) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor that a checkpoint with these counts holds (token map int64, the rest one dtype).

    K = heads, R = layers, D = hidden_size, V = vocab_size (rows of the lm_head), V' = reduced_vocab_size:
    blocks [D, D] and [D]; projections [V, D] (own) or [V', D] (reduced), none (shared); token_map [V'] (reduced).
    With sees "parent" a head's first block reads the parent too: [D, 2D], or [D, 3D] with a middle layer; and there is
    hidden_rms [], fp32.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    rows = reduced_vocab_size if contract == "reduced" else vocab_size
    inputs = 1 + (sees == "parent") + (reads_layer is not None)
    for head in range(heads):
        for layer in range(layers):
            width = hidden_size * (inputs if layer == 0 else 1)
            shapes[BLOCK_NAME.format(head=head, layer=layer, part="weight")] = (hidden_size, width)
            shapes[BLOCK_NAME.format(head=head, layer=layer, part="bias")] = (hidden_size,)
        if contract != "shared":
            shapes[PROJECTION_NAME.format(head=head, part="weight")] = (rows, hidden_size)
            if projection_bias:
                shapes[PROJECTION_NAME.format(head=head, part="bias")] = (rows,)
    if contract == "reduced":
        shapes[TOKEN_MAP_NAME] = (rows,)
    if sees == "parent":
        shapes[HIDDEN_RMS_NAME] = ()
    return shapes


def counts_from_names(names: Iterable[str]) -> tuple[int, int]:
    """(K, R) that the tensor names speak of: 1 + the largest index; 0 where there is none."""
    heads = layers = 0
    for name in names:
        if block := _BLOCK.fullmatch(name):
            heads = max(heads, int(block[1]) + 1)
            layers = max(layers, int(block[2]) + 1)
        elif projection := _PROJECTION.fullmatch(name):
            heads = max(heads, int(projection[1]) + 1)
    return heads, layers


def offsets(heads: int) -> list[int]:
    """How far ahead each head predicts: head j guesses the token at t + j + 2 from the hidden state at t."""
    return [head + 2 for head in range(heads)]


def describe_sight(sees: str, reads_layer: int | None) -> str:
    """What heads read, in words."""
    if sees == "hidden":
        return "the last hidden state"
    middle = "" if reads_layer is None else f", the hidden state after layer {reads_layer}"
    return f"the last hidden state{middle} and the token before the one they guess"
