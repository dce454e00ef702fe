"""`fit` as a person runs it: tiny recipes, refusals, loggers, checkpointing, compiling, quantized bases."""

from __future__ import annotations

import importlib.util
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from medusa_train.checkpoint.load import load_checkpoint
from medusa_train.config.load import load_recipe
from medusa_train.config.recipe import Recipe
from medusa_train.errors import UserError
from medusa_train.modeling.sources import find_source
from medusa_train.training.compiling import compile_blocks
from medusa_train.training.fit import fit, load_recipe_base
from tests.tiny import tiny_model
from tests.training.curves import read_curve
from tests.training.support import entries_of, losses_of, recipe_of, write_data, write_world

ROOT = Path(__file__).parents[2]
TINY = sorted((ROOT / "recipes").glob("tiny-*.yaml"))
LORA = {"kind": "joint", "lora": {"r": 2, "dropout": 0.0}, "drift": {"max_ce_increase": None}}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return write_world(tmp_path_factory.mktemp("world"))


def invoke(*words: str):
    from typer.testing import CliRunner

    from medusa_train.cli.app import build_app

    return CliRunner().invoke(build_app(), list(words))


@pytest.mark.parametrize("path", TINY, ids=lambda path: path.stem)
def test_tiny_recipes_run_through_the_command_line(world: dict, tmp_path: Path, path: Path) -> None:
    if path.stem == "tiny-compiled" and not shutil.which(os.environ.get("CXX") or "g++"):
        pytest.skip("no C++ compiler")
    out = tmp_path / "heads"
    overrides = [f"base.name={world['base']}", f"data.train=[{world['data']}]", f"output_dir={out}"]
    overrides += ["data.max_length=96"]
    if path.stem == "tiny-cache":  # reduced to fewer tokens than the tiny base has
        overrides += ["heads.reduced_vocab_size=100"]
    result = invoke("fit", "--recipe", str(path), "--no-launch", *overrides)
    assert result.exit_code == 0, (result.output, result.exception)
    check_tiny_run(path, out)


@pytest.mark.slow
@pytest.mark.parametrize("path", TINY, ids=lambda path: path.stem)
def test_tiny_recipes_as_they_are_on_smollm2(tmp_path: Path, path: Path) -> None:
    """Only rows and output are others: what the header says (under a minute, the loss falls) holds."""
    try:
        find_source("smollm2-135m")
    except UserError as problem:
        pytest.skip(f"no SmolLM2 here: {problem.what}")
    data, out = write_data(tmp_path / "rows.jsonl"), tmp_path / "heads"
    began = time.process_time()
    result = invoke("fit", "--recipe", str(path), "--no-launch", f"data.train=[{data}]", f"output_dir={out}")
    assert result.exit_code == 0, (result.output, result.exception)
    assert time.process_time() - began < 120, "two cores for a minute"
    check_tiny_run(path, out)


def check_tiny_run(path: Path, out: Path) -> None:
    manifest, recipe = load_checkpoint(out, verify="hashes").manifest, load_recipe(path)
    assert manifest.training["steps"] == 6
    assert manifest.training["heldout"]["tokens_per_round"] >= 1.0  # the command hands a replay to fit
    assert manifest.recipe["heads"]["contract"] == recipe.heads.contract
    losses, entries = losses_of(out), entries_of(out)
    assert sorted(losses) == [1, 2, 3, 4, 5, 6]
    held = [entry["eval_head0_loss"] for entry in entries if "eval_head0_loss" in entry]
    assert len(held) == 2 and held[1] < held[0]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["training.learning_rte=1"], "did you mean 'training.learning_rate'"),
        (["data.train=[nowhere.jsonl]"], "nowhere.jsonl"),
        (["training.optim=adamm"], "adamm"),
        (["base.name=no/where/at/all"], "no/where/at/all"),
    ],
)
def test_wrong_input_is_a_user_error(world: dict, tmp_path: Path, words: list[str], told: str) -> None:
    recipe = ["--recipe", str(TINY[0]), "--no-launch", f"base.name={world['base']}", f"output_dir={tmp_path / 'out'}"]
    result = invoke("fit", *recipe, f"data.train=[{world['data']}]", *words)
    assert isinstance(result.exception, UserError), result.exception
    assert told in str(result.exception)
    assert not (tmp_path / "out").exists()


def test_the_process_says_it_in_one_block_and_exits_with_2(tmp_path: Path) -> None:
    for words in (["training.learning_rte=1"], ["--nporc", "2"]):
        command = [sys.executable, "-m", "medusa_train", "fit", "--recipe", str(TINY[0]), *words]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
        assert done.returncode == 2, done.stderr[-2000:]
        assert words[0].strip("-").split(".")[-1].split("=")[0] in done.stderr and "Traceback" not in done.stderr


def test_activation_checkpointing_gives_the_same_losses(world: dict, tmp_path: Path) -> None:
    for name, on in (("off", False), ("on", True)):
        fit(recipe_of(world, tmp_path / name, LORA, training={"max_steps": 3, "activation_checkpointing": on}))
    on, off = losses_of(tmp_path / "on"), losses_of(tmp_path / "off")
    assert on == pytest.approx(off, rel=1e-5)


DISTILL = {"kind": "self_distill", "lora": {"r": 2, "dropout": 0.0}}
CHECKPOINTED = {"activation_checkpointing": True}


@pytest.mark.parametrize(
    ("family", "policy", "training", "graphs"),
    [
        # One compilation serves all layers of a kind: by mask or none, and with gradients. Held-out rows have no mask.
        ("llama-tied", "heads_only", {}, 2),
        ("llama-tied", LORA, {}, 4),
        pytest.param("llama-tied", LORA, CHECKPOINTED, 4, marks=pytest.mark.slow),
        pytest.param("llama-tied", DISTILL, {}, 6, marks=pytest.mark.slow),
        ("gemma3", "heads_only", {}, 4),
    ],
    ids=["heads_only", "joint", "checkpointed", "self_distill", "two kinds of layers"],
)
def test_compiled_layers_give_the_same_losses(tmp_path: Path, family: str, policy, training, graphs: int) -> None:
    world = write_world(tmp_path / "world", family)
    training = {**training, "max_steps": 4, "eval_strategy": "steps", "eval_steps": 2}
    fit(recipe_of(world, tmp_path / "plain", policy, training=training))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = {**training, "torch_compile_backend": "aot_eager"}
    fit(recipe_of(world, tmp_path / "compiled", policy, training=compiled))
    assert losses_of(tmp_path / "compiled") == pytest.approx(losses_of(tmp_path / "plain"), rel=1e-5)
    assert 0 < torch._dynamo.utils.counters["stats"]["unique_graphs"] <= graphs
    assert not torch._dynamo.utils.counters["graph_break"]
    load_checkpoint(tmp_path / "compiled", verify="hashes")


def test_deepspeed_and_models_without_layers_are_not_compiled() -> None:
    model = tiny_model("llama")
    with pytest.raises(UserError, match="does not go with deepspeed"):
        compile_blocks(model, {"torch_compile": True, "deepspeed": "recipes/zero2.json"})
    model._no_split_modules = None  # the decoder's own list serves as well
    assert compile_blocks(model, {"torch_compile_backend": "eager"}) == list(model.model.layers)
    model.model.layers = torch.nn.Identity()
    with pytest.raises(UserError, match="no list of layers"):
        compile_blocks(model, {"torch_compile_backend": "eager"})


def test_the_reference_implementation_trains_the_same(world: dict, tmp_path: Path) -> None:
    for name in ("fused", "reference"):
        loss = {"implementation": name, "chunk_rows": 7}
        fit(recipe_of(world, tmp_path / name, training={"max_steps": 3}, loss=loss))
    assert losses_of(tmp_path / "fused") == pytest.approx(losses_of(tmp_path / "reference"), rel=1e-5)


def test_liger_without_a_gpu_is_refused_by_name(world: dict, tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(UserError, match="liger"):
        fit(recipe_of(world, tmp_path / "out", loss={"implementation": "liger"}))


@pytest.mark.slow
@pytest.mark.parametrize("service", ["wandb", "tensorboard", "trackio"])
def test_curves_land_in_the_run_folder(
    world: dict, tmp_path: Path, service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec(service) is None:
        pytest.skip(f"{service} is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("WANDB_DIR", "WANDB_PROJECT", "TENSORBOARD_LOGGING_DIR", "TRACKIO_DIR"):
        monkeypatch.delenv(name, raising=False)
    fit(recipe_of(world, tmp_path / "out", training={"max_steps": 3, "report_to": service}))
    patterns = {"wandb": "wandb/offline-run-*", "tensorboard": "tensorboard/**/events*", "trackio": "trackio/*.db"}
    assert list((tmp_path / "out.run").glob(patterns[service]))
    if service == "trackio":
        return
    entries = [entry for entry in entries_of(tmp_path / "out") if "loss" in entry]
    assert [entry["step"] for entry in entries] == [1, 2, 3]
    for name in ("loss", "head0_loss", "head2_loss"):
        curve = read_curve(service, tmp_path / "out.run", f"train/{name}")
        assert curve == pytest.approx({entry["step"]: entry[name] for entry in entries}, rel=1e-6), name


@pytest.mark.parametrize(
    ("training", "told"),
    [
        ({"report_to": "wandbb"}, "did you mean 'wandb'"),
        ({"report_to": ["none", "trackio"]}, r"pip install 'medusa-train\[trackio\]'"),
        ({"fp16": True}, "training.fp16 needs a GPU"),
        ({"torch_compile_backend": "inducter"}, "did you mean 'inductor'"),
        ({"torch_compile_mode": "fastest"}, "max-autotune"),
    ],
)
def test_what_cannot_run_here_is_a_user_error(
    world: dict, tmp_path: Path, training: dict, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from medusa_train.training import arguments

    find = importlib.util.find_spec
    monkeypatch.setattr(
        arguments.importlib.util, "find_spec", lambda name, *rest: None if name == "trackio" else find(name, *rest)
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=told):
        fit(recipe_of(world, tmp_path / "out", training={"max_steps": 1, **training}))


def test_a_half_precision_base_trains_on_a_cpu(tmp_path: Path) -> None:
    """accelerate ignores fp16 on a CPU without a word: it is not asked for there, and the heads learn in fp32."""
    world = write_world(tmp_path)
    output = fit(recipe_of(world, tmp_path / "out", base={"name": world["base"], "dtype": "float16"}))
    losses = losses_of(output)
    assert losses[max(losses)] < losses[1]
    assert load_checkpoint(output).heads.blocks[0][0].linear.weight.dtype == torch.float16


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["4bit", "8bit"])
def test_heads_train_on_a_quantized_backbone(tmp_path: Path, quantization: str) -> None:
    if importlib.util.find_spec("bitsandbytes") is None:
        pytest.skip("bitsandbytes is not installed")
    world = write_world(tmp_path, "llama", hidden_size=64, intermediate_size=128, dtype=torch.bfloat16)
    base = {"name": world["base"], "quantization": quantization}
    output = fit(recipe_of(world, tmp_path / "out", base=base, training={"num_train_epochs": 4}))
    losses = losses_of(output)
    assert losses[max(losses)] < losses[1]
    if quantization == "4bit":
        policy = {"kind": "joint", "adapter": "qlora", "lora": {"r": 2}, "drift": {"max_ce_increase": None}}
        qlora = fit(recipe_of(world, tmp_path / "qlora", policy, base=base))
        assert load_checkpoint(qlora).adapter_folder is not None


def test_a_disk_that_refuses_is_told_before_the_first_step(world: dict, tmp_path: Path) -> None:
    """The real refusal of a real file system, by a limit on the size of files: heads are larger than 64 KiB."""
    recipe = recipe_of(world, tmp_path / "out")
    base = load_recipe_base(recipe)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    try:
        with pytest.raises(UserError, match=r"a trial save failed: .*File too large"):
            fit(recipe, base=base)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("restart", [False, True])
def test_an_output_dir_of_something_else_is_refused_before_anything_is_done(
    world: dict, tmp_path: Path, restart: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    """Not after the whole training: no backbone is loaded, no step made, no folder begun; exit code 2."""
    from medusa_train.cli.app import main
    from medusa_train.training import fit as fit_module

    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    words = ["fit", "--recipe", str(TINY[0]), "--no-launch", f"base.name={world['base']}", f"output_dir={out}"]
    words += [f"data.train=[{world['data']}]", "data.max_length=96", *(["--restart"] if restart else [])]
    loaded: list[Recipe] = []
    monkeypatch.setattr(fit_module, "load_recipe_base", loaded.append)
    monkeypatch.setattr(sys, "argv", ["medusa-train", *words])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert f"error: {out}: something else stands there" in capfd.readouterr().err
    assert not loaded and [path.name for path in tmp_path.iterdir()] == ["out"]
    assert [path.name for path in out.iterdir()] == ["notes.txt"]


def test_accelerate_launch_joins_instead_of_launching(monkeypatch: pytest.MonkeyPatch) -> None:
    from medusa_train.training.launch import launch_if_needed, under_launcher

    for name in list(os.environ):
        if name.startswith(("ACCELERATE_", "TORCHELASTIC_")) or name in ("LOCAL_RANK", "RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)
    assert not under_launcher()
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert under_launcher()
    assert not launch_if_needed(Path("r.yaml"), [], restart=False, nproc=2, launch=True)


@pytest.mark.slow
def test_accelerate_launch_runs_the_command(world: dict, tmp_path: Path) -> None:
    if shutil.which("accelerate", path=str(Path(sys.executable).parent)) is None:
        pytest.skip("accelerate's command is not installed here")
    words = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1"]
    words += ["-m", "medusa_train", "fit"]
    words += [
        "--recipe",
        str(ROOT / "recipes" / "tiny-medusa1.yaml"),
        f"base.name={world['base']}",
        "data.max_length=96",
    ]
    words += [f"data.train=[{world['data']}]", f"output_dir={tmp_path / 'out'}"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert load_checkpoint(tmp_path / "out").manifest.training["steps"] == 6
