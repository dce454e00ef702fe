"""Whole runs on other attention implementations: packed rows train to the same losses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from medusa_train.errors import UserError
from medusa_train.training.fit import fit
from tests.training.support import losses_of, recipe_of, write_world


def test_packed_rows_on_flex_attention_give_the_losses_of_sdpa(tmp_path: Path) -> None:
    """On a model with layers of two types, one of them windowed."""
    world = write_world(tmp_path, "qwen2")
    losses = {}
    for attention in ("sdpa", "flex_attention"):
        base = {"name": world["base"], "dtype": "float32", "attn_implementation": attention}
        data = {"train": [world["data"]], "max_length": 192, "packing": True, "heldout_fraction": 0.2}
        recipe = recipe_of(world, tmp_path / attention, base=base, data=data, training={"max_steps": 2})
        with torch.compiler.set_stance("force_eager"):
            fit(recipe)
        losses[attention] = losses_of(tmp_path / attention)
    assert len(losses["sdpa"]) == 2
    assert losses["flex_attention"] == pytest.approx(losses["sdpa"], rel=1e-5)


def test_flex_attention_cannot_train_a_backbone_on_a_cpu(tmp_path: Path) -> None:
    world = write_world(tmp_path)
    base = {"name": world["base"], "dtype": "float32", "attn_implementation": "flex_attention", "device": "cpu"}
    with pytest.raises(UserError, match="no backward on a CPU"):
        fit(recipe_of(world, tmp_path / "out", "joint", base=base))
