"""Two processes on gloo: DDP through the command line, FSDP2 by hand, both against one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from medusa_train.checkpoint.load import load_checkpoint
from medusa_train.config.load import dump_recipe
from tests.training.support import losses_of, recipe_of, write_world

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
ROOT = Path(__file__).parents[2]


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
def test_fsdp2_gives_the_single_process_loss_and_gradients_and_full_tensors(tmp_path: Path) -> None:
    """`fully_shard` on a CPU mesh; heads and lm_head are read inside the root's forward, where they are whole."""
    out = tmp_path / "facts.json"
    run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "tests.training.ranks", str(out))
    facts = json.loads(out.read_text())
    assert facts["loss"] == pytest.approx(facts["single"], rel=1e-5)
    assert facts["worst"] < 1e-5
    assert facts["full_size"]
