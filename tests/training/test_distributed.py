"""Two processes on gloo against one: DDP, FSDP2 and ZeRO through the whole command, an FSDP2 step by hand; errors."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from medusa_train.checkpoint.load import load_checkpoint
from medusa_train.config.load import dump_recipe, load_recipe
from medusa_train.config.recipe import Recipe
from medusa_train.training.fit import fit
from tests.training.ranks import first_gradients, rank_trainer
from tests.training.support import losses_of, recipe_of, write_world

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
ROOT = Path(__file__).parents[2]
RANKS = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "tests.training.ranks"]
LORA = {"kind": "joint", "lora": {"r": 2, "dropout": 0.0}, "drift": {"max_ce_increase": None}}
NEEDS_DEEPSPEED = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
FSDP2 = {
    name: value
    for name, value in load_recipe(ROOT / "recipes" / "medusa2-fsdp2.yaml").training.items()
    if name in ("fsdp", "fsdp_config")
}
FULL = {"kind": "joint", "adapter": "none", "drift": {"max_ce_increase": None}}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return write_world(tmp_path_factory.mktemp("world"))


def run(*words: str) -> None:
    done = subprocess.run(
        [sys.executable, *words], env=ENVIRONMENT, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]


def fit_by_command(world: dict, path: Path, processes: int, batch: int, policy) -> Path:
    """A run of the same optimizer steps, split over `processes`."""
    training = {
        "per_device_train_batch_size": batch, "num_train_epochs": 1, "max_steps": 4, "eval_strategy": "steps",
        "eval_steps": 2, "save_strategy": "steps", "save_steps": 2, "max_grad_norm": 0.0,
        "train_sampling_strategy": "sequential",
    }  # fmt: skip
    recipe = recipe_of(world, path, policy, training=training)
    file = path.with_suffix(".yaml")
    file.write_text(dump_recipe(recipe))
    words = ["--nproc", str(processes)] if processes > 1 else ["--no-launch"]
    run("-m", "medusa_train", "fit", "--recipe", str(file), *words)
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy",
    ["heads_only", {"kind": "heads_only", "cache": {"enabled": True, "shard_rows": 200}}],
    ids=["live", "cached"],
)
def test_two_ranks_of_two_give_the_losses_of_one_of_four(world: dict, tmp_path: Path, policy) -> None:
    batch = 4 if policy == "heads_only" else 64
    one = fit_by_command(world, tmp_path / "one", 1, batch, policy)
    two = fit_by_command(world, tmp_path / "two", 2, batch // 2, policy)
    single, double = losses_of(one), losses_of(two)
    assert single.keys() == double.keys() and len(single) == 4
    for step, loss in single.items():
        assert double[step] == pytest.approx(loss, rel=1e-5), step
    left, right = load_checkpoint(one), load_checkpoint(two)
    for name in ("head0_loss", "head2_top1", "medusa_loss", "tokens_per_round"):
        assert right.manifest.training["heldout"][name] == pytest.approx(
            left.manifest.training["heldout"][name], rel=1e-4
        )
    shapes = {name: tensor.shape for name, tensor in left.heads.state_dict().items()}
    assert {name: tensor.shape for name, tensor in right.heads.state_dict().items()} == shapes


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["heads_only", LORA, FULL], ids=["heads_only", "lora", "full"])
def test_two_ranks_that_accumulate_two_give_the_gradients_of_one_batch(world: dict, tmp_path: Path, policy) -> None:
    """Four rows of unlike length: 4 x 1, 1 x 4 and 2 ranks x 2, to 1e-6 of the largest gradient in fp32."""

    def of(name: str, batch: int, accumulated: int) -> Recipe:
        training = {
            "per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulated, "max_steps": 1,
            "max_grad_norm": 0.0, "train_sampling_strategy": "sequential",
        }  # fmt: skip
        data = {"train": [world["data"]], "packing": False, "max_length": 96}
        return recipe_of(world, tmp_path / name, policy, training=training, data=data)

    whole = first_gradients(of("whole", 4, 1))
    found = {"1 x 4": first_gradients(of("parts", 1, 4))}
    file = tmp_path / "ranks.yaml"
    file.write_text(dump_recipe(of("ranks", 1, 2)))
    run(*RANKS, "gradients", str(file), str(tmp_path))
    found |= {f"rank {rank}": load_file(tmp_path / f"{rank}.safetensors") for rank in (0, 1)}
    largest = max(gradient.abs().max() for gradient in whole.values())
    for name, gradients in found.items():
        assert gradients.keys() == whole.keys() and len(whole) > 6
        worst = max((gradients[key] - gradient).abs().max() for key, gradient in whole.items())
        assert worst <= 1e-6 * largest, (name, worst / largest)


@pytest.mark.slow
def test_all_ranks_tell_the_rows_of_the_rank_that_met_the_first_loss_that_is_not_finite(
    world: dict, tmp_path: Path
) -> None:
    """Noticed after step 3; from step 3 on the averaged gradient has made every rank's loss NaN."""
    training = {"per_device_train_batch_size": 1, "max_steps": 3, "logging_steps": 3, "max_grad_norm": 0.0,
                "train_sampling_strategy": "sequential"}  # fmt: skip
    data = {"train": [world["data"]], "packing": False, "max_length": 96}
    recipe = recipe_of(world, tmp_path / "out", training=training, data=data)
    file = tmp_path / "recipe.yaml"
    file.write_text(dump_recipe(recipe))
    run(*RANKS, "problem", str(file), str(tmp_path))
    told = [(tmp_path / f"{rank}.txt").read_text() for rank in (0, 1)]
    (row,) = rank_trainer(recipe).train_dataset.bins[3]  # step 1: bins 0 and 1; step 2: 2, and 3 on rank 1
    assert told[0] == told[1]
    assert told[0].startswith(f"step 2, rows {row.source} (the whole micro-batch): the loss is not finite; sums head0 ")


@pytest.mark.slow
def test_fsdp2_gives_the_single_process_loss_and_gradients_and_full_tensors(tmp_path: Path) -> None:
    """`fully_shard` on a CPU mesh; heads and lm_head are read inside the root's forward, where they are whole."""
    out = tmp_path / "facts.json"
    run(
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "tests.training.ranks",
        "fsdp2",
        str(out),
    )
    facts = json.loads(out.read_text())
    assert facts["loss"] == pytest.approx(facts["single"], rel=1e-5)
    assert facts["worst"] < 1e-5
    assert facts["full_size"]


@pytest.mark.slow
@pytest.mark.parametrize("policy", [LORA, FULL], ids=["lora", "full"])
def test_fsdp2_in_bf16_rounds_no_sum_and_keeps_no_whole_weight(world: dict, tmp_path: Path, policy) -> None:
    """With a learning rate of 1e-12 nothing drifts: the first and the last check find the backbone as it was."""
    training = {**FSDP2, "bf16": True, "per_device_train_batch_size": 2, "max_steps": 2, "learning_rate": 1e-12,
                "weight_decay": 0.0}  # fmt: skip
    file = tmp_path / "sharded.yaml"
    file.write_text(dump_recipe(recipe_of(world, tmp_path / "out", policy, training=training)))
    run(*RANKS, "sharded", str(file), str(tmp_path))
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert facts["dtypes"] == ["torch.float32"]
    assert facts["tensors"] > 20 and facts["alive"] == 0
    assert len(facts["drift"]) == 2
    for ce, kl, same in facts["drift"]:
        assert abs(ce) < 1e-6 and abs(kl) < 1e-6 and same == 1.0


def fit_sharded(world: dict, tmp_path: Path, policy, sharding: dict) -> tuple[Path, Path]:
    """One process of four rows a step, in this process, and two sharded ones of two, launched; both output folders."""
    steps = {"max_steps": 4, "num_train_epochs": 1, "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps",
             "save_steps": 2, "train_sampling_strategy": "sequential"}  # fmt: skip
    one, two = tmp_path / "one", tmp_path / "two"
    fit(recipe_of(world, one, policy, training={**steps, "per_device_train_batch_size": 4}))
    recipe = recipe_of(world, two, policy, training={**steps, **sharding, "per_device_train_batch_size": 2})
    two.with_suffix(".yaml").write_text(dump_recipe(recipe))
    run("-m", "medusa_train", "fit", "--recipe", str(two.with_suffix(".yaml")), "--nproc", "2")
    return one, two


def check_same(one: Path, two: Path) -> None:
    """Losses, held-out metrics, and every stored tensor whole and the same."""
    single, double = losses_of(one), losses_of(two)
    assert double == {step: pytest.approx(loss, rel=1e-5) for step, loss in single.items()} and len(single) == 4
    left, right = load_checkpoint(one), load_checkpoint(two, verify="hashes")
    left_facts, right_facts = left.manifest.training["heldout"], right.manifest.training["heldout"]
    for name in ("lm_loss", "head0_loss", "head2_top1", "medusa_loss"):
        if name in left_facts:
            assert right_facts[name] == pytest.approx(left_facts[name], rel=1e-4), name
    for name, tensor in left.heads.state_dict().items():
        assert torch.allclose(right.heads.state_dict()[name], tensor, atol=1e-4), name
    for path in one.rglob("*.safetensors"):
        sizes = {name: tensor.shape for name, tensor in load_file(path).items()}
        assert {n: t.shape for n, t in load_file(two / path.relative_to(one)).items()} == sizes
        assert all(0 not in shape for shape in sizes.values())


def check_resumed(two: Path) -> None:
    """With its second half thrown away the sharded run goes on to the same losses and tensors, bit for bit."""
    folder = two.with_name("two.run")
    whole, first = losses_of(two), two.rename(two.with_name("first"))
    shutil.rmtree(folder / "state" / "checkpoint-4")
    (folder / "finished.json").unlink()
    run("-m", "medusa_train", "fit", "--recipe", str(two.with_suffix(".yaml")), "--nproc", "2")
    steps = [json.loads(line)["step"] for line in (folder / "log.jsonl").read_text().splitlines() if '"loss"' in line]
    assert steps == [1, 2, 3, 4, 3, 4]
    assert losses_of(two) == whole
    for path in first.rglob("*.safetensors"):
        again = load_file(two / path.relative_to(first))
        assert all(torch.equal(again[name], tensor) for name, tensor in load_file(path).items()), path.name


def check_no_frozen_tensor_in_deepspeeds_files(checkpoint: Path, ranks: int) -> None:
    """They hold the tensors of `trainable.safetensors` (whole or a shard), and every rank's part of the optimizer."""
    trained = load_file(checkpoint / "trainable.safetensors")
    models = list(checkpoint.glob("global_step*/*model_states.pt"))
    assert models and len(list(checkpoint.glob("global_step*/*optim_states.pt"))) == ranks
    for path in models:
        state = torch.load(path, map_location="cpu", weights_only=False)  # DeepSpeed's files are pickles
        assert state["module"].keys() == trained.keys(), path.name
        assert state["frozen_param_fragments"] is None and state["frozen_param_shapes"] is None


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["heads_only", LORA, FULL], ids=["heads_only", "lora", "full"])
def test_fsdp2_through_the_command_gives_the_single_process_run(world: dict, tmp_path: Path, policy) -> None:
    one, two = fit_sharded(world, tmp_path, policy, FSDP2)
    check_same(one, two)
    trained = set(load_file(tmp_path / "two.run" / "state" / "checkpoint-2" / "trainable.safetensors"))
    assert any(name.startswith("backbone.") for name in trained) == (policy != "heads_only")
    names = {path.name for path in (tmp_path / "two.run" / "state" / "checkpoint-2").iterdir()}
    assert "optimizer.bin" in names and not any("model" in name for name in names), names
    if policy == LORA:
        check_resumed(two)


@pytest.mark.slow
@pytest.mark.parametrize("sharding", [{}, FSDP2], ids=["ddp", "fsdp2"])
def test_compiled_layers_on_two_ranks(world: dict, tmp_path: Path, sharding: dict) -> None:
    check_same(*fit_sharded(world, tmp_path, LORA, {**sharding, "torch_compile_backend": "aot_eager"}))


@pytest.mark.slow
@NEEDS_DEEPSPEED
@pytest.mark.parametrize("policy", ["heads_only", LORA], ids=["heads_only", "lora"])
@pytest.mark.parametrize("stage", [2, 3])
def test_zero_through_the_command_gives_the_single_process_run(world: dict, tmp_path: Path, stage: int, policy) -> None:
    """The recipes' own json, on DeepSpeed's CPU accelerator over gloo."""
    one, two = fit_sharded(world, tmp_path, policy, {"deepspeed": str(ROOT / "recipes" / f"zero{stage}.json")})
    check_same(one, two)
    check_no_frozen_tensor_in_deepspeeds_files(tmp_path / "two.run" / "state" / "checkpoint-2", ranks=2)
    check_resumed(two)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fsdp2", pytest.param("zero3", marks=NEEDS_DEEPSPEED)])
def test_a_sharded_run_tries_to_save_before_its_first_step(world: dict, tmp_path: Path, kind: str) -> None:
    """Something lies in the way of the file: one block, exit code 2, no step taken, nothing left of the trial."""
    sharding = FSDP2 if kind == "fsdp2" else {"deepspeed": str(ROOT / "recipes" / "zero3.json")}
    recipe = recipe_of(world, tmp_path / "out", training={**sharding, "per_device_train_batch_size": 2})
    (tmp_path / "recipe.yaml").write_text(dump_recipe(recipe))
    folder = tmp_path / "out.run"
    (folder / ".dry" / ".trainable.safetensors.partial").mkdir(parents=True)
    done = subprocess.run(
        [sys.executable, "-m", "medusa_train", "fit", "--recipe", str(tmp_path / "recipe.yaml"), "--nproc", "2"],
        env=ENVIRONMENT, cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert done.stderr.count(f"error: {folder}: a trial save failed: [Errno 21] Is a directory") == 1
    assert "Traceback" not in done.stderr and "rank 0" not in done.stderr
    assert [path.name for path in folder.rglob("*") if path.is_file()] == ["recipe.json"]
    assert not (folder / ".dry").exists() and not (tmp_path / "out").exists()


@pytest.mark.slow
def test_what_ranks_die_of_is_one_block_and_exit_code_2(world: dict, tmp_path: Path) -> None:
    words = ["-m", "medusa_train", "fit", "--recipe", str(ROOT / "recipes" / "tiny-medusa1.yaml"), "--nproc", "2"]
    words += [f"base.name={world['base']}", f"output_dir={tmp_path / 'out'}", "data.train=[nowhere.jsonl]"]
    done = subprocess.run(
        [sys.executable, *words], env=ENVIRONMENT, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("error: nowhere.jsonl: no such file or folder") == 1
    assert done.stderr.rstrip().endswith("give a file, a folder or a hub dataset id (owner/name[:split])")
    assert "Traceback" not in done.stderr and "torch.distributed" not in done.stderr
