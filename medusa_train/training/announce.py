"""What is said and tried before the first step: groups, sizes, memory; a dry save and reload."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file

from medusa_train.console import human_bytes, human_count, say
from medusa_train.errors import UserError
from medusa_train.training.state import TENSORS, RunFolder, trainable_tensors, write_tensors

if TYPE_CHECKING:
    from medusa_train.training.trainer import MedusaTrainer


def announce(trainer: MedusaTrainer) -> None:
    """Prints the optimizer's groups with names, counts and rates, the trainable total and the expected memory."""
    if not trainer.args.should_save:
        return
    for group in trainer.groups:
        first, last = group.parameters[0][0], group.parameters[-1][0]
        say(
            f"trainable: {group.name}, {human_count(group.count)} numbers in {len(group.parameters)} tensors"
            f" ({first} .. {last}), learning rate {group.learning_rate:g}, weight decay {group.weight_decay:g}"
        )
    total = sum(group.count for group in trainer.groups)
    say(f"trainable in all: {total:,} numbers; expected memory {human_bytes(expected_memory(trainer))}")


def expected_memory(trainer: Any) -> int:
    """Bytes of one process at the height of a step, as `plan` counts them."""
    from medusa_train.training.plan import plan_recipe

    return plan_recipe(trainer.recipe, trainer.shape, processes=trainer.args.world_size).memory.total


def dry_save(trainer: MedusaTrainer, run: RunFolder) -> None:
    """Saves the trainable tensors and reads them back, so that a run does not learn at its end that it cannot.

    Raises:
        UserError: the disk is full or refuses, or what was read differs.
    """
    if not trainer.args.should_save or trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        return
    folder = run.path / ".dry"
    try:
        tensors = trainable_tensors(trainer.model)
        write_tensors(folder, tensors)
        again = load_file(folder / TENSORS)
        for name, tensor in tensors.items():
            if not torch.equal(tensor, again[name]):
                raise UserError(f"{name} reads back different from what was written", where=str(run.path))
    except OSError as error:
        raise UserError(
            f"a trial save failed: {error}",
            where=str(run.path),
            fix="free some space, or train into another output_dir",
        ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
