"""A tiny base, a small data set and recipes over them, for tests that train for real."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from medusa_train.config.load import parse_recipe
from medusa_train.config.recipe import Recipe
from medusa_train.modeling.base import load_base
from medusa_train.training.fit import build_trainer
from medusa_train.training.prepare import load_training_rows
from medusa_train.training.state import RunFolder
from medusa_train.training.trainer import MedusaTrainer
from tests.tiny import save_tiny_base

WORDS = [
    "apples",
    "pears",
    "plums",
    "the quick brown fox",
    "jumps over",
    "the lazy dog",
    "print(add(1, 2))",
    "sky",
    "blue",
]


def write_data(path: Path, conversations: int = 40) -> Path:
    """Conversations whose answers count through the words, so that there is something to learn."""
    with open(path, "w") as handle:
        for number in range(conversations):
            answer = " ".join(WORDS[(number + step) % len(WORDS)] for step in range(4 + number % 5))
            messages = [
                {"role": "user", "content": f"Go on from {WORDS[number % len(WORDS)]} {number}"},
                {"role": "assistant", "content": answer},
            ]
            handle.write(json.dumps({"id": f"row{number}", "messages": messages}) + "\n")
    return path


def write_world(folder: Path, family: str = "llama-tied", **overrides: Any) -> dict[str, str]:
    """A base and data below `folder`; names of both."""
    save_tiny_base(folder / "base", family, **overrides)
    write_data(folder / "data.jsonl")
    return {"base": str(folder / "base"), "data": str(folder / "data.jsonl")}


def recipe_of(world: dict[str, str], output: Path, policy: Any = "heads_only", **changes: Any) -> Recipe:
    """A recipe over a `write_world`; `changes` replace or extend sections, `training` on top of quick defaults."""
    training = {
        "num_train_epochs": 2,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "eval_strategy": "no",
        "save_strategy": "no",
        **changes.pop("training", {}),
    }
    data = {
        "base": {"name": world["base"], "dtype": "float32"},
        "data": {"train": [world["data"]], "max_length": 96, "heldout_fraction": 0.2},
        "heads": {"medusa_num_heads": 3},
        "policy": policy,
        "training": training,
        "output_dir": str(output),
        **changes,
    }
    return parse_recipe(data)


def trainer_of(world: dict[str, str], output: Path, policy: Any = "heads_only", **changes: Any) -> MedusaTrainer:
    """Everything up to the first step of such a recipe, begun anew, on the CPU."""
    training = {"use_cpu": True, **changes.pop("training", {})}
    recipe = recipe_of(world, output, policy, training=training, **changes)
    run = RunFolder.of(recipe)
    run.open(recipe, restart=True)
    base = load_base(world["base"], dtype="float32")
    return build_trainer(recipe, base, load_training_rows(recipe, base), run, None)


def entries_of(output: Path) -> list[dict[str, Any]]:
    """The run's log, line by line."""
    text = (output.with_name(output.name + ".run") / "log.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def losses_of(output: Path) -> dict[int, float]:
    """step -> training loss, from the run's log (the last entry of a step counts)."""
    return {entry["step"]: entry["loss"] for entry in entries_of(output) if "loss" in entry}


class Poison(TrainerCallback):
    """NaN in head 1's projection when a step begins."""

    def __init__(self, trainer: MedusaTrainer, step: int) -> None:
        self.trainer, self.step = trainer, step

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        if state.global_step == self.step - 1:
            self.trainer.model.heads.projections[1].weight.data[3, 0] = float("nan")
