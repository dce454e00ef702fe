"""What a rank of `test_distributed.py` runs (torchrun, gloo): one FSDP2 step against the same step on one process, or
what every rank makes of a recipe: gradients of its first step, or what it says of a loss that is not finite."""

from __future__ import annotations

import gc
import json
import sys
import weakref
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import TrainerCallback

from medusa_train.config.load import load_recipe
from medusa_train.config.recipe import Recipe
from medusa_train.errors import UserError
from medusa_train.modeling.backbone import decoder_of, output_projection
from medusa_train.modeling.base import load_base
from medusa_train.modeling.heads import HeadsConfig, new_heads
from medusa_train.training.announce import ShardedStartCallback
from medusa_train.training.fit import build_trainer
from medusa_train.training.fused import FusedOptions
from medusa_train.training.losses import IGNORE
from medusa_train.training.prepare import load_training_rows
from medusa_train.training.state import RunFolder
from medusa_train.training.trainee import Objective, Trainee
from medusa_train.training.trainer import MedusaTrainer
from tests.tiny import tiny_model
from tests.training.support import Poison


def build() -> Trainee:
    """A fully trained tiny llama with own heads, the same on every rank."""
    model = tiny_model("llama").requires_grad_(True)
    projection = output_projection(model)
    config = HeadsConfig("own", 2, 1, projection.hidden_size, projection.vocab_size)
    heads = new_heads(config, projection, dtype=torch.float32)
    return Trainee(heads, projection, Objective("joint", 2, "fused", FusedOptions(4)), model)


def batch(part: int, parts: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Rows `part` of `parts` of four rows with unequal counts, and the counts of all of them."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 60, (4, 12), generator=generator)
    labels = torch.stack([torch.roll(ids, -shift, 1) for shift in (1, 2, 3)])
    for row in range(4):
        labels[:, row, 3 + 2 * row :] = IGNORE
    counts = (labels != IGNORE).flatten(1).sum(1)
    mine = slice(part * 4 // parts, (part + 1) * 4 // parts)
    ids, labels = ids[mine], labels[:, mine].flatten(1)
    inputs = {"input_ids": ids, "labels": labels, "rows": torch.arange(ids.numel())}
    return {**inputs, "position_ids": torch.arange(12).expand(len(ids), -1)}, counts


def loss_of(model: torch.nn.Module, part: int, parts: int) -> torch.Tensor:
    """This rank's share of the loss, times the number of ranks (gradients are averaged over them)."""
    inputs, counts = batch(part, parts)
    return (model(**inputs)["sums"] * torch.tensor([1.0, 0.16, 0.128]) / counts).sum() * parts


def fsdp2_step(out: str) -> None:
    """Writes the differences between the sharded and the single-process step to `out`."""
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    single = build()
    whole = loss_of(single, 0, 1)
    whole.backward()
    sharded = build()
    mesh = init_device_mesh("cpu", (ranks,))
    for layer in decoder_of(sharded.backbone).layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    loss = loss_of(sharded, rank, ranks)
    loss.backward()
    total = loss.detach() / ranks
    dist.all_reduce(total)
    worst, sizes = 0.0, {}
    references = dict(single.named_parameters())
    for name, parameter in sharded.named_parameters():
        gradient = parameter.grad.full_tensor()
        worst = max(worst, ((gradient - references[name].grad).norm() / references[name].grad.norm()).item())
        sizes[name] = list(parameter.full_tensor().shape)
    if rank == 0:
        right = {name: list(parameter.shape) for name, parameter in references.items()}
        facts = {"loss": total.item(), "single": whole.item(), "worst": worst, "full_size": sizes == right}
        with open(out, "w") as handle:
            json.dump(facts, handle)
    dist.barrier()  # gloo may abort a rank whose peer is gone first
    dist.destroy_process_group()


class Gradients(TrainerCallback):
    """Copies every gradient as the optimizer is about to apply it (of the newest step)."""

    def __init__(self) -> None:
        self.found: dict[str, torch.Tensor] = {}

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs) -> None:
        named = getattr(model, "module", model).named_parameters()
        self.found = {name: p.grad.detach().clone() for name, p in named if p.requires_grad}


def rank_trainer(recipe: Recipe) -> MedusaTrainer:
    """This rank's trainer (or the only one), before its first step."""
    run = RunFolder.of(recipe)
    run.path.mkdir(parents=True, exist_ok=True)
    base = load_base(recipe.base.name, dtype="float32")
    return build_trainer(recipe, base, load_training_rows(recipe, base), run, None)


def first_gradients(recipe: Recipe) -> dict[str, torch.Tensor]:
    """The gradients of a recipe's first step, through the whole trainer, at tensors that are no zeros."""
    trainer = rank_trainer(recipe)
    generator = torch.Generator().manual_seed(7)
    for parameter in trainer.model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    callback = Gradients()
    trainer.add_callback(callback)
    trainer.train()
    return callback.found


def write_gradients(recipe: str, out: str) -> None:
    """The gradients of every rank, to `out/RANK.safetensors`."""
    found = first_gradients(load_recipe(recipe, []))
    save_file(found, Path(out) / f"{dist.get_rank()}.safetensors")
    dist.barrier()
    dist.destroy_process_group()


def write_problem(recipe: str, out: str) -> None:
    """What every rank says of a NaN that rank 1 meets in step 2, noticed at a log as on an accelerator."""
    trainer = rank_trainer(load_recipe(recipe, []))
    trainer.watch.check = lambda _: None
    if dist.get_rank() == 1:
        trainer.add_callback(Poison(trainer, step=2))
    try:
        trainer.train()
    except UserError as error:
        Path(out, f"{dist.get_rank()}.txt").write_text(str(error))
    dist.barrier()
    dist.destroy_process_group()


class Look(TrainerCallback):
    """Which full tensors of before sharding are alive, and held-out drift, before the first step and after the last."""

    def __init__(self, trainer: MedusaTrainer) -> None:
        self.trainer, self.drift, self.alive = trainer, [], -1
        self.before = [weakref.ref(parameter) for parameter in trainer.model.parameters()]

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        if self.alive < 0:
            gc.collect()
            self.alive = sum(one() is not None and not hasattr(one(), "full_tensor") for one in self.before)
            self.look()

    def on_train_end(self, args, state, control, **kwargs) -> None:
        self.look()

    def look(self) -> None:
        metrics = self.trainer.score()[0].metrics([0.8, 0.64, 0.512])
        self.drift.append([metrics["drift_ce"], metrics["drift_kl"], metrics["drift_top1_agreement"]])


def write_sharded(recipe: str, out: str) -> None:
    """Facts of a run through `fit`'s own trainer under FSDP2."""
    loaded = load_recipe(recipe, [])
    trainer = rank_trainer(loaded)
    trainer.create_optimizer()
    trainer.add_callback(ShardedStartCallback(trainer, RunFolder.of(loaded)))
    look = Look(trainer)
    trainer.add_callback(look)
    dtypes, compute = set(), trainer.compute_loss

    def loss(model, inputs, return_outputs=False, num_items_in_batch=None):
        total, outputs = compute(model, inputs, True, num_items_in_batch)
        dtypes.add(str(outputs["sums"].dtype))
        return (total, outputs) if return_outputs else total

    trainer.compute_loss = loss
    trainer.train()
    if dist.get_rank() == 0:
        facts = {"dtypes": sorted(dtypes), "alive": look.alive, "tensors": len(look.before), "drift": look.drift}
        Path(out, "facts.json").write_text(json.dumps(facts))
    dist.barrier()
    dist.destroy_process_group()


WORK = {"fsdp2": fsdp2_step, "sharded": write_sharded, "gradients": write_gradients, "problem": write_problem}

if __name__ == "__main__":
    WORK[sys.argv[1]](*sys.argv[2:])
