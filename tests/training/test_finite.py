"""A loss that is not finite: the run ends with step, rows and counts, wherever that is noticed, and no log hides it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from medusa_train.errors import UserError
from medusa_train.training import fit as fit_module
from medusa_train.training.finite import FiniteWatch, MicroBatch, culprits
from medusa_train.training.fit import fit
from tests.training.support import Poison, entries_of, recipe_of, trainer_of, write_world

NAN = float("nan")
CACHE = {"kind": "heads_only", "cache": {"enabled": True}}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return write_world(tmp_path_factory.mktemp("world"))


def test_a_loss_that_is_not_finite_stops_the_run_with_step_rows_and_counts(world: dict, tmp_path: Path) -> None:
    trainer = trainer_of(world, tmp_path / "out")
    trainer.model.heads.projections[0].weight.data[3, 0] = NAN
    with pytest.raises(UserError) as error:
        trainer.train()
    assert error.value.where.startswith("step 1, rows ") and "data.jsonl:" in error.value.where
    assert error.value.where.endswith(" (the whole micro-batch)")
    assert "head0 nan over" in error.value.what
    assert not list(trainer.run.state.glob("checkpoint-*"))


def test_where_it_is_noticed_later_the_first_bad_micro_batch_is_told(
    world: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An accelerator's way: looked at when something is logged, after step 5, of what began in step 3."""
    training = {"gradient_accumulation_steps": 2, "logging_steps": 5, "train_sampling_strategy": "sequential",
                "num_train_epochs": 1, "max_steps": 5, "per_device_train_batch_size": 2}  # fmt: skip
    data = {"train": [world["data"]], "packing": False, "max_length": 96}
    trainer = trainer_of(world, tmp_path / "out", training=training, data=data)
    trainer.add_callback(Poison(trainer, step=3))
    monkeypatch.setattr(trainer.watch, "check", lambda _: None)
    with pytest.raises(UserError) as error:
        trainer.train()
    assert trainer.state.global_step == 5
    rows = [row for bin_ in trainer.train_dataset.bins[8:10] for row in bin_]  # step 3 of 2 x 2: bins 8 to 11
    assert error.value.where == f"step 3, rows {rows[0].source}, {rows[1].source} (the whole micro-batch)"
    counts = [sum(int(row.loss_mask[shift:].sum()) for row in rows) for shift in (2, 3, 4)]
    told = error.value.what.removeprefix("the loss is not finite; sums ").split(", ")
    assert [one.split(" over ")[1] for one in told] == [str(count) for count in counts]
    assert math.isnan(float(told[1].split()[1])) and math.isfinite(float(told[0].split()[1]))


def test_steps_after_the_last_log_are_looked_at_before_anything_is_stored(
    world: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = fit_module.build_trainer

    def poisoned(*args, **kwargs):
        trainer = build(*args, **kwargs)
        trainer.add_callback(Poison(trainer, step=3))
        monkeypatch.setattr(trainer.watch, "check", lambda _: None)  # as on an accelerator
        return trainer

    monkeypatch.setattr(fit_module, "build_trainer", poisoned)
    training = {"logging_steps": 2, "max_steps": 3, "eval_strategy": "no", "save_strategy": "no"}
    with pytest.raises(UserError, match="the loss is not finite") as error:
        fit(recipe_of(world, tmp_path / "out", training=training, data={"train": [world["data"]], "max_length": 96}))
    assert error.value.where.startswith("step 3, rows ")
    assert not (tmp_path / "out").exists()


def test_ranks_say_what_the_first_of_them_met(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 meets it in step 2; its gradient makes the next loss of rank 0 bad as well. Rank 2 is fine till then."""

    def watch(first_bad: int, row: str) -> FiniteWatch:
        found = FiniteWatch(("head0",))
        for step in range(1, 4):
            sums = torch.tensor([NAN if first_bad and step >= first_bad else 1.0])
            batch = MicroBatch(step, torch.tensor([step]), lambda number: f"{row}:{number}")
            found.add(batch, sums.sum(), sums, torch.tensor([5]))
        return found

    ranks = [watch(3, "zero"), watch(2, "one"), watch(0, "two")]
    monkeypatch.setattr("accelerate.utils.gather_object", lambda _: [rank.problem() for rank in ranks])
    for rank in ranks:
        with pytest.raises(UserError) as error:
            rank.check_ranks(3)
        assert error.value.where == "step 2, rows one:2 (the whole micro-batch)"
        assert error.value.what == "the loss is not finite; sums head0 nan over 5"


def test_nothing_of_it_waits_for_the_device() -> None:
    """Tensors without values: whatever asked for one would fail."""
    watch = FiniteWatch(("head0", "head1"))
    for step in (1, 2):
        batch = MicroBatch(step, torch.zeros(3, dtype=torch.int64, device="meta"), str)
        sums = torch.zeros(2, device="meta")
        watch.add(batch, sums.sum(), sums, torch.zeros(2, dtype=torch.int64, device="meta"))


def test_the_row_at_fault_is_named_alone_in_a_batch_of_rows(world: dict, tmp_path: Path) -> None:
    """The embedding of a token that one row begins with is NaN."""
    training = {"per_device_train_batch_size": 64}
    data = {"train": [world["data"]], "packing": False, "max_length": 96}
    trainer = trainer_of(world, tmp_path / "out", training=training, data=data)
    rows = [row for bin_ in trainer.train_dataset.bins for row in bin_]
    used = {token for row in rows for token in row.input_ids.tolist()}
    token = next(token for token in range(3, 500) if token not in used)
    rows[17].input_ids[0] = token
    trainer.model.backbone.get_input_embeddings().weight.data[token] = NAN
    with pytest.raises(UserError) as error:
        trainer.train()
    assert error.value.where == f"step 1, rows {rows[17].source}"


def test_the_row_at_fault_is_named_from_a_cache(world: dict, tmp_path: Path) -> None:
    """Infinite hidden states of two rows, one position each; a batch has some hundred positions of all rows."""
    trainer = trainer_of(world, tmp_path / "out", CACHE, training={"per_device_train_batch_size": 10_000})
    data = trainer.train_dataset
    rows = sorted(data.row_N.unique().tolist())
    wanted = [rows[3], rows[-2]]
    for row in wanted:
        data.shards[0]["hidden"][(data.row_N == row).nonzero()[0]] = float("inf")
    with pytest.raises(UserError) as error:
        trainer.train()
    named = set(error.value.where.removeprefix("step 1, rows ").split(", "))
    assert named == {data.names[row] for row in wanted} and len(named) == 2


@pytest.mark.parametrize("bad", [[], [0], [6], [2, 5], [0, 1, 2, 6], [0, 1, 2, 3, 4]])
def test_culprits_are_few_or_none(bad: list[int]) -> None:
    found = culprits(list(range(7)), lambda some: torch.tensor([NAN if set(some) & set(bad) else 1.0]))
    assert sorted(found) == (bad if len(bad) <= 4 else [])


def test_no_row_is_blamed_for_a_sum_that_overflows_of_many() -> None:
    assert culprits(list(range(7)), lambda some: torch.tensor([math.inf if len(some) > 3 else 1.0])) == []


def test_a_loss_that_is_not_finite_is_logged_as_it_is(
    world: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were nothing to stop the run: the library's filter would write the mean of earlier losses in its place."""
    trainer = trainer_of(world, tmp_path / "out", training={"max_steps": 3})
    for name in ("check", "check_ranks"):
        monkeypatch.setattr(trainer.watch, name, lambda _: None)
    trainer.add_callback(Poison(trainer, step=2))
    trainer.train()
    logged = {entry["step"]: entry["loss"] for entry in entries_of(tmp_path / "out") if "loss" in entry}
    assert math.isfinite(logged[1]) and math.isnan(logged[2]) and math.isnan(logged[3])


def test_a_recipe_that_wants_it_hidden_is_refused(world: dict, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"training\.logging_nan_inf_filter would hide") as error:
        fit(recipe_of(world, tmp_path / "out", training={"logging_nan_inf_filter": True}))
    assert error.value.allowed == "false"
    trainer_of(world, tmp_path / "out", training={"logging_nan_inf_filter": False})
