"""Checkpoints written by layout version 1 stay readable for good. The files in `fixtures` are never written again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from medusa_train.checkpoint import abi, load_checkpoint
from medusa_train.modeling.heads import HeadsConfig, MedusaHeads
from tests.checkpoint.make_fixture import TOKEN_MAP, ruled
from tests.checkpoint.support import TREE, states_equal, toy_backbone

FIXTURES = Path(__file__).with_name("fixtures") / "abi_v1"


@pytest.mark.parametrize(
    ("name", "config", "dtype"),
    [
        ("own", HeadsConfig("own", 2, 2, 4, 8, projection_bias=True), torch.bfloat16),
        ("reduced", HeadsConfig("reduced", 3, 1, 4, 8, reduced_vocab_size=5), torch.float32),
        ("shared_adapter", HeadsConfig("shared", 2, 1, 4, 8), torch.float16),
    ],
)
def test_version_1_is_read(name: str, config: HeadsConfig, dtype: torch.dtype) -> None:
    loaded = load_checkpoint(FIXTURES / name, toy_backbone(), verify="hashes")
    assert loaded.heads.config == config and loaded.manifest.abi_version == 1
    assert states_equal(loaded.heads, ruled(MedusaHeads(config, dtype=dtype)))
    assert {p.dtype for p in loaded.heads.parameters()} == {dtype}


def test_what_else_version_1_holds() -> None:
    own = load_checkpoint(FIXTURES / "own")
    assert own.tree == TREE and own.manifest.training == {"steps": 3, "loss": 1.25}
    assert own.manifest.policy == "heads_only" and own.adapter_folder is None
    reduced = load_checkpoint(FIXTURES / "reduced")
    assert reduced.tree is None and reduced.heads.token_map.tolist() == TOKEN_MAP
    adapted = load_checkpoint(FIXTURES / "shared_adapter")
    assert (
        adapted.adapter_folder == FIXTURES / "shared_adapter" / "adapter" and adapted.manifest.policy == "self_distill"
    )


def test_first_numbers_by_hand() -> None:
    """blocks.0.0.linear.bias is tensor 0: ((0, 3, 6, 9) - 15) / 8; blocks.0.0.linear.weight is tensor 1, from 7 on."""
    heads = load_checkpoint(FIXTURES / "own").heads
    assert heads.blocks[0][0].linear.bias.tolist() == [-1.875, -1.5, -1.125, -0.75]
    assert heads.blocks[0][0].linear.weight[0].tolist() == [-1.0, -0.625, -0.25, 0.125]


def test_the_raw_files_of_version_1() -> None:
    """Names and keys as bytes on disk, seen without our reader."""
    manifest = json.loads((FIXTURES / "own" / "medusa_manifest.json").read_text())
    assert manifest["abi_version"] == abi.PLAIN_VERSION == 1 and manifest["offsets"] == [2, 3]
    raw = (FIXTURES / "own" / "medusa_heads.safetensors").read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    expected = {f"blocks.{i}.{j}.linear.{part}" for i in (0, 1) for j in (0, 1) for part in ("weight", "bias")}
    expected |= {f"projections.{i}.{part}" for i in (0, 1) for part in ("weight", "bias")}
    assert set(header) - {"__metadata__"} == expected
