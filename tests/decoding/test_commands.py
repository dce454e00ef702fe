"""`tree` and `generate` on a whole tiny checkpoint, through the command line's own entry point."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from medusa_train.checkpoint import load_checkpoint, save_checkpoint
from medusa_train.cli.app import build_app
from medusa_train.errors import UserError
from medusa_train.modeling.backbone import output_projection
from medusa_train.modeling.base import load_base
from medusa_train.modeling.heads import HeadsConfig, new_heads
from tests.tiny import save_tiny_base


def run(*words: str, stdin: str | None = None):
    result = CliRunner().invoke(build_app(), list(words), input=stdin, catch_exceptions=True)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny base, rows of conversations, and heads that are somewhat right."""
    folder = tmp_path_factory.mktemp("commands")
    base = load_base(str(save_tiny_base(folder / "base")), dtype="float32", device="cpu")
    draw = random.Random(0)
    words = ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog", "apples", "pears", "and", "plums"]
    rows = folder / "rows.jsonl"
    with rows.open("w") as file:
        for _ in range(24):
            ask, say = (" ".join(draw.choices(words, k=6)) for _ in range(2))
            messages = [{"role": "user", "content": ask}, {"role": "assistant", "content": say}]
            file.write(json.dumps({"messages": messages}) + "\n")
    projection = output_projection(base.model)
    config = HeadsConfig("own", 3, 1, projection.hidden_size, projection.vocab_size)
    heads = new_heads(config, projection)
    with torch.no_grad():
        for index, parameter in enumerate(heads.parameters()):
            generator = torch.Generator().manual_seed(index)
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    save_checkpoint(
        folder / "heads",
        heads,
        base,
        recipe={"data": {"train": [str(rows)], "heldout_fraction": 0.5, "max_length": 256}},
        policy="heads_only",
        data_manifest_hash="0" * 64,
        training={},
    )
    return folder / "heads"


def test_tree_searches_stores_and_says(checkpoint: Path) -> None:
    result = run("tree", str(checkpoint), "--nodes", "8", "--device", "cpu")
    assert result.exit_code == 0
    stored = load_checkpoint(checkpoint).tree
    assert len(stored["paths"]) == len(stored["node_probability"]) == 8
    assert stored["method"] == "joint"
    assert stored["top_k"] == 32
    low, high = stored["interval_95"]
    assert 1 <= low <= stored["expected_tokens_per_round"] <= high
    assert len(stored["calibration"]["hits"]) == 3
    assert "root (8 nodes" in result.stdout
    assert f"{stored['expected_tokens_per_round']:.3f} tokens per round" in re.sub(r"\s+", " ", result.stdout)
    # The same options again: nothing is searched, the same tree is shown.
    again = run("tree", str(checkpoint), "--nodes", "8", "--device", "cpu")
    assert "already there" in again.stderr
    assert "calibrating" not in again.stderr
    # Other rows in the same file: searched anew.
    rows = checkpoint.parent / "rows.jsonl"
    text = rows.read_text()
    rows.write_text("".join(text.splitlines(keepends=True)[:-2]))
    try:
        assert "already there" not in run("tree", str(checkpoint), "--nodes", "8", "--device", "cpu").stderr
    finally:
        rows.write_text(text)


def test_tree_auto_measures(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    words = ("--nodes", "auto", "--max-nodes", "9", "--no-store", "--out", str(out), "--device", "cpu")
    assert run("tree", str(checkpoint), *words).exit_code == 0
    found = json.loads(out.read_text())
    assert found["overhead"]["nodes"] == [3, 5, 7, 9]
    assert all(c >= 1 for c in found["overhead"]["c"])
    assert len(found["paths"]) in (3, 5, 7, 9)


def test_tree_given_and_greedy_answers(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "given.json"
    words = ("--tree", "2,2", "--answers", "greedy", "--max-rows", "4", "--no-store", "--out", str(out))
    assert run("tree", str(checkpoint), *words, "--device", "cpu").exit_code == 0
    found = json.loads(out.read_text())
    assert found["method"] == "given"
    assert found["paths"] == [[0], [1], [0, 0], [0, 1], [1, 0], [1, 1]]
    assert found["calibration"]["greedy_fraction"] == 1.0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--nodes", "many"), "auto, or a number"),
        (("--nodes", "0"), "auto, or a number"),
        (("--tree", "2,2,2,2", "--no-store"), "4 deep and there are 3 heads"),
        (("--tree", "none", "--no-store"), "plain decoding"),
        (("--data", "missing.jsonl"), "missing.jsonl"),
    ],
)
def test_tree_refuses(checkpoint: Path, words: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        run("tree", str(checkpoint), *words, "--device", "cpu")


def test_generate_streams_and_sums_up(checkpoint: Path) -> None:
    words = ("generate", str(checkpoint), "--prompt", "apples and", "--max-new-tokens", "24", "--device", "cpu")
    result = run(*words, "--tree", "3,2,2", "--compare")
    assert result.exit_code == 0
    assert re.search(r"with heads: \d+ tokens in \d+ rounds, [\d.]+ tokens per round", result.stderr)
    assert "the same tokens" in result.stderr
    plain = run(*words, "--tree", "none")
    assert plain.stdout == result.stdout
    assert "1.00 tokens per round" in plain.stderr


def test_generate_modes_and_stdin(checkpoint: Path) -> None:
    common = ("generate", str(checkpoint), "--max-new-tokens", "12", "--tree", "chain", "--device", "cpu")
    first = run(*common, "--mode", "sample", "--seed", "5", "--temperature", "0.8", stdin="plums")
    second = run(*common, "--mode", "sample", "--seed", "5", "--temperature", "0.8", stdin="plums")
    assert first.stdout == second.stdout
    assert "exact in distribution" in first.stderr
    assert "heuristic" in run(*common, "--mode", "typical", stdin="plums").stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--prompt", " "), "prompt is empty"),
        (("--prompt", "x", "--mode", "greedy", "--top-k", "3"), "top_k with mode 'greedy'"),
        (("--prompt", "x", "--temperature", "0", "--mode", "sample"), "temperature is 0"),
        (("--prompt", "x", "--tree", "chain:9"), r"a depth of 1\.\.3"),
    ],
)
def test_generate_refuses(checkpoint: Path, words: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        run("generate", str(checkpoint), *words, "--device", "cpu")


def test_no_tree_yet_is_a_chain(checkpoint: Path) -> None:
    from medusa_train.checkpoint import store_tree

    store_tree(checkpoint, None)
    result = run("generate", str(checkpoint), "--prompt", "x", "--max-new-tokens", "4", "--device", "cpu")
    assert "a chain is used" in result.stderr
