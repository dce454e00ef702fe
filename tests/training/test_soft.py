"""Soft targets: where each head finds its own, their loss by the plain formula, and a run on them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from medusa_train.config.load import parse_recipe
from medusa_train.errors import UserError
from medusa_train.training.fit import fit
from medusa_train.training.fused import FusedOptions, Projection, fused_cross_entropy
from medusa_train.training.losses import IGNORE
from medusa_train.training.projections import dense_logits
from medusa_train.training.soft import sources
from tests.training.support import losses_of, recipe_of, write_world


def test_sources_by_hand() -> None:
    """Row 0 has positions 4, 5, 6 cached, row 1 has 4 and 9: channel c of a position is found c further in its row."""
    rows, positions = torch.tensor([0, 0, 0, 1, 1]), torch.tensor([4, 5, 6, 4, 9])
    assert sources(rows, positions, 3).tolist() == [[0, 1, 2], [1, 2, -1], [2, -1, -1], [3, -1, -1], [4, -1, -1]]


def test_soft_loss_and_gradient_are_the_plain_ones() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(9, 5, generator=generator, requires_grad=True)
    w = torch.randn(30, 5, generator=generator, requires_grad=True)
    tokens = torch.stack([torch.randperm(30, generator=generator)[:4] for _ in range(9)])
    weights = torch.rand(9, 4, generator=generator).softmax(-1)
    labels = tokens[:, 0].clone()
    labels[2] = IGNORE
    one = Projection(((x, w),))
    target = torch.zeros(9, 30).scatter_add(1, tokens, weights) * (labels != IGNORE)[:, None]
    plain = -(target * dense_logits(one).log_softmax(-1)).sum()
    fused, ranked = fused_cross_entropy(one, labels, FusedOptions(4, 1, 0.7), (tokens, weights))
    assert fused.sum.item() == pytest.approx(plain.item(), rel=1e-5)
    assert ranked.count.item() == 8
    wanted, found = (torch.autograd.grad(0.7 * total, [x, w]) for total in (plain, fused.sum))
    for left, right in zip(wanted, found, strict=True):
        assert torch.allclose(left, right, rtol=1e-4, atol=1e-5)


def test_all_weight_on_the_own_token_is_the_hard_loss(tmp_path: Path) -> None:
    """A share near 0 trains as without soft targets; a share of 1 does not."""
    world = write_world(tmp_path)
    heads = {"medusa_num_heads": 3, "contract": "reduced", "reduced_vocab_size": 120}
    policy = {"kind": "heads_only", "cache": {"enabled": True, "shard_rows": 200}}
    training = {"per_device_train_batch_size": 10_000, "max_steps": 1}
    found = {}
    for name, loss in {
        "hard": {}, "none": {"soft_targets": 8, "soft_share": 1e-9}, "all": {"soft_targets": 8}
    }.items():  # fmt: skip
        fit(recipe_of(world, tmp_path / name, policy, heads=heads, loss=loss, training=training))
        found[name] = losses_of(tmp_path / name)[1]
    assert found["none"] == pytest.approx(found["hard"], rel=1e-5)
    assert abs(found["all"] - found["hard"]) > 1e-3


def test_soft_targets_need_the_cache() -> None:
    data = {"base": {"name": "x"}, "data": {"train": ["x"]}, "output_dir": "x", "loss": {"soft_targets": 8}}
    with pytest.raises(UserError, match="needs cached hidden states"):
        parse_recipe({**data, "policy": "heads_only"})
