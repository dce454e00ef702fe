"""Small heads and checkpoints for the tests of this folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from medusa_train.checkpoint import BackboneId, save_checkpoint
from medusa_train.modeling.heads import HeadsConfig, MedusaHeads

TREE = {"format": 1, "paths": [[0], [0, 0], [1]], "method": "joint"}
RECIPE = {"base": {"name": "toy/base"}, "heads": {"medusa_num_heads": 2}}


def random_heads(
    contract: str = "own",
    heads: int = 2,
    layers: int = 1,
    *,
    hidden: int = 4,
    vocab: int = 8,
    reduced: int = 5,
    bias: bool = False,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> MedusaHeads:
    """Heads with random numbers everywhere, so that nothing can be mistaken for anything else."""
    config = HeadsConfig(
        contract=contract,
        medusa_num_heads=heads,
        medusa_num_layers=layers,
        hidden_size=hidden,
        vocab_size=vocab,
        reduced_vocab_size=reduced if contract == "reduced" else None,
        projection_bias=bias and contract != "shared",
    )
    made = MedusaHeads(config, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
        if made.token_map is not None:
            made.token_map.copy_(torch.randperm(vocab, generator=generator)[:reduced])
    return made


def toy_backbone(**overrides: Any) -> BackboneId:
    """A backbone known by its marks alone."""
    marks = {"name": "toy/base", "fingerprint": "f" * 64, "template_hash": "a" * 64, "hidden_size": 4, "vocab_size": 8}
    return BackboneId(**(marks | overrides))


def save_toy(folder: Path, heads: MedusaHeads | None = None, **overrides: Any) -> Path:
    """A checkpoint of a few kilobytes."""
    arguments: dict[str, Any] = {
        "recipe": RECIPE,
        "policy": "heads_only",
        "data_manifest_hash": "d" * 64,
        "training": {"steps": 3},
        "tree": TREE,
    }
    base = overrides.pop("base", None)
    heads = random_heads() if heads is None else heads
    if base is None:
        base = toy_backbone(hidden_size=heads.config.hidden_size, vocab_size=heads.config.vocab_size)
    return save_checkpoint(folder, heads, base, **(arguments | overrides))


def states_equal(first: Any, second: Any) -> bool:
    """Bit-for-bit equality of two modules' states."""
    one, two = first.state_dict(), second.state_dict()
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
