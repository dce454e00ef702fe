"""Between two logs nothing waits for the device: a step runs on meta tensors, whose values nobody can read.

On the meta device `.item()`, `float()`, `bool()`, `.cpu()`, `nonzero` and boolean indexing raise, and everything else
gives shapes only. The code takes the way of an accelerator there, because the device is no CPU.
"""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from medusa_train.modeling.base import load_base
from medusa_train.training.arguments import training_arguments
from medusa_train.training.fit import build_trainer
from medusa_train.training.prepare import load_training_rows
from medusa_train.training.state import RunFolder
from medusa_train.training.trainer import MedusaTrainer
from tests.training.support import recipe_of, write_world


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return write_world(tmp_path_factory.mktemp("world"), "llama")


class Waiting(TorchDispatchMode):
    """Collects copies from the CPU to the device that wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        copies = func is torch.ops.aten._to_copy.default and args[0].device.type == "cpu"
        if copies and result.device.type == "meta" and not (kwargs or {}).get("non_blocking"):
            self.found.append(f"{tuple(result.shape)} {result.dtype}")
        return result


@pytest.fixture(autouse=True)
def meta_knows_no_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch has no autocast on the meta device and says so with an error; here it is simply off."""
    enabled, autocast = torch.is_autocast_enabled, torch.autocast
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind="cpu": kind != "meta" and enabled(kind))

    def off(kind: str, *args: Any, **kwargs: Any) -> Any:
        return contextlib.nullcontext() if kind == "meta" else autocast(kind, *args, **kwargs)

    monkeypatch.setattr(torch, "autocast", off)


def on_meta(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: on_meta(one) for name, one in value.items()}
    return value.to("meta") if isinstance(value, Tensor) else value


def trainer_of(world: dict[str, str], output: Path, policy: Any, **changes: Any) -> MedusaTrainer:
    recipe = recipe_of(world, output, policy, **changes)
    run = RunFolder.of(recipe)
    run.open(recipe, restart=True)
    base = load_base(world["base"], dtype="float32")
    return build_trainer(recipe, base, load_training_rows(recipe, base), run, None)


POLICIES = {
    "heads_only": "heads_only",
    "cached": {"kind": "heads_only", "cache": {"enabled": True, "shard_rows": 200}},
    "joint": {"kind": "joint", "adapter": "none"},
    "self_distill": {"kind": "self_distill", "lora": {"r": 2, "target_modules": ["q_proj", "lm_head"]}},
}


@pytest.mark.parametrize("contract", ["own", "shared"])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_a_step_reads_no_value_from_the_device(world: dict, tmp_path: Path, policy: Any, contract: str) -> None:
    """Two micro-batches: counts, forward, loss, accuracies, the sums for the log, backward."""
    heads = {"medusa_num_heads": 3, "contract": contract}
    trainer = trainer_of(world, tmp_path / "out", policy, heads=heads, loss={"chunk_rows": 64, "accuracy_stride": 4})
    trainer.state.max_steps = 10
    loaded = (batch for _ in range(2) for batch in trainer.get_train_dataloader())
    batches = [on_meta(next(loaded)) for _ in range(2)]
    model = trainer.model.to("meta")
    device = torch.device("meta")
    with Waiting() as waiting:
        counts = trainer._get_num_items_in_batch(batches, device)
        for batch in batches:
            trainer.compute_loss(model, batch, num_items_in_batch=counts).backward()
    assert waiting.found == []
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert trained and all(parameter.grad.device == device for parameter in trained)
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        trainer.watch.check_ranks(1)  # what a log does: it does read


def test_on_a_gpu_batches_are_pinned_and_copied_without_waiting(
    world: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default, where there is a GPU; what a recipe says goes first."""
    monkeypatch.setattr("transformers.TrainingArguments", partial(SimpleNamespace, n_gpu=1))
    for cuda, training, wanted in (
        (True, {}, (True, {"non_blocking": True})),
        (True, {"accelerator_config": {"non_blocking": False}}, (True, {"non_blocking": False})),
        (True, {"dataloader_pin_memory": False}, (False, {"non_blocking": False})),
        (True, {"use_cpu": True}, (True, {"non_blocking": False})),
        (False, {}, (False, {"non_blocking": False})),
    ):
        monkeypatch.setattr(torch.cuda, "is_available", lambda cuda=cuda: cuda)
        recipe = recipe_of(world, tmp_path / "out", training=training)
        found = training_arguments(recipe, RunFolder.of(recipe), has_heldout=True, base_dtype=torch.float32)
        assert (found.dataloader_pin_memory, found.accelerator_config) == wanted
