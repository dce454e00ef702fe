"""Bounds on the ordinary head's drift: no weights are stored that have not met them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import TrainerCallback

from medusa_train.checkpoint.load import load_checkpoint
from medusa_train.config.recipe import DriftSection
from medusa_train.errors import UserError
from medusa_train.training import fit as fit_module
from medusa_train.training.drift import check_drift
from medusa_train.training.fit import fit
from medusa_train.training.state import RunFolder
from tests.training.support import losses_of, recipe_of, write_world


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return write_world(tmp_path_factory.mktemp("world"))


def joint(**drift: float | None) -> dict:
    return {"kind": "joint", "lora": {"r": 4}, "drift": {"max_ce_increase": None, **drift}}


def held_nothing_out(world: dict) -> dict:
    return {"train": [world["data"]], "max_length": 96, "heldout_fraction": 0}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    ("bound", "figure"),
    [("max_ce_increase", "drift_ce"), ("max_kl", "drift_kl"), ("min_top1_agreement", "drift_top1_agreement")],
)
def test_a_figure_that_is_not_finite_is_within_no_bound(bound: str, figure: str, value: float) -> None:
    unset = {"max_ce_increase": None, "max_kl": None, "min_top1_agreement": None}
    metrics = {"drift_ce": 0.0, "drift_kl": 0.0, "drift_top1_agreement": 1.0, figure: value}
    check_drift(DriftSection(**unset), metrics, "here")
    with pytest.raises(UserError, match=bound) as error:
        check_drift(DriftSection(**{**unset, bound: 0.5}), metrics, "here")
    assert error.value.where == "here"


@pytest.mark.parametrize(
    "checks", [{}, {"eval_strategy": "steps", "eval_steps": 1, "eval_delay": 9}], ids=["no checks", "checks too late"]
)
def test_weights_that_met_no_check_while_training_are_checked_before_they_are_stored(
    world: dict, tmp_path: Path, checks: dict
) -> None:
    with pytest.raises(UserError, match=r"drifted too far .*max_kl 0\.0001") as error:
        fit(recipe_of(world, tmp_path / "out", joint(max_kl=1e-4), training={"max_steps": 3, **checks}))
    assert error.value.where == "the weights to be stored, after step 3"
    assert sorted(losses_of(tmp_path / "out")) == [1, 2, 3]
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.run" / "finished.json").exists()


class CheckOnlyAt(TrainerCallback):
    """One held-out check, wherever the library would have made others."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args, state, control, **kwargs) -> None:
        control.should_evaluate = state.global_step == self.step


def adding(callback: TrainerCallback):
    """`build_trainer` with one callback more."""
    build = fit_module.build_trainer

    def built(*args):
        trainer = build(*args)
        trainer.add_callback(callback)
        return trainer

    return built


def test_what_is_checked_last_is_what_is_stored(world: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three steps, one check after the second, and a bound between its KL and the last step's: the last weights are
    refused, and those of the check, put back as the best, are stored."""
    monkeypatch.setattr(fit_module, "build_trainer", adding(CheckOnlyAt(2)))
    training = {"max_steps": 3, "eval_strategy": "steps", "eval_steps": 2, "warmup_steps": 0}
    last = {"training": training, "evaluation": {"keep_best": False}}
    output = fit(recipe_of(world, tmp_path / "free", joint(), **last))
    final = load_checkpoint(output).manifest.training["heldout"]["drift_kl"]
    log = [json.loads(line) for line in (tmp_path / "free.run" / "log.jsonl").read_text().splitlines()]
    (checked,) = (entry["eval_drift_kl"] for entry in log if "eval_drift_kl" in entry)
    assert 0 < 1.1 * checked < final
    bounded = joint(max_kl=(checked + final) / 2)
    with pytest.raises(UserError, match="drifted too far"):
        fit(recipe_of(world, tmp_path / "last", bounded, **last))
    assert not (tmp_path / "last").exists()
    output = fit(recipe_of(world, tmp_path / "best", bounded, training=training))
    assert load_checkpoint(output).manifest.training["heldout"]["drift_kl"] == pytest.approx(checked, rel=1e-4)


def test_what_is_past_a_bound_is_never_the_best(world: dict, tmp_path: Path) -> None:
    training = {"max_steps": 3, "eval_strategy": "steps", "eval_steps": 1, "warmup_steps": 0}
    recipe = recipe_of(world, tmp_path / "out", joint(max_kl=1e-9), training=training)
    with pytest.raises(UserError, match="drifted too far") as error:
        fit(recipe)
    assert error.value.where.startswith("step ")
    assert not (RunFolder.of(recipe).best / "best.json").exists()


def test_a_bound_of_the_recipe_without_held_out_rows_is_refused_before_training(world: dict, tmp_path: Path) -> None:
    policy = {"kind": "self_distill", "lora": {"r": 2}, "drift": {"max_kl": 0.5, "min_top1_agreement": 0.9}}
    with pytest.raises(UserError, match="no held-out rows") as error:
        fit(recipe_of(world, tmp_path / "out", policy, data=held_nothing_out(world), training={"max_steps": 1}))
    assert error.value.where == "policy.drift.max_kl, policy.drift.min_top1_agreement"
    assert "data.heldout_fraction" in error.value.fix and "policy.drift.max_kl=null" in error.value.fix
    assert not (tmp_path / "out.run" / "log.jsonl").exists() and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("policy", "lines"),
    [
        ({"kind": "joint", "lora": {"r": 2}}, 1),
        ({"kind": "self_distill", "lora": {"r": 2}}, 1),
        (joint(), 0),
        ({"kind": "heads_only"}, 0),
    ],
    ids=["default", "default, distilled", "none asked for", "heads_only"],
)
def test_default_bounds_without_held_out_rows_are_said_to_bound_nothing(
    world: dict, tmp_path: Path, capfd: pytest.CaptureFixture, policy: dict, lines: int
) -> None:
    fit(recipe_of(world, tmp_path / "out", policy, data=held_nothing_out(world), training={"max_steps": 1}))
    told = " ".join(capfd.readouterr().err.split())
    assert told.count("nothing bounds how far the ordinary head drifts") == lines
    assert load_checkpoint(tmp_path / "out").manifest.training["heldout"] == {}


class Stop(TrainerCallback):
    """Dies after a check, before any checkpoint."""

    def on_evaluate(self, args, state, control, **kwargs) -> None:
        raise KeyboardInterrupt


def test_the_best_of_a_run_that_left_no_checkpoint_is_not_the_next_run_s(
    world: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first recipe ends after its first check; a second one, that never checks, must not store that one."""
    checks = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 3, "learning_rate": 0.1}
    first = recipe_of(world, tmp_path / "out", training=checks)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(fit_module, "build_trainer", adding(Stop()))
        fit(first)
    assert (RunFolder.of(first).best / "best.json").is_file()
    for name in ("out", "fresh"):
        fit(recipe_of(world, tmp_path / name, training={"max_steps": 2}))
    found, wanted = (load_checkpoint(tmp_path / name).heads.state_dict() for name in ("out", "fresh"))
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_run_that_a_bound_stopped_goes_on_under_a_wider_one(world: dict, tmp_path: Path) -> None:
    """All steps are done and saved when the last check fails: the same run with a wider bound stores them."""
    training = {"max_steps": 3, "learning_rate": 0.05, "eval_strategy": "no", "save_strategy": "steps", "save_steps": 1}
    narrow, wide, none = (
        recipe_of(world, tmp_path / name, joint(max_kl=bound), training=training)
        for name, bound in (("out", 1e-9), ("out", 1e9), ("free", None))
    )
    with pytest.raises(UserError, match="drifted too far"):
        fit(narrow)
    assert not (tmp_path / "out").exists()
    state = RunFolder.of(narrow).state / "checkpoint-3"
    written = state.stat().st_mtime_ns
    fit(wide)
    fit(none)
    assert state.stat().st_mtime_ns == written, "no step was made again"
    found, wanted = (load_checkpoint(tmp_path / name).heads.state_dict() for name in ("out", "free"))
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
