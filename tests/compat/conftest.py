"""A tiny base and checkpoints on it, for the tests of other programs' layouts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from medusa_train.checkpoint import save_checkpoint
from medusa_train.modeling.backbone import output_projection
from medusa_train.modeling.base import Base, load_base
from medusa_train.modeling.heads import HeadsConfig, MedusaHeads, new_heads
from tests.tiny import save_tiny_base

TREE = {"format": 1, "paths": [[1], [0], [0, 2], [0, 0]], "method": "joint"}


@pytest.fixture(scope="session")
def session_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def own_cache(session_cache: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if request.module.__name__.endswith("test_vllm"):
        return  # a real base: converting it again for each run would cost more than the test
    monkeypatch.setenv("MEDUSA_TRAIN_CACHE", str(session_cache))


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    return load_base(str(save_tiny_base(tmp_path_factory.mktemp("bases") / "base")))


@pytest.fixture(scope="session")
def hidden(base: Base) -> torch.Tensor:
    return torch.randn(7, base.model.config.hidden_size, generator=torch.Generator().manual_seed(5))


def trained_heads(
    base: Base, contract: str, heads: int, layers: int, dtype: torch.dtype = torch.float32
) -> MedusaHeads:
    """Heads with random numbers everywhere, biases included; every tensor different."""
    projection = output_projection(base.model)
    sizes = projection.hidden_size, projection.vocab_size
    reduced = {"reduced_vocab_size": 20} if contract == "reduced" else {}
    token_map = torch.arange(0, 40, 2) if contract == "reduced" else None
    made = new_heads(HeadsConfig(contract, heads, layers, *sizes, **reduced), projection, token_map, dtype=dtype)
    generator = torch.Generator().manual_seed(heads * 10 + layers)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator).to(dtype))
    return made


@pytest.fixture
def checkpoint(tmp_path: Path, base: Base) -> Callable[..., tuple[Path, MedusaHeads]]:
    def make(contract: str = "own", heads: int = 3, layers: int = 1, **more: Any) -> tuple[Path, MedusaHeads]:
        made = trained_heads(base, contract, heads, layers, more.pop("dtype", torch.float32))
        arguments = {
            "recipe": {"seed": 1},
            "policy": "heads_only",
            "data_manifest_hash": "d" * 64,
            "training": {},
            "tree": TREE,
        }
        return save_checkpoint(tmp_path / "checkpoint", made, base, **(arguments | more)), made

    return make


def our_logits(heads: MedusaHeads, base: Base, hidden: torch.Tensor) -> list[torch.Tensor]:
    """What the heads say, one [M, V] per head."""
    projection = output_projection(base.model)
    with torch.no_grad():
        return [heads.logits(hidden, head, projection) for head in range(heads.config.medusa_num_heads)]
