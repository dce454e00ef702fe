"""The forward of fixed shapes, run eagerly and compiled here; CUDA graphs where there is a GPU."""

from __future__ import annotations

import shutil

import pytest
import torch

from medusa_train.decoding.decode import TreeDecoder
from medusa_train.decoding.fixed import resolve_launch
from medusa_train.decoding.settings import DecodeSettings
from medusa_train.decoding.tree import DraftTree
from medusa_train.errors import UserError
from tests.decoding.helpers import generated, model_of, random_heads, random_prompt, rounds_of
from tests.tiny import FAMILIES


def compare(family: str, launch: str, device: str = "cpu") -> None:
    model = model_of(family).to(device)
    heads = random_heads(model)
    for tree in (DraftTree(), DraftTree.product([4, 3, 2])):
        eager = TreeDecoder(model, heads, tree, launch="eager")
        other = TreeDecoder(model, heads, tree, launch=launch)
        # Past one bucket of 256 slots with the third prompt; shorter again with the fourth.
        for length, count in ((1, 12), (30, 20), (240, 40), (5, 8)):
            prompt = random_prompt(length, length)
            settings = DecodeSettings(max_new_tokens=count)
            one, two = eager.decode([prompt], settings)[0], other.decode([prompt], settings)[0]
            assert two.token_ids == one.token_ids
            assert rounds_of(two) == rounds_of(one)
            if device == "cpu":
                assert two.token_ids == generated(model, prompt, count)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_fixed_shapes_change_nothing(family: str) -> None:
    compare(family, "fixed")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler for torch.compile")
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_compiled_rounds_change_nothing(family: str) -> None:
    compare(family, "compile")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_cuda_graphs_change_nothing(family: str) -> None:
    compare(family, "graph", "cuda")


def test_ways_of_launching() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert resolve_launch("auto", cpu) == "eager"
    assert resolve_launch("auto", cuda) == "graph"
    with pytest.raises(UserError, match="launch on cpu 'graph'"):
        resolve_launch("graph", cpu)
    with pytest.raises(UserError, match="unknown launch 'grpah'"):
        resolve_launch("grpah", cpu)
