"""The forward of fixed shapes, run eagerly and compiled here; CUDA graphs where there is a GPU."""

from __future__ import annotations

import shutil

import pytest
import torch

from medusa_train.decoding.decode import TreeDecoder
from medusa_train.decoding.fixed import FixedForward, resolve_launch
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


class _OnDevice:
    """Stands in for torch.cuda's context managers and objects; notes which device is current at each call."""

    def __init__(self, notes: list, what: str, *args, **kwargs) -> None:
        self.notes, self.what, self.args = notes, what, args
        notes.append((what, *args[:1]) if what == "device" else (what, kwargs.get("capture_error_mode")))

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self.notes.append((f"left {self.what}",))

    def wait_stream(self, _) -> None:
        pass

    def replay(self) -> None:
        self.notes.append(("replay",))


def _recorded(monkeypatch: pytest.MonkeyPatch) -> tuple[FixedForward, list]:
    """A forward that believes it has CUDA graphs, on a model whose device is not the current one."""
    decoder = TreeDecoder(model_of("llama"), launch="fixed")
    decoder.decode([[3, 4]], DecodeSettings(max_new_tokens=2))
    notes: list = []
    for name in ("device", "graph", "CUDAGraph", "Stream", "stream", "current_stream"):
        monkeypatch.setattr(
            torch.cuda, name, lambda *args, _name=name, **kwargs: _OnDevice(notes, _name, *args, **kwargs)
        )
    forward = FixedForward(decoder, decoder._cache, decoder._masks, 256, "graph", may_fall_back=True)
    decoder._cache.stage_fixed(torch.tensor([2]), 256)
    return forward, notes


def test_a_graph_is_recorded_and_replayed_on_the_model_s_device(monkeypatch: pytest.MonkeyPatch) -> None:
    forward, notes = _recorded(monkeypatch)
    with torch.inference_mode():
        for _ in range(2):
            forward(torch.tensor([[5]]), 2)
    order = [note[0] for note in notes]
    here = torch.device("cpu")
    assert [note[1] for note in notes if note[0] == "device"] == [here] * 3  # recorded once, replayed twice
    assert order.index("device") < order.index("graph") < order.index("left device")
    assert ("graph", "thread_local") in notes
    for at, name in enumerate(order):
        if name == "replay":
            assert order[at - 1] == "device" and order[at + 1] == "left device"


def test_no_memory_for_a_graph_is_no_reason_to_run_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    forward, _ = _recorded(monkeypatch)

    def full():
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: full())
    with torch.inference_mode(), pytest.raises(torch.OutOfMemoryError):
        forward(torch.tensor([[5]]), 2)
