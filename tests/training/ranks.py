"""What a rank of `test_distributed.py` runs (torchrun, gloo): one FSDP2 step against the same step on one process."""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from medusa_train.modeling.backbone import decoder_of, output_projection
from medusa_train.modeling.heads import HeadsConfig, new_heads
from medusa_train.training.fused import FusedOptions
from medusa_train.training.losses import IGNORE
from medusa_train.training.trainee import Objective, Trainee
from tests.tiny import tiny_model


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


def main(out: str) -> None:
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


if __name__ == "__main__":
    main(sys.argv[1])
