"""Numbers about heads: how large, how far from where they started, which have learnt nothing."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from medusa_train.checkpoint import abi
from medusa_train.checkpoint.manifest import HeadsManifest
from medusa_train.checkpoint.problems import Problems
from medusa_train.checkpoint.tensorfile import read_header

_OUTPUT_NAMES = ("lm_head.weight", "embed_out.weight", "output.weight")
_EMBEDDING_NAMES = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")


@dataclass
class HeadStats:
    """One head.

    Attributes:
        block_weight_norms, block_bias_norms: Frobenius norms per layer; both 0 is a block that does nothing yet.
        projection_norm: of U_j; None for shared heads.
        projection_distance: ||U_j - lm_head|| / ||lm_head|| over the head's own rows; None where the base is not known.
        state: "trained", "untrained" (still the lm_head exactly), "dead" (says the same for every hidden state).
    """

    head: int
    predicts: str
    block_weight_norms: list[float]
    block_bias_norms: list[float]
    projection_norm: float | None = None
    projection_distance: float | None = None
    state: str = "trained"
    warnings: list[str] = field(default_factory=list)


def base_projection(folder: Path, manifest: HeadsManifest) -> Tensor | None:
    """The base's lm_head [V, D], mapped from its file (the embeddings where the two are tied), or None."""
    from safetensors import safe_open

    wanted = (manifest.vocab_size, manifest.hidden_size)
    places: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        header = read_header(path, Problems())
        for name, info in (header.tensors if header else {}).items():
            if info.shape == wanted and info.dtype in abi.HEAD_DTYPES:
                places[name] = path
    for endings in (_OUTPUT_NAMES, _EMBEDDING_NAMES if _is_tied(folder) else ()):
        for name, path in places.items():
            if name.endswith(endings):
                with safe_open(path, framework="pt", device="cpu") as handle:
                    return handle.get_tensor(name)
    return None


def _is_tied(folder: Path) -> bool:
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return False
    # Families whose default is to tie leave the key out; with no lm_head in the files it can be nothing else.
    return config.get("tie_word_embeddings", True) is not False


def head_stats(
    path: Path, manifest: HeadsManifest, lm_head: Tensor | None
) -> tuple[list[HeadStats], list[dict[str, Any]]]:
    """(statistics per head, one row per tensor) of a heads file that has passed its checks."""
    from safetensors.torch import load_file

    tensors = load_file(path, device="cpu")
    token_map = tensors.get(abi.TOKEN_MAP_NAME)
    if lm_head is not None and token_map is not None:
        lm_head = lm_head[token_map]
    rows = [
        {
            "name": name,
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "bytes": tensor.numel() * tensor.element_size(),
            "norm": float(tensor.float().norm()) if tensor.is_floating_point() else None,
        }
        for name, tensor in sorted(tensors.items())
    ]
    norms = {row["name"]: row["norm"] for row in rows}
    heads = [_one_head(head, manifest, tensors, norms, lm_head) for head in range(manifest.medusa_num_heads)]
    _name_copies(heads, manifest)
    return heads, rows


def _one_head(
    head: int, manifest: HeadsManifest, tensors: dict[str, Tensor], norms: dict[str, Any], lm_head: Tensor | None
) -> HeadStats:
    layers = range(manifest.medusa_num_layers)
    weights = [norms[abi.BLOCK_NAME.format(head=head, layer=layer, part="weight")] for layer in layers]
    biases = [norms[abi.BLOCK_NAME.format(head=head, layer=layer, part="bias")] for layer in layers]
    stats = HeadStats(head, f"t + {head + 2}", weights, biases)
    projection = tensors.get(abi.PROJECTION_NAME.format(head=head, part="weight"))
    if projection is not None:
        stats.projection_norm = norms[abi.PROJECTION_NAME.format(head=head, part="weight")]
        if lm_head is not None:
            base = lm_head.float()
            stats.projection_distance = float((projection.float() - base).norm() / base.norm())
    idle = [layer for layer in layers if weights[layer] == 0 and biases[layer] == 0]
    at_start = projection is None or _equals(projection, lm_head)
    if len(idle) == len(layers) and at_start:
        stats.state = "untrained"
        stats.warnings.append(
            f"head {head} is untrained: it still is the lm_head, and guesses the next token once more"
        )
    elif stats.projection_norm == 0:
        stats.state = "dead"
        stats.warnings.append(f"head {head} is dead: its projection is zero, so every token is equally likely")
    elif projection is not None and bool((projection == projection[:1]).all()):
        stats.state = "dead"
        stats.warnings.append(f"head {head} is dead: all rows of its projection are the same")
    elif idle:
        stats.warnings.append(f"head {head}: layers {idle} are still the identity (no training reached them)")
    return stats


def _equals(projection: Tensor, lm_head: Tensor | None) -> bool:
    """True where the projection is the lm_head, rounded to the heads' dtype; unknown counts as different."""
    return lm_head is not None and torch.equal(projection, lm_head.to(projection.dtype))


def _name_copies(heads: list[HeadStats], manifest: HeadsManifest) -> None:
    """Heads that are the same numbers under two names: an aliased list of blocks, saved as if distinct."""
    seen: dict[tuple, int] = {}
    for stats in heads:
        mine = tuple(
            digest
            for name, digest in sorted(manifest.tensors.items())
            if name.startswith((f"blocks.{stats.head}.", f"projections.{stats.head}."))
        )
        if stats.state == "trained" and mine in seen:
            stats.warnings.append(f"head {stats.head} is a copy of head {seen[mine]}: the same numbers")
        seen.setdefault(mine, stats.head)
