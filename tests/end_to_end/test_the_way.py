"""The whole way through the command line: on a tiny random model always, on SmolLM2 in the slow suite."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.tiny import save_tiny_base

ROOT = Path(__file__).resolve().parent.parent.parent
COMMANDS = ("distill", "show", "plan", "fit", "tree", "eval-acceptance", "generate", "export", "import", "doctor")


def run(*arguments: object, cwd: Path = ROOT, code: int = 0, timeout: int = 600) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "medusa_train", *(str(argument) for argument in arguments)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "COLUMNS": "120", "NO_COLOR": "1"}
    found = subprocess.run(words, capture_output=True, text=True, cwd=cwd, env=environment, timeout=timeout)
    assert found.returncode == code, f"{' '.join(words[2:])}\n{found.stdout[-3000:]}\n{found.stderr[-3000:]}"
    assert "Traceback" not in found.stderr
    return found


RECIPE = """\
base: {{name: {base}, dtype: float32}}
data: {{train: [{rows}], heldout_fraction: 0.25, max_length: 128}}
heads: {{medusa_num_heads: 3, medusa_num_layers: 1, contract: own}}
policy: {{kind: heads_only, cache: {{enabled: true}}}}
training: {{num_train_epochs: 8, per_device_train_batch_size: 64, learning_rate: 5.0e-3}}
output_dir: {out}
"""


@pytest.fixture(scope="module")
def way(tmp_path_factory):
    """A tiny base, its own conversations, heads trained on them, and a tree: the first half of the way."""
    folder = tmp_path_factory.mktemp("way")
    base = save_tiny_base(folder / "base", seed=3)
    words = ("red", "blue", "tall", "old", "wet", "new", "hot", "dry", "odd", "shy", "big", "sad")
    prompts = [
        {"id": f"p{i}", "category": "lists", "prompt": f"List {i} things that are {word}."}
        for i, word in enumerate(words)
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    (folder / "recipe.yaml").write_text(RECIPE.format(base=base, rows=folder / "rows", out=folder / "heads"))
    distill = run("distill", "--base", base, "--prompts", folder / "prompts.jsonl", "--max-new-tokens", 32,
                  "--out", folder / "rows")  # fmt: skip
    fit = run("fit", "--recipe", folder / "recipe.yaml")
    tree = run("tree", folder / "heads", "--nodes", 8)
    return folder, distill, fit, tree


def test_every_station_leaves_what_the_next_one_reads(way):
    folder, _, fit, _ = way
    rows = [json.loads(line) for line in (folder / "rows" / "rows.jsonl").read_text().splitlines()]
    assert {row["prompt_id"] for row in rows} == {f"p{i}" for i in range(12)}
    assert "in all" in fit.stderr + fit.stdout, "what is trainable is printed before step 1"
    names = {path.name for path in (folder / "heads").iterdir()}
    assert {"config.json", "medusa_heads.safetensors", "medusa_manifest.json", "tree.json"} <= names
    assert not any(name.endswith((".bin", ".pt", ".pkl")) for name in names)
    assert len(json.loads((folder / "heads" / "tree.json").read_text())["paths"]) == 8


def test_the_report_says_the_answers_are_exact(way):
    folder = way[0]
    run("eval-acceptance", folder / "heads", "--suite", folder / "prompts.jsonl", "--max-prompts", 6,
        "--max-new-tokens", 24, "--dtype", "float32", "--out", folder / "report")  # fmt: skip
    report = json.loads((folder / "report" / "report.json").read_text())
    text = json.dumps(report)
    assert "near_tie" in text or "near-tie" in text or "identical" in text
    html = (folder / "report" / "report.html").read_text()
    assert "<svg" in html
    assert not re.search(r"(src|href)=[\"']https?://", html), "the page is one file that needs no network"
    assert (folder / "report" / "report.txt").read_text().strip()


def test_generate_streams_what_plain_greedy_decoding_says(way):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = way[0]
    found = run("generate", folder / "heads", "--prompt", "List 3 things that are red.", "--max-new-tokens", 20)
    assert "tokens per round" in found.stdout + found.stderr
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    model = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    messages = [{"role": "user", "content": "List 3 things that are red."}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    expected = tokenizer.decode(
        model.generate(ids, max_new_tokens=20, do_sample=False)[0, ids.shape[1] :], skip_special_tokens=True
    )
    squeezed = re.sub(r"\s+", "", found.stdout)
    assert re.sub(r"\s+", "", expected)[:12] in squeezed


def test_everything_is_safe_to_run_again(way):
    folder = way[0]
    before = (folder / "heads" / "medusa_manifest.json").read_bytes()
    run("distill", "--base", folder / "base", "--prompts", folder / "prompts.jsonl", "--max-new-tokens", 32,
        "--out", folder / "rows")  # fmt: skip
    assert len((folder / "rows" / "rows.jsonl").read_text().splitlines()) == 12
    run("fit", "--recipe", folder / "recipe.yaml")
    run("tree", folder / "heads", "--nodes", 8)
    assert (folder / "heads" / "medusa_manifest.json").read_bytes() == before


def test_doctor_calls_it_healthy_and_another_base_is_refused(way):
    folder = way[0]
    run("doctor", folder / "heads")
    other = save_tiny_base(folder / "other", seed=4)
    refused = run("generate", folder / "heads", "--base", other, "--prompt", "Hi there", code=2)
    assert "error:" in refused.stderr


def test_help_of_every_command_is_quick_and_complete():
    import typer

    from medusa_train.cli.app import build_app

    assert tuple(typer.main.get_command(build_app()).commands) == COMMANDS
    for name in COMMANDS:
        started = time.perf_counter()
        text = run(name, "--help").stdout
        elapsed = time.perf_counter() - started
        assert "Usage:" in text
        # The command answers in a fraction of this; the bound leaves room for a machine that runs other tests too.
        assert elapsed < 5.0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ("distill", "--base", "smolm2-135m", "--prompts", "data/prompts/heldout.jsonl", "--out", "OUT"),
            "smollm2-135m",
        ),
        (("distill", "--base", "BASE", "--prompts", "EMPTY", "--out", "OUT"), "EMPTY"),
        (("distill", "--base", "BASE", "--prompts", "nowhere.jsonl", "--out", "OUT"), "nowhere.jsonl"),
        (("fit", "--recipe", "nowhere.yaml"), "nowhere.yaml"),
        (("fit", "--recipe", "recipes/quickstart.yaml", "training.num_trian_epochs=1"), "num_train_epochs"),
        (("fit", "--recipe", "recipes/quickstart.yaml", "data.train=[nowhere]", "output_dir=OUT"), "nowhere"),
        (("tree", "OUT"), "OUT"),
        (("eval-acceptance", "OUT", "--suite", "heldout"), "OUT"),
        (("generate", "OUT", "--prompt", "Hi"), "OUT"),
        (("doctor", "OUT"), "OUT"),
        (("distill", "--base", "nobody/nothing", "--prompts", "data/prompts/heldout.jsonl", "--out", "OUT"), "network"),
    ],
    ids=lambda value: " ".join(value[:3]) if isinstance(value, tuple) else None,
)
def test_wrong_input_is_one_clear_error(arguments, words, tmp_path):
    (tmp_path / "EMPTY").write_text("")
    places = {"OUT": tmp_path / "OUT", "EMPTY": tmp_path / "EMPTY"}
    if "BASE" in arguments:
        places["BASE"] = save_tiny_base(tmp_path / "base")
    actual = []
    for word in arguments:
        for name, path in places.items():
            word = word.replace(name, str(path)) if word in (name, f"output_dir={name}") else word
        actual.append(word)
    code = 1 if arguments[0] == "doctor" else 2
    words_seen = subprocess.run(
        [sys.executable, "-m", "medusa_train", *actual],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "COLUMNS": "200"},
        timeout=300,
    )
    assert words_seen.returncode in (code, 2)
    assert "Traceback" not in words_seen.stderr
    assert words in words_seen.stderr + words_seen.stdout
    assert not (tmp_path / "OUT" / "medusa_manifest.json").exists()


def test_a_full_disk_is_one_clear_error(monkeypatch, capsys):
    import errno

    from medusa_train.cli import app

    def full(*_arguments, **_settings):
        raise OSError(errno.ENOSPC, "No space left on device", "/somewhere/rows.jsonl")

    monkeypatch.setattr(app, "build_app", lambda: full)
    with pytest.raises(SystemExit) as stop:
        app.main()
    assert stop.value.code == 2
    assert "the disk is full (/somewhere/rows.jsonl)" in capsys.readouterr().err
