"""What is said and tried before the first step: groups, sizes, memory; a dry save and reload."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from medusa_train.console import human_bytes, human_count, say
from medusa_train.errors import UserError
from medusa_train.training.sharding import of_first_rank
from medusa_train.training.state import TENSORS, RunFolder, trainable_tensors, write_tensors

if TYPE_CHECKING:
    from medusa_train.training.trainer import MedusaTrainer


def announce(trainer: MedusaTrainer, expected: int) -> None:
    """Prints the optimizer's groups with names, counts and rates, the trainable total and the expected memory."""
    if not trainer.args.should_save:
        return
    for group in trainer.groups:
        first, last = group.tensors[0], group.tensors[-1]
        say(
            f"trainable: {group.name}, {human_count(group.count)} numbers in {len(group.tensors)} tensors"
            f" ({first} .. {last}), learning rate {group.learning_rate:g}, weight decay {group.weight_decay:g}"
        )
    total = sum(group.count for group in trainer.groups)
    say(f"trainable in all: {total:,} numbers; expected memory {human_bytes(expected)}")


def expected_memory(trainer: Any) -> int:
    """Bytes of one process at the height of training, as `plan` counts them, with these rows' supervised share."""
    from medusa_train.training.batches import BinDataset
    from medusa_train.training.plan import plan_recipe

    rows = trainer.train_dataset
    share = {"supervised_share": rows.supervised_share} if isinstance(rows, BinDataset) else {}
    place = {"processes": trainer.args.world_size, "device": trainer.args.device.type}
    plan = plan_recipe(trainer.recipe, trainer.shape, **place, **share)
    return plan.memory.total if trainer.heldout is None else max(plan.memory.total, plan.check)


def dry_save(trainer: MedusaTrainer, run: RunFolder) -> None:
    """Saves the trainable tensors and reads them back, so that a run does not learn at its end that it cannot.

    Called by every rank: all of them gather, the first writes, and where it cannot all of them end.

    Raises:
        UserError: the disk is full or refuses, or what was read differs; on every rank.
    """
    tensors = trainable_tensors(trainer.model, keep=trainer.args.should_save)
    problem = _write_and_reload(tensors, run) if trainer.args.should_save else None
    problem = of_first_rank(problem)
    if problem is not None:
        raise problem


def _write_and_reload(tensors: dict[str, Tensor], run: RunFolder) -> UserError | None:
    """What is wrong, or None; nothing of it is left on the disk."""
    folder = run.path / ".dry"
    try:
        write_tensors(folder, tensors)
        again = load_file(folder / TENSORS)
    except (OSError, SafetensorError, RuntimeError) as error:
        return UserError(
            f"a trial save failed: {error}",
            where=str(run.path),
            fix="free some space, or train into another output_dir",
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for name, tensor in tensors.items():
        if name not in again or not torch.equal(tensor, again[name]):
            return UserError(f"{name} reads back different from what was written", where=str(run.path))
    return None


class ShardedStartCallback(TrainerCallback):
    """What a sharded run does before its first step: its weights become shards inside train(), just before this."""

    def __init__(self, trainer: MedusaTrainer, run: RunFolder) -> None:
        self.trainer, self.run = trainer, run

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if state.global_step == 0:
            dry_save(self.trainer, self.run)
        self.trainer.keep_original_rows()
