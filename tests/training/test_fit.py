"""Whole runs on tiny models: every policy and contract, the cache, resuming, what is kept and what is refused."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from medusa_train.checkpoint.load import load_checkpoint, load_with_base
from medusa_train.cli.fit import tree_replay
from medusa_train.config.load import dump_recipe
from medusa_train.errors import UserError
from medusa_train.modeling.base import load_base
from medusa_train.modeling.fingerprint import tensor_hash
from medusa_train.training import fit as fit_module
from medusa_train.training.fit import fit
from medusa_train.training.state import COMPLETE, RunFolder
from tests.training.support import losses_of, recipe_of, write_world

REDUCED = {"medusa_num_heads": 3, "contract": "reduced", "reduced_vocab_size": 120}
CACHE = {"kind": "heads_only", "cache": {"enabled": True, "shard_rows": 200}}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return write_world(tmp_path_factory.mktemp("world"))


def checks(**more: object) -> dict:
    return {"eval_strategy": "steps", "eval_steps": 0.5, "save_strategy": "steps", "save_steps": 0.5, **more}


@pytest.mark.parametrize("contract", ["own", "shared", "reduced"])
def test_medusa_1_learns_and_leaves_every_backbone_tensor_bit_identical(
    world: dict, tmp_path: Path, contract: str
) -> None:
    base = load_base(world["base"], dtype="float32")
    before = {name: tensor_hash(tensor) for name, tensor in base.model.state_dict().items()}
    heads = REDUCED if contract == "reduced" else {"medusa_num_heads": 3, "contract": contract}
    recipe = recipe_of(world, tmp_path / "out", training=checks(num_train_epochs=6), heads=heads)
    output = fit(recipe, base=base, replay=tree_replay(7))
    assert {name: tensor_hash(tensor) for name, tensor in base.model.state_dict().items()} == before
    losses = losses_of(tmp_path / "out")
    assert losses[max(losses)] < 0.95 * losses[1]
    loaded = load_checkpoint(output, base, verify="hashes")
    assert loaded.manifest.policy == "heads_only"
    assert loaded.manifest.training["heldout"]["tokens_per_round"] >= 1.0
    assert loaded.manifest.recipe["loss"]["head_weights"] == pytest.approx([0.8, 0.64, 0.512])


def test_training_from_the_cache_is_training_from_the_backbone(world: dict, tmp_path: Path) -> None:
    """The same rows in one batch per step: the first losses differ by the bf16 of the stored states only."""
    one_step = {"per_device_train_batch_size": 10_000, "num_train_epochs": 1, "max_steps": 1}
    fit(recipe_of(world, tmp_path / "live", training=one_step))
    fit(recipe_of(world, tmp_path / "cached", CACHE, training=one_step))
    live, cached = losses_of(tmp_path / "live")[1], losses_of(tmp_path / "cached")[1]
    assert cached == pytest.approx(live, rel=2**-8)


def test_a_cache_is_built_once_resumed_by_shard_and_refused_when_stale(world: dict, tmp_path: Path) -> None:
    policy = {"kind": "heads_only", "cache": {"enabled": True, "shard_rows": 200, "folder": str(tmp_path / "cache")}}
    fit(recipe_of(world, tmp_path / "a", policy))
    shards = sorted((tmp_path / "cache" / "train").glob("shard-*"))
    assert len(shards) > 2
    written = {path: path.stat().st_mtime_ns for path in shards}
    shards[1].unlink()
    fit(recipe_of(world, tmp_path / "b", policy))
    kept = {path: path.stat().st_mtime_ns for path in shards}
    assert [kept[path] == written[path] for path in shards] == [index != 1 for index in range(len(shards))]
    states = load_file(shards[0])
    assert states["hidden"].dtype == torch.bfloat16 and states["labels"].shape[1] == 3
    with pytest.raises(UserError, match="made for something else") as error:
        fit(recipe_of(world, tmp_path / "c", policy, heads={"medusa_num_heads": 2}))
    assert "shifts: [2, 3, 4] there, [2, 3] here" in error.value.what


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("adapter", "contract"),
    [
        ("lora", "own"),
        ("none", "shared"),
        pytest.param("lora", "shared", marks=SLOW),
        pytest.param("none", "own", marks=SLOW),
    ],
)
def test_medusa_2_changes_the_backbone_and_saves_it(world: dict, tmp_path: Path, adapter: str, contract: str) -> None:
    policy = {"kind": "joint", "adapter": adapter, "drift": {"max_ce_increase": None}}
    if adapter == "lora":
        policy["lora"] = {"r": 4}
    heads = {"medusa_num_heads": 2, "contract": contract}
    output = fit(recipe_of(world, tmp_path / "out", policy, training=checks(), heads=heads), replay=tree_replay(5))
    base, loaded = load_with_base(output)
    assert loaded.manifest.backbone.changed == ("adapter" if adapter == "lora" else "merged")
    facts = loaded.manifest.training["heldout"]
    assert facts["drift_kl"] > 0 and facts["lm_loss"] > 0
    changed = base.model(torch.tensor([[3, 4, 5]])).logits
    original = load_base(world["base"], dtype="float32").model(torch.tensor([[3, 4, 5]])).logits
    assert not torch.allclose(changed, original, atol=1e-3)


def test_self_distilled_medusa_2_drifts_less_than_direct(world: dict, tmp_path: Path) -> None:
    drift = {"max_ce_increase": None}
    for kind in ("joint", "self_distill"):
        policy = {"kind": kind, "lora": {"r": 4}, "drift": drift}
        fit(recipe_of(world, tmp_path / kind, policy, training=checks()), replay=tree_replay(5))
    kl = {
        kind: load_checkpoint(tmp_path / kind).manifest.training["heldout"]["drift_kl"]
        for kind in ("joint", "self_distill")
    }
    assert kl["self_distill"] < 0.2 * kl["joint"]


def test_a_drift_above_the_bound_fails_the_run(world: dict, tmp_path: Path) -> None:
    policy = {"kind": "joint", "lora": {"r": 4}, "drift": {"max_ce_increase": None, "max_kl": 1e-4}}
    with pytest.raises(UserError, match="drifted too far"):
        fit(recipe_of(world, tmp_path / "out", policy, training=checks()))
    assert not (tmp_path / "out").exists()


def test_two_stages_begin_where_medusa_1_ended(world: dict, tmp_path: Path) -> None:
    """`init_from`: the first head losses of stage two are the held-out ones that stage one saved, within 1e-3."""
    first = fit(recipe_of(world, tmp_path / "one", training=checks(num_train_epochs=4)), replay=tree_replay(5))
    before = load_checkpoint(first).manifest.training["heldout"]
    policy = {"kind": "joint", "lora": {"r": 4}, "init_from": str(first), "drift": {"max_ce_increase": None}}
    fit(recipe_of(world, tmp_path / "two", policy, training=checks(learning_rate=1e-9, max_steps=2)))
    after = load_checkpoint(tmp_path / "two").manifest.training["heldout"]
    for head in range(3):
        assert after[f"head{head}_loss"] == pytest.approx(before[f"head{head}_loss"], abs=1e-3)


def test_heads_of_another_shape_are_refused_as_a_beginning(world: dict, tmp_path: Path) -> None:
    first = fit(recipe_of(world, tmp_path / "one", training={"max_steps": 1}))
    policy = {"kind": "joint", "lora": {"r": 2}, "init_from": str(first)}
    with pytest.raises(UserError, match="medusa_num_heads 3 there, 2 in the recipe"):
        fit(recipe_of(world, tmp_path / "two", policy, heads={"medusa_num_heads": 2}))


def test_a_finished_run_is_not_trained_again_and_a_changed_recipe_is_refused(
    world: dict, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    recipe = recipe_of(world, tmp_path / "out", training={"max_steps": 2})
    fit(recipe)
    capfd.readouterr()
    fit(recipe)
    assert "trained by this very recipe already" in capfd.readouterr().err
    other = recipe_of(world, tmp_path / "out", training={"max_steps": 3})
    with pytest.raises(UserError, match=r"training\.max_steps: 2 -> 3"):
        fit(other)
    fit(other, restart=True)
    assert max(losses_of(tmp_path / "out")) == 3


def test_the_best_check_is_kept_and_patience_ends_the_run(world: dict, tmp_path: Path) -> None:
    """A replay that says 1.5 at the second check and less afterwards: that one is saved, the run ends at the fifth."""
    values = iter([1.2, 1.5, 1.3, 1.4, 1.1])
    seen: list[dict] = []

    def replay(spans) -> dict[str, float]:
        value = next(values, 1.5)
        seen.append({"tokens_per_round": value})
        return seen[-1]

    recipe = recipe_of(
        world, tmp_path / "out", evaluation={"early_stopping_patience": 3},
        training={"eval_strategy": "steps", "eval_steps": 1, "num_train_epochs": 4},
    )  # fmt: skip
    fit(recipe, replay=replay)
    run = RunFolder.of(recipe)
    facts = json.loads((run.best / "best.json").read_text())
    assert (facts["step"], facts["metric"], facts["value"]) == (2, "tokens_per_round", 1.5)
    assert max(losses_of(tmp_path / "out")) == 5
    saved = load_checkpoint(tmp_path / "out").heads.state_dict()
    best = load_file(run.best / "trainable.safetensors")
    assert all(torch.equal(best[f"heads.{name}"], tensor) for name, tensor in saved.items())


class Stop(TrainerCallback):
    """Dies at the end of a step, after the step's log was written."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_log(self, args, state, control, **kwargs) -> None:
        if state.global_step >= self.step:
            raise KeyboardInterrupt


RESUMED = [
    ("heads_only", {"gradient_accumulation_steps": 2}),
    pytest.param(CACHE, {"per_device_train_batch_size": 64}, marks=SLOW),
    ({"kind": "joint", "lora": {"r": 2, "dropout": 0.3}, "drift": {"max_ce_increase": None}}, {}),
]


@pytest.mark.parametrize(("policy", "training"), RESUMED, ids=["accumulated", "cached", "dropout"])
def test_a_resumed_run_is_the_uninterrupted_run_bit_for_bit(
    world: dict, tmp_path: Path, policy, training: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted twice, once between two saves: data order, RNG, optimizer, schedule all go on (CPU, fp32)."""
    training = {**training, "save_strategy": "steps", "save_steps": 2, "num_train_epochs": 3}
    fit(recipe_of(world, tmp_path / "whole", policy, training=training))
    whole = losses_of(tmp_path / "whole")
    build = fit_module.build_trainer
    for stop in (3, 7, None):

        def stopping(*args, stop=stop, **kwargs):
            trainer = build(*args, **kwargs)
            if stop is not None:
                trainer.add_callback(Stop(stop))
            return trainer

        monkeypatch.setattr(fit_module, "build_trainer", stopping)
        try:
            fit(recipe_of(world, tmp_path / "cut", policy, training=training))
        except KeyboardInterrupt:
            assert stop is not None
    assert losses_of(tmp_path / "cut") == whole
    left, right = (load_checkpoint(tmp_path / name).heads.state_dict() for name in ("whole", "cut"))
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_checkpoints_of_a_run_hold_no_backbone_and_torn_ones_are_left_aside(world: dict, tmp_path: Path) -> None:
    recipe = recipe_of(world, tmp_path / "out", training={"save_strategy": "steps", "save_steps": 2, "max_steps": 6})
    fit(recipe)
    run = RunFolder.of(recipe)
    folders = sorted(run.state.glob("checkpoint-*"))
    assert [folder.name for folder in folders] == ["checkpoint-4", "checkpoint-6"]
    names = set(load_file(folders[0] / "trainable.safetensors"))
    assert names and all(name.startswith("heads.") for name in names)
    (folders[1] / COMPLETE).unlink()
    assert run.last_whole() == folders[0]
    run.remove_torn()
    assert not folders[1].exists()


def test_a_crash_while_saving_leaves_the_checkpoint_before_it(
    world: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from medusa_train.training.trainer import MedusaTrainer

    recipe = recipe_of(world, tmp_path / "out", training={"save_strategy": "steps", "save_steps": 2, "max_steps": 6})
    save = MedusaTrainer._save_optimizer_and_scheduler
    calls: list[str] = []

    def failing(self, output_dir: str) -> None:
        calls.append(output_dir)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        save(self, output_dir)

    monkeypatch.setattr(MedusaTrainer, "_save_optimizer_and_scheduler", failing)
    with pytest.raises(OSError):
        fit(recipe)
    assert RunFolder.of(recipe).last_whole().name == "checkpoint-2"
    monkeypatch.setattr(MedusaTrainer, "_save_optimizer_and_scheduler", save)
    fit(recipe)
    assert sorted(losses_of(tmp_path / "out")) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("policy", ["heads_only", {"kind": "joint", "lora": {"r": 2}}], ids=["heads_only", "lora"])
def test_a_trial_save_that_fails_ends_the_run_before_its_first_step(world: dict, tmp_path: Path, policy) -> None:
    """Something lies in the way of the file: safetensors fails after it has written all of it under another name."""
    recipe = recipe_of(world, tmp_path / "out", policy)
    folder = RunFolder.of(recipe).path
    (folder / ".dry" / ".trainable.safetensors.partial").mkdir(parents=True)
    with pytest.raises(UserError, match=r"a trial save failed: .*Is a directory") as error:
        fit(recipe)
    assert error.value.where == str(folder)
    assert [path.name for path in folder.rglob("*") if path.is_file()] == ["recipe.json"]
    assert not (folder / ".dry").exists() and not (tmp_path / "out").exists()


FSDP = {
    "version": ({"fsdp_config": {"version": 1}}, "float32", "FSDP of version 1 keeps no names", "version=2"),
    "dtypes": ({}, "bfloat16", "FSDP needs one dtype, this run has bfloat16, float32", "base.dtype=float32"),
}


@pytest.mark.parametrize(("training", "dtype", "what", "fix"), FSDP.values(), ids=FSDP)
def test_fsdp_that_cannot_work_is_refused(
    world: dict, tmp_path: Path, training: dict, dtype: str, what: str, fix: str
) -> None:
    base = {"name": world["base"], "dtype": dtype}
    with pytest.raises(UserError, match=what) as error:
        fit(recipe_of(world, tmp_path / "out", base=base, training={"fsdp": True, **training}))
    assert fix in error.value.fix


@pytest.mark.slow
def test_ten_sigkills_at_random_steps_change_nothing(world: dict, tmp_path: Path) -> None:
    training = {"save_strategy": "steps", "save_steps": 1, "num_train_epochs": 24, "gradient_accumulation_steps": 2}
    policy = {"kind": "joint", "lora": {"r": 2, "dropout": 0.2}, "drift": {"max_ce_increase": None}}
    fit(recipe_of(world, tmp_path / "whole", policy, training=training))
    whole = losses_of(tmp_path / "whole")
    path = tmp_path / "recipe.yaml"
    path.write_text(dump_recipe(recipe_of(world, tmp_path / "cut", policy, training=training)))
    words = "\t".join(["fit", "--recipe", str(path), "--no-launch"]) + "\n"
    log = tmp_path / "cut.run" / "log.jsonl"
    generator = random.Random(0)

    def logged() -> int:
        return log.read_text().count("\n") if log.exists() else 0

    with subprocess.Popen(
        [sys.executable, "-m", "tests.training.nursery"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        stderr=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=Path(__file__).parents[2], bufsize=1,
    ) as nursery:  # fmt: skip
        kills = 0
        for _ in range(10):
            lines, more = logged(), generator.randint(1, 4)
            nursery.stdin.write(words)
            child = int(nursery.stdout.readline())
            deadline = time.monotonic() + 120
            while logged() < lines + more and not (tmp_path / "cut.run" / "finished.json").exists():
                assert time.monotonic() < deadline, "the run takes no steps"
                time.sleep(0.002)
            time.sleep(generator.random() * 0.05)
            os.kill(child, signal.SIGKILL)
            kills += int(nursery.stdout.readline()) == -signal.SIGKILL
        nursery.stdin.write(words)
        nursery.stdout.readline()
        assert int(nursery.stdout.readline()) == 0
        nursery.stdin.close()
    assert kills == 10
    assert losses_of(tmp_path / "cut") == whole
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    assert len(entries) > len(whole) + 3, "some steps were taken again after a kill"
