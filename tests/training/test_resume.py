"""Runs that were cut off: what goes on, with what memory of its checks, and what another recipe may take over."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from medusa_train.checkpoint.load import load_checkpoint
from medusa_train.errors import UserError
from medusa_train.training import fit as fit_module
from medusa_train.training.fit import fit
from medusa_train.training.state import RunFolder
from medusa_train.training.trainer import MedusaTrainer
from tests.training.support import entries_of, losses_of, recipe_of, write_world


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return write_world(tmp_path_factory.mktemp("world"))


class Stop(TrainerCallback):
    """Dies when a step is logged, before it is checked or saved."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        if state.global_step >= self.step and "loss" in (logs or {}):
            raise KeyboardInterrupt


class Trainers:
    """Keeps the trainers that `fit` builds; the next one dies at `stop`, where that is set."""

    def __init__(self, build: Callable[..., MedusaTrainer]) -> None:
        self.build, self.newest, self.stop = build, None, None

    def __call__(self, *args, **kwargs) -> MedusaTrainer:
        self.newest = self.build(*args, **kwargs)
        if self.stop is not None:
            self.newest.add_callback(Stop(self.stop))
        return self.newest


@pytest.fixture
def trainers(monkeypatch: pytest.MonkeyPatch) -> Trainers:
    found = Trainers(fit_module.build_trainer)
    monkeypatch.setattr(fit_module, "build_trainer", found)
    return found


def cut_off(trainers: Trainers, step: int, recipe, **more) -> None:
    trainers.stop = step
    with pytest.raises(KeyboardInterrupt):
        fit(recipe, **more)
    trainers.stop = None


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_another_recipe_over_a_run_that_saved_nothing_keeps_nothing_of_it(
    world: dict, tmp_path: Path, trainers: Trainers
) -> None:
    """The first recipe leaves best tensors and a log; the second, which checks nothing, must store its own tensors."""
    checked = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 5}
    first = recipe_of(world, tmp_path / "out", training=checked)
    cut_off(trainers, 4, first)
    run = RunFolder.of(first)
    assert (run.best / "best.json").is_file() and run.last_whole() is None
    plain = {"max_steps": 3, "learning_rate": 3e-3}
    fit(recipe_of(world, tmp_path / "out", training=plain))
    fit(recipe_of(world, tmp_path / "alone", training=plain))
    assert not run.best.exists()
    steps = [entry["step"] for entry in entries_of(tmp_path / "out") if "loss" in entry]
    assert steps == [1, 2, 3] and losses_of(tmp_path / "out") == losses_of(tmp_path / "alone")
    left, right = (load_checkpoint(tmp_path / name).heads.state_dict() for name in ("out", "alone"))
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_another_recipe_over_an_interrupted_run_is_refused_and_nothing_is_lost(
    world: dict, tmp_path: Path, trainers: Trainers
) -> None:
    training = {"save_strategy": "steps", "save_steps": 2, "max_steps": 5}
    recipe = recipe_of(world, tmp_path / "out", training=training)
    cut_off(trainers, 3, recipe)
    run = RunFolder.of(recipe)
    assert run.last_whole().name == "checkpoint-2" and not run.finished.exists()
    before = files_of(run.path)
    heads = {"medusa_num_heads": 2}
    other = recipe_of(world, tmp_path / "out", training={**training, "learning_rate": 3e-3}, heads=heads)
    with pytest.raises(UserError, match="begun with another recipe") as error:
        fit(other)
    assert "heads.medusa_num_heads: 3 -> 2" in error.value.what
    assert "training.learning_rate: 0.01 -> 0.003" in error.value.what
    assert "--restart" in error.value.fix and error.value.where == str(run.path)
    assert files_of(run.path) == before
    fit(recipe)
    steps = [entry["step"] for entry in entries_of(tmp_path / "out") if "loss" in entry]
    assert steps == [1, 2, 3, 3, 4, 5]


# What held-out checks find after a step: the best is the fourth's, and the third without a better one ends the run.
FOUND = {2: 1.2, 4: 1.5, 6: 1.3, 8: 1.4, 10: 1.1, 12: 1.2, 14: 1.3}


def test_a_resumed_run_remembers_its_best_check_and_its_patience(
    world: dict, tmp_path: Path, trainers: Trainers
) -> None:
    """Cut off between the checks after steps 6 and 8, one short of the third without a better one."""
    training = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 1,
                "num_train_epochs": 9, "max_steps": 14}  # fmt: skip
    recipes = {
        name: recipe_of(world, tmp_path / name, training=training, evaluation={"early_stopping_patience": 3})
        for name in ("whole", "cut")
    }

    def replay(spans) -> dict[str, float]:
        return {"tokens_per_round": FOUND[trainers.newest.state.global_step]}

    fit(recipes["whole"], replay=replay)
    cut_off(trainers, 8, recipes["cut"], replay=replay)
    assert RunFolder.of(recipes["cut"]).last_whole().name == "checkpoint-7"
    fit(recipes["cut"], replay=replay)
    assert max(losses_of(tmp_path / "whole")) == 10
    assert losses_of(tmp_path / "cut") == losses_of(tmp_path / "whole")
    facts = [json.loads((RunFolder.of(recipe).best / "best.json").read_text()) for recipe in recipes.values()]
    assert facts[0] == facts[1] and (facts[0]["step"], facts[0]["value"]) == (4, 1.5)
    best = [load_file(RunFolder.of(recipe).best / "trainable.safetensors") for recipe in recipes.values()]
    stored = [load_checkpoint(tmp_path / name).heads.state_dict() for name in recipes]
    for name, tensor in stored[0].items():
        assert torch.equal(stored[1][name], tensor)
        assert torch.equal(best[0][f"heads.{name}"], tensor) and torch.equal(best[1][f"heads.{name}"], tensor)
