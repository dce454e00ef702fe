"""The commands that the project exists for, as people type them, from any folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from medusa_train.config.catalog import distill_folder, newest_checkpoint, recipe_names, recipe_path
from medusa_train.config.load import load_recipe
from medusa_train.config.stages import missing_stage_one, stage_one_words
from medusa_train.errors import UserError
from tests.tiny import save_tiny_base

ROOT = Path(__file__).resolve().parents[2]
VICUNA = "models--lmsys--vicuna-7b-v1.3"
SMALL = ["base.quantization=null", "base.dtype=float32", "training.optim=adamw_torch", "training.bf16=false",
         "heads.medusa_num_heads=2", "data.max_length=256", "training.max_steps=2", "training.use_cpu=true",
         "data.max_drop_fraction=1.0", "data.heldout_fraction=0.3"]  # fmt: skip


def hub_with_vicuna(folder: Path) -> dict[str, str]:
    """An environment in which the hub's cache holds a tiny model under vicuna-7b's name, and nothing is online."""
    sha = "0" * 40
    save_tiny_base(folder / VICUNA / "snapshots" / sha, seed=3, max_position_embeddings=1024)
    (folder / VICUNA / "refs").mkdir()
    (folder / VICUNA / "refs" / "main").write_text(sha)
    return {"HF_HUB_CACHE": str(folder), "HF_HUB_OFFLINE": "1", "COLUMNS": "160", "NO_COLOR": "1"}


def run(*words: object, cwd: Path, env: dict[str, str], code: int = 0, python: str = sys.executable) -> str:
    found = subprocess.run(
        [python, "-m", "medusa_train", *map(str, words)],
        capture_output=True, text=True, cwd=cwd, env=os.environ | env, timeout=600,
    )  # fmt: skip
    assert found.returncode == code, f"{words}\n{found.stdout[-2000:]}\n{found.stderr[-4000:]}"
    assert "Traceback" not in found.stderr
    return found.stdout + found.stderr


def three_commands(cwd: Path, env: dict[str, str], python: str = sys.executable) -> None:
    """distill, fit of stage two, eval-acceptance: no path is said that another command has not."""
    told = run("distill", "--base", "vicuna-7b", "--limit", 24, "--max-new-tokens", 16, cwd=cwd, env=env, python=python)
    assert "prompts: those of the package, and 1000 that the model makes up" in told
    assert (cwd / "runs/vicuna-7b/distill/rows.jsonl").is_file()
    refused = run("fit", "--recipe", "medusa2.yaml", *SMALL, cwd=cwd, env=env, code=2, python=python)
    assert "medusa-train fit --recipe medusa1.yaml" in refused and "--with-stages" in refused
    run("fit", "--recipe", "medusa2.yaml", "--with-stages", "policy.drift.max_ce_increase=100",
        *SMALL, cwd=cwd, env=env, python=python)  # fmt: skip
    assert (cwd / "runs/vicuna-7b/medusa1/medusa_manifest.json").is_file()
    told = run("eval-acceptance", "--max-prompts", 2, "--max-new-tokens", 8, cwd=cwd, env=env, python=python)
    assert "checkpoint: runs/vicuna-7b/medusa2, the newest under runs/" in told
    report = json.loads((cwd / "runs/vicuna-7b/medusa2-report/report.json").read_text())
    assert report


@pytest.mark.slow
def test_the_three_commands_chain_as_typed(tmp_path: Path) -> None:
    env = hub_with_vicuna(tmp_path / "hub") | {"PYTHONPATH": str(ROOT)}
    (tmp_path / "empty").mkdir()
    three_commands(tmp_path / "empty", env)


@pytest.mark.slow
def test_the_wheel_alone_does_the_same(tmp_path: Path) -> None:
    """The wheel in a new environment outside the checkout; its dependencies are this environment's own."""
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "-q", "-w", str(tmp_path / "dist"), str(ROOT)]
    subprocess.run(build, check=True, timeout=600)
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True, timeout=300)
    python = tmp_path / "venv/bin/python"
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    # A PYTHONPATH that names the checkout would make pip find medusa-train installed already.
    install = [python, "-m", "pip", "install", "-q", "--no-deps", "--force-reinstall", str(wheel)]
    subprocess.run(install, check=True, timeout=300, env=os.environ | {"PYTHONPATH": ""})
    (packages,) = (tmp_path / "venv/lib").glob("python*/site-packages")
    dependencies = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "dependencies.pth").write_text("\n".join(dependencies) + "\n")
    (tmp_path / "empty").mkdir()
    env = hub_with_vicuna(tmp_path / "hub") | {"PYTHONPATH": ""}
    where = subprocess.run(
        [python, "-c", "import medusa_train; print(medusa_train.__file__)"],
        capture_output=True, text=True, cwd=tmp_path / "empty", env=os.environ | env, check=True,
    ).stdout  # fmt: skip
    assert where.startswith(str(packages))
    assert (packages / "medusa_train/py.typed").is_file()
    assert list(packages.glob("medusa_train-*.dist-info/licenses/LICENSE"))
    three_commands(tmp_path / "empty", env, str(python))


@pytest.mark.parametrize("name", ["medusa2", "medusa2.yaml", "recipes/medusa2.yaml"])
def test_a_recipe_of_the_package_is_found_from_any_folder(name: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_recipe(name).output_dir == "runs/vicuna-7b/medusa2"
    (tmp_path / "medusa2.yaml").write_text("a file here goes first")
    assert recipe_path("medusa2.yaml") == Path("medusa2.yaml")


def test_an_unknown_recipe_names_the_nearest(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as error:
        load_recipe("medusa-2.yaml")
    assert error.value.fix == "did you mean medusa2.yaml?"
    assert "qwen3-8b.yaml" in error.value.allowed


def test_deepspeed_configs_of_the_package_are_read_from_any_folder(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_recipe("medusa2-zero3").training["deepspeed"]["zero_optimization"]["stage"] == 3


@pytest.mark.parametrize(
    ("base", "folder"),
    [
        ("vicuna-7b", "runs/vicuna-7b/distill"),
        ("lmsys/vicuna-7b-v1.3", "runs/vicuna-7b/distill"),
        ("owner/other", "runs/other/distill"),
        ("./mine/", "runs/mine/distill"),
    ],
)
def test_distill_writes_where_recipes_read(base: str, folder: str) -> None:
    assert distill_folder(base) == folder


def test_every_recipe_on_a_plain_base_reads_where_distill_writes() -> None:
    for name in recipe_names():
        if not name.startswith(("quickstart", "tiny")):
            recipe = load_recipe(name)
            assert recipe.data.train == [distill_folder(recipe.base.name)], name


def test_stage_one_s_command_gives_heads_that_stage_two_takes(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    second = load_recipe("medusa2", ["base.name=./mine", "data.train=[rows]", "heads.medusa_num_heads=3"])
    assert missing_stage_one(second) == "runs/vicuna-7b/medusa1"
    words = stage_one_words(second)
    assert words[:2] == ["--recipe", "medusa1.yaml"]
    first = load_recipe(words[1], words[2:])
    assert (first.base, first.data, first.heads) == (second.base, second.data, second.heads)
    assert first.policy.kind == "heads_only" and first.output_dir == second.policy.init_from
    Path(first.output_dir).mkdir(parents=True)
    (Path(first.output_dir) / "medusa_manifest.json").write_text("{}")
    assert missing_stage_one(second) is None


def test_a_hub_id_to_begin_from_is_left_to_the_loader() -> None:
    assert missing_stage_one(load_recipe("medusa2", ["policy.init_from=owner/heads"])) is None


def test_the_newest_checkpoint_is_taken(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="none to take by default"):
        newest_checkpoint(tmp_path / "runs")
    for age, name in enumerate(("new", "old", ".half-written")):
        folder = tmp_path / "runs" / "base" / name
        folder.mkdir(parents=True)
        (folder / "medusa_manifest.json").write_text("{}")
        stamp = 2_000_000_000 - 100 * age if name != ".half-written" else 2_100_000_000
        os.utime(folder / "medusa_manifest.json", (stamp, stamp))
    assert newest_checkpoint(tmp_path / "runs").name == "new"
