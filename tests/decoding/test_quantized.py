"""Decoding on backbones quantized by bitsandbytes (its CPU kernels are enough)."""

from __future__ import annotations

import importlib.util

import pytest

from medusa_train.decoding.decode import decode
from medusa_train.decoding.tree import DraftTree
from medusa_train.modeling.base import load_base
from tests.decoding.helpers import random_heads, random_prompt
from tests.tiny import save_tiny_base

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)


@pytest.mark.parametrize("quantization", ["4bit", "8bit"])
def test_a_tree_changes_no_token(tmp_path, quantization: str) -> None:
    """Plain and tree decoding of the same quantized weights agree; the heads stay in floating point.

    Weights are small here: 8-bit products treat columns with an outlier in ANY row apart, so with large activations a
    row's result depends a little on its neighbours, in plain batches as in trees.
    """
    folder = save_tiny_base(
        tmp_path / "base", hidden_size=64, intermediate_size=128, vocab_size=64, initializer_range=0.1
    )
    model = load_base(str(folder), dtype="float32", device="cpu", quantization=quantization).model
    heads = random_heads(model, 3, "own").float()
    for seed in range(3):
        prompt = random_prompt(6 + 20 * seed, seed)
        plain = decode(model, None, prompt, max_new_tokens=16, stop_token_ids=[])
        tree = decode(model, heads, prompt, DraftTree.product([4, 3, 2]), max_new_tokens=16, stop_token_ids=[])
        assert tree.token_ids == plain.token_ids
