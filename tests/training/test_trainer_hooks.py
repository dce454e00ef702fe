"""Exact denominators, optimizer groups, stops: what the Trainer is overridden for, with pins on its private parts."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
from transformers import Trainer, TrainerState

from medusa_train.config.recipe import DriftSection
from medusa_train.errors import UserError
from medusa_train.training.announce import announce
from medusa_train.training.drift import DriftCallback
from medusa_train.training.policies import (
    channel_weights,
    check_cover,
    head_weight_factor,
    prepare_backbone,
)
from medusa_train.training.trainer import MedusaTrainer
from tests.tiny import tiny_model
from tests.training.support import recipe_of, trainer_of, write_world


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return write_world(tmp_path_factory.mktemp("world"))


def test_the_private_hook_still_exists_and_is_called_where_the_counts_are_needed() -> None:
    """If this fails, transformers moved: see `MedusaTrainer._get_num_items_in_batch`."""
    assert list(inspect.signature(Trainer._get_num_items_in_batch).parameters) == ["self", "batch_samples", "device"]
    assert "_get_num_items_in_batch" in inspect.getsource(Trainer.get_batch_samples)
    assert "num_items_in_batch" in inspect.signature(Trainer.compute_loss).parameters
    assert "loss_is_scaled_for_ga" in inspect.getsource(Trainer.training_step)
    for name in ("_save_checkpoint", "_load_from_checkpoint", "create_optimizer", "evaluate"):
        assert hasattr(Trainer, name)
    for name in ("self.save_model(output_dir", "self._save_optimizer_and_scheduler(output_dir"):
        assert name in inspect.getsource(Trainer._save_checkpoint)


def gradients(trainer: MedusaTrainer, batches: list[dict]) -> dict[str, torch.Tensor]:
    """What one optimizer step over these micro-batches would apply, by parameter name."""
    trainer.model.zero_grad()
    trainer.state.max_steps = 10
    counts = trainer._get_num_items_in_batch(batches, torch.device("cpu"))
    trainer.current_gradient_accumulation_steps = len(batches)
    for batch in batches:
        trainer.training_step(trainer.model, dict(batch), counts)
    return {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("policy", ["heads_only", {"kind": "joint", "lora": {"r": 2, "dropout": 0.0}}])
def test_four_times_one_gives_the_gradient_of_one_times_four(world: dict, tmp_path: Path, policy) -> None:
    """fp32, 1e-6 (2e-6 through the backbone); rows differ in length, so a mean of means would be far off."""
    trainer = trainer_of(
        world, tmp_path / "out", policy, data={"train": [world["data"]], "packing": False, "max_length": 96}
    )
    torch.nn.init.normal_(trainer.model.heads.blocks[0][0].linear.weight, std=0.1)
    rows = [trainer.train_dataset[index] for index in (0, 3, 4, 7)]
    whole = gradients(trainer, [trainer.data_collator(rows)])
    parts = gradients(trainer, [trainer.data_collator([row]) for row in rows])
    assert whole.keys() == parts.keys() and len(whole) > 6
    for name, gradient in whole.items():
        bound = 1e-6 if policy == "heads_only" else 2e-6
        assert (gradient - parts[name]).norm() <= bound * gradient.norm(), name


def test_a_mean_of_micro_batch_means_is_a_different_gradient(world: dict, tmp_path: Path) -> None:
    """The mutation that the test above has to catch: dividing each micro-batch by its own counts."""
    trainer = trainer_of(world, tmp_path / "out", data={"train": [world["data"]], "packing": False, "max_length": 96})
    rows = [trainer.train_dataset[index] for index in (0, 3, 4, 7)]
    whole = gradients(trainer, [trainer.data_collator(rows)])
    wrong: dict[str, torch.Tensor] = {}
    for row in rows:
        for name, gradient in gradients(trainer, [trainer.data_collator([row])]).items():
            wrong[name] = wrong.get(name, 0) + gradient / len(rows)
    name = "heads.blocks.0.0.linear.weight"
    assert (whole[name] - wrong[name]).abs().max() > 1e-3 * whole[name].abs().max()


def test_counts_are_one_number_per_channel(world: dict, tmp_path: Path) -> None:
    trainer = trainer_of(world, tmp_path / "out", {"kind": "joint", "lora": {"r": 2}})
    batch = trainer.data_collator([trainer.train_dataset[0]])
    counts = trainer._get_num_items_in_batch([batch, batch], torch.device("cpu"))
    supervised = sum(int(row.loss_mask.sum()) for row in trainer.train_dataset[0])
    assert counts.tolist()[0] == 2 * supervised  # the lm channel: every supervised token has a token before it
    assert counts.tolist() == sorted(counts.tolist(), reverse=True) and len(counts) == 4


def test_every_trainable_parameter_is_in_one_group_biases_with_the_heads_rate(world: dict, tmp_path: Path) -> None:
    trainer = trainer_of(world, tmp_path / "out", {"kind": "joint", "lora": {"r": 2}, "head_lr_multiplier": 4.0})
    trainer.create_optimizer()
    rates = {name: group.learning_rate for group in trainer.groups for name in group.tensors}
    trainable = {name for name, p in trainer.model.named_parameters() if p.requires_grad}
    assert rates.keys() == trainable
    assert {rate for name, rate in rates.items() if name.startswith("heads.")} == {0.04}
    assert {rate for name, rate in rates.items() if not name.startswith("heads.")} == {0.01}
    assert rates["heads.blocks.0.0.linear.bias"] == 0.04


def test_a_parameter_in_no_group_or_in_two_is_named() -> None:
    a, b, c = (torch.nn.Parameter(torch.zeros(1)) for _ in range(3))
    c.requires_grad_(False)
    optimizer = torch.optim.SGD([a, c], lr=1.0)
    optimizer.param_groups[0]["params"].append(a)
    with pytest.raises(UserError) as error:
        check_cover(optimizer, [("a", a), ("b", b), ("c", c)])
    assert "a is trainable and in 2" in error.value.what
    assert "b is trainable and in 0" in error.value.what
    assert "c is frozen and in an optimizer group" in error.value.what


@pytest.mark.parametrize(
    ("shape", "step", "factor"),
    [("constant", 0, 1.0), ("linear", 25, 0.5), ("linear", 80, 1.0), ("sine", 25, 2**-0.5), ("sine", 50, 1.0)],
)
def test_ramps_by_hand(shape: str, step: int, factor: float) -> None:
    """Over half of 100 steps: linear is at 1/2 after 25, sine at sin(pi/4)."""
    from medusa_train.config.recipe import RampSection

    assert head_weight_factor(RampSection(shape=shape, fraction=0.5), step, 100) == pytest.approx(factor)


def test_channel_weights_of_joint_training(world: dict, tmp_path: Path) -> None:
    """1 for the lm_head, lambda_0 lambda_j for the heads: 0.2 * (0.8, 0.64, 0.512)."""
    recipe = recipe_of(world, tmp_path / "out", {"kind": "joint"})
    assert channel_weights(recipe, 0, 10) == pytest.approx([1.0, 0.16, 0.128, 0.1024])


def test_the_teacher_s_adapter_is_back_after_an_exception(world: dict, tmp_path: Path) -> None:
    from medusa_train.training.trainee import adapter_off

    model = trainer_of(world, tmp_path / "out", {"kind": "self_distill", "lora": {"r": 2}}).model.backbone
    model.train()
    layer = next(
        module for module in model.modules() if hasattr(module, "lora_A") and hasattr(module, "disable_adapters")
    )
    with pytest.raises(RuntimeError), adapter_off(model):
        assert layer.disable_adapters and not layer.training
        raise RuntimeError("boom")
    assert not layer.disable_adapters and layer.training


def test_self_distillation_starts_at_a_kl_of_exactly_zero(world: dict, tmp_path: Path) -> None:
    policy = {"kind": "self_distill", "lora": {"r": 4, "dropout": 0.3}}
    trainer = trainer_of(world, tmp_path / "out", policy)
    batch = trainer.data_collator([trainer.train_dataset[0], trainer.train_dataset[1]])
    trainer.model.train()
    output = trainer.model(
        **{name: batch[name] for name in ("labels", "rows", "input_ids", "position_ids", "attention_mask")}
    )
    assert output["sums"][0].item() == 0.0
    assert output["sums"][1].item() > 0.0


@pytest.mark.parametrize(
    ("bounds", "words"),
    [
        ({"max_ce_increase": 0.1}, "CE rose by 0.2000 nats"),
        ({"max_ce_increase": None, "max_kl": 0.03}, "KL is 0.0400"),
        ({"max_ce_increase": None, "min_top1_agreement": 0.95}, "top-1 agreement is 0.900"),
        ({"max_ce_increase": 0.2, "max_kl": 0.04, "min_top1_agreement": 0.9}, None),
        ({"max_ce_increase": None}, None),
    ],
)
def test_each_bound_of_drift(bounds: dict, words: str | None) -> None:
    """Each bound alone stops the run by name; a value that stands exactly on its bound is within it."""
    callback, state = DriftCallback(DriftSection(**bounds)), TrainerState(global_step=7)
    metrics = {"eval_drift_ce": 0.2, "eval_drift_kl": 0.04, "eval_drift_top1_agreement": 0.9}
    if words is None:
        callback.on_evaluate(None, state, None, metrics)
        return
    with pytest.raises(UserError, match=words) as raised:
        callback.on_evaluate(None, state, None, metrics)
    assert "step 7" in str(raised.value)


def test_a_quantized_teacher_is_warned_about_in_one_line(
    world: dict, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    import peft

    monkeypatch.setattr(peft, "prepare_model_for_kbit_training", lambda model, **_: model)
    for kind, quantization, warned in (
        ("self_distill", "4bit", True),
        ("self_distill", None, False),
        ("joint", "4bit", False),
    ):
        recipe = recipe_of(world, Path("unused"), {"kind": kind, "lora": {"r": 2}})
        recipe = recipe.model_copy(update={"base": recipe.base.model_copy(update={"quantization": quantization})})
        capfd.readouterr()
        prepare_backbone(tiny_model("llama"), recipe)
        lines = [line for line in capfd.readouterr().err.splitlines() if "quantized" in line]
        assert len(lines) == int(warned), (kind, quantization, lines)


def test_what_is_said_before_the_first_step(world: dict, tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    """Every group with its name, count and rate, and the total; counted here from the shapes."""
    trainer = trainer_of(world, tmp_path / "out", {"kind": "joint", "lora": {"r": 2}, "head_lr_multiplier": 4.0})
    trainer.create_optimizer()
    capfd.readouterr()
    announce(trainer, 12_345)
    text = " ".join(capfd.readouterr().err.split())
    total = sum(parameter.numel() for parameter in trainer.model.parameters() if parameter.requires_grad)
    assert f"trainable in all: {total:,} numbers; expected memory" in text
    assert text.count("learning rate 0.04,") >= 1 and text.count("learning rate 0.01,") >= 1
    for group in trainer.groups:
        assert f"trainable: {group.name}," in text
