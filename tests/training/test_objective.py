"""What a step minimises: sum_c lambda_c S_c / N_c by the plain formulas, and the same numbers in the log.

The reference reads the whole logits of the models themselves, makes its own targets in a loop, and has the weights as
literals of the step. Heads (one block each): logits_j = U_j (h + SiLU(W_j h + b_j)), target t+j+2.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from medusa_train.modeling.base import load_base
from medusa_train.training.trainer import MedusaTrainer
from tests.training.support import entries_of, trainer_of, write_world

RAMP = {"shape": "linear", "fraction": 0.5}
POLICIES: dict[str, Any] = {
    "heads_only": "heads_only",
    "joint": {"kind": "joint", "lora": {"r": 2, "dropout": 0.0}, "ramp": RAMP, "medusa_weight": 0.2},
    "self_distill": {
        "kind": "self_distill",
        "lora": {"r": 2, "dropout": 0.0},
        "ramp": {"shape": "sine", "fraction": 1.0},
        "medusa_weight": 0.01,
    },
}
STEPS = 20
# (policy, step) -> lambda of every channel; the heads' own are 0.8, 0.64, 0.512.
WEIGHTS = {
    ("heads_only", 0): (0.8, 0.64, 0.512),
    ("heads_only", 7): (0.8, 0.64, 0.512),
    ("joint", 0): (1.0, 0.0, 0.0, 0.0),
    ("joint", 5): (1.0, 0.2 * 0.5 * 0.8, 0.2 * 0.5 * 0.64, 0.2 * 0.5 * 0.512),  # 5 of the 10 steps of the ramp
    ("joint", 15): (1.0, 0.16, 0.128, 0.1024),
    ("self_distill", 0): (1.0, 0.0, 0.0, 0.0),
    ("self_distill", 5): (1.0, *(0.01 * math.sin(math.pi / 8) * weight for weight in (0.8, 0.64, 0.512))),
    ("self_distill", 10): (1.0, *(0.01 * math.sin(math.pi / 4) * weight for weight in (0.8, 0.64, 0.512))),
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return write_world(tmp_path_factory.mktemp("world"))


def perturbed(world: dict, output: Path, policy: str) -> MedusaTrainer:
    """A trainer whose trainable tensors are no zeros; one row a bin."""
    data = {"train": [world["data"]], "packing": False, "max_length": 96}
    trainer = trainer_of(world, output, POLICIES[policy], data=data)
    generator = torch.Generator().manual_seed(5)
    for parameter in trainer.model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    trainer.state.max_steps = STEPS
    return trainer


def targets(row: Any, shift: int) -> list[tuple[int, int]]:
    """(position, token `shift` further on) where that token is supervised."""
    return [(at - shift, int(row.input_ids[at])) for at in range(shift, len(row)) if row.loss_mask[at]]


def plain_terms(trainer: MedusaTrainer, world: dict, row: Any) -> list[tuple[torch.Tensor, int]]:
    """(sum, count) of every channel of one row, from whole logits."""
    ids = torch.from_numpy(row.input_ids.astype("int64"))[None]
    model, heads = trainer.model.backbone, trainer.model.heads
    output = model(input_ids=ids, output_hidden_states=True)
    hidden, terms = output.hidden_states[-1][0], []
    if trainer.channels[0] != "head0":
        found = targets(row, 1)
        at, tokens = (torch.tensor(part) for part in zip(*found, strict=True))
        logits = output.logits[0, at]
        if trainer.channels[0] == "lm":
            total = F.cross_entropy(logits, tokens, reduction="sum")
        else:
            teacher = load_base(world["base"], dtype="float32").model(input_ids=ids).logits[0, at].softmax(-1)
            total = F.kl_div(logits.log_softmax(-1), teacher, reduction="sum")
        terms.append((total, len(found)))
    for head in range(3):
        linear = heads.blocks[head][0].linear
        z = hidden + F.silu(hidden @ linear.weight.T + linear.bias)
        found = targets(row, head + 2)
        at, tokens = (torch.tensor(part) for part in zip(*found, strict=True))
        logits = z[at] @ heads.projections[head].weight.T
        terms.append((F.cross_entropy(logits, tokens, reduction="sum"), len(found)))
    return terms


def of_parameters(trainer: MedusaTrainer, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    named = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {name: torch.zeros_like(p) if g is None else g for (name, p), g in zip(named.items(), found, strict=True)}


@pytest.mark.parametrize(("policy", "step"), WEIGHTS, ids=[f"{policy}-{step}" for policy, step in WEIGHTS])
def test_the_loss_of_a_micro_batch_is_the_weighted_sums_over_the_step_s_counts(
    world: dict, tmp_path: Path, policy: str, step: int
) -> None:
    """Two rows here, three in the other micro-batch of the step, which only the counts know of."""
    trainer = perturbed(world, tmp_path / "out", policy)
    trainer.state.global_step = step
    bins = [trainer.train_dataset[index] for index in range(5)]
    batches = [trainer.data_collator(bins[:2]), trainer.data_collator(bins[2:])]
    counts = trainer._get_num_items_in_batch(batches, torch.device("cpu"))
    loss = trainer.compute_loss(trainer.model, batches[0], num_items_in_batch=counts)

    rows = [plain_terms(trainer, world, bin_[0]) for bin_ in bins]
    wanted = torch.zeros(())
    for channel, weight in enumerate(WEIGHTS[policy, step]):
        total = rows[0][channel][0] + rows[1][channel][0]
        wanted = wanted + weight * total / sum(row[channel][1] for row in rows)
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)
    ours, plain = of_parameters(trainer, loss), of_parameters(trainer, wanted)
    size = max(gradient.norm() for gradient in plain.values())
    for name, gradient in plain.items():
        assert (ours[name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-7 * size, name


@pytest.mark.parametrize("policy", POLICIES)
def test_the_logged_loss_is_the_weighted_sum_of_the_logged_losses_of_the_channels(
    world: dict, tmp_path: Path, policy: str
) -> None:
    """Four steps of two micro-batches of unlike rows; the ramps stand at 0, 1/4, .. of the run when a step begins."""
    data = {"train": [world["data"]], "packing": False, "max_length": 96}
    training = {"max_steps": 4, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}
    trainer = trainer_of(world, tmp_path / "out", POLICIES[policy], training=training, data=data)
    trainer.train()
    entries = [entry for entry in entries_of(tmp_path / "out") if "loss" in entry]
    factors = {
        "joint": (0.0, 0.2 * 0.5, 0.2, 0.2),  # linear over half of the steps
        "self_distill": tuple(0.01 * math.sin(math.pi / 8 * done) for done in range(4)),
    }.get(policy, (1.0,) * 4)
    assert [entry["step"] for entry in entries] == [1, 2, 3, 4]
    for entry, factor in zip(entries, factors, strict=True):
        heads = factor * (0.8 * entry["head0_loss"] + 0.64 * entry["head1_loss"] + 0.512 * entry["head2_loss"])
        first = entry.get("lm_loss", entry.get("kl_loss", 0.0))
        assert entry["loss"] == pytest.approx(first + heads, rel=1e-5, abs=1e-9)
