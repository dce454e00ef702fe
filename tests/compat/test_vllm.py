"""vLLM 0.32.0 itself: slow, and only where its environment is ($VLLM_VENV) or may be built (MEDUSA_BUILD_VLLM=1)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from medusa_train.checkpoint import save_checkpoint
from medusa_train.errors import UserError
from tests.compat.check_vllm import accepted_by_position, judge

if TYPE_CHECKING:
    from medusa_train.modeling.backbone import OutputProjection
    from medusa_train.modeling.base import Base
    from medusa_train.modeling.heads import MedusaHeads

ROOT = Path(__file__).resolve().parents[2]
PROMPTS, TOKENS = 6, 48


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two heads that know the model's answers to the prompts by heart: agreement needs acceptance, not skill.

    Trained once as `shared`; `own` is the same blocks with a copy of the lm_head each, changed a little.
    """
    from medusa_train.modeling.backbone import output_projection
    from medusa_train.modeling.base import load_base
    from medusa_train.modeling.heads import HeadsConfig, new_heads

    try:
        base = load_base("smollm2-135m", dtype="float32", device="cpu")
    except UserError as error:
        pytest.skip(f"SKIPPED, NOT CHECKED: no SmolLM2 here: {error.what}")
    projection = output_projection(base.model)
    sizes = projection.hidden_size, projection.vocab_size
    heads = {contract: new_heads(HeadsConfig(contract, 2, 1, *sizes), projection) for contract in ("shared", "own")}
    learn_by_heart(heads["shared"], base, projection)
    heads["own"].blocks.load_state_dict(heads["shared"].blocks.state_dict())
    with torch.no_grad():
        for weight in heads["own"].projections.parameters():
            weight.mul_(1 + 0.01 * torch.rand(weight.shape, generator=torch.Generator().manual_seed(0)))
    folder = tmp_path_factory.mktemp("vllm")
    arguments = {"recipe": {}, "policy": "heads_only", "data_manifest_hash": None, "training": {}}
    return {name: save_checkpoint(folder / name, made, base, **arguments) for name, made in heads.items()}


def learn_by_heart(heads: MedusaHeads, base: Base, projection: OutputProjection) -> None:
    """A few steps on the model's own greedy answers to the prompts of the check."""
    from medusa_train.dataset import Message, render_prompt
    from medusa_train.evaluation.suites import load_suite
    from medusa_train.modeling.backbone import hidden_states

    rows, targets = [], [[], []]
    for prompt in load_suite("heldout").take(PROMPTS).prompts:
        ids = torch.tensor([render_prompt(base, [Message("user", prompt.turns[0])])])
        with torch.no_grad():
            answer = base.model.generate(ids, max_new_tokens=TOKENS + 4, do_sample=False)
            hidden = hidden_states(base.model, answer)[0]
        places = range(ids.shape[1] - 1, answer.shape[1] - 3)
        rows += [hidden[t] for t in places]
        for head in (0, 1):
            targets[head] += [answer[0, t + head + 2] for t in places]
    hidden_MD, blocks = torch.stack(rows), list(heads.blocks.parameters())
    optimizer = torch.optim.Adam(blocks, lr=3e-3)
    for _ in range(10):  # not to the end: positions must differ in how often they are accepted
        optimizer.zero_grad()
        for head in (0, 1):
            with torch.autocast("cpu", torch.bfloat16):
                logits = heads.logits(hidden_MD, head, projection)
            torch.nn.functional.cross_entropy(logits.float(), torch.stack(targets[head])).backward()
        optimizer.step()


@pytest.mark.slow
@pytest.mark.parametrize("contract", ["shared", "own"])
def test_vllm_itself(tmp_path: Path, contract: str, request: pytest.FixtureRequest) -> None:
    venv = Path(os.environ.get("VLLM_VENV", ROOT / ".venv-vllm"))
    if not (venv / "bin" / "python").exists() and os.environ.get("MEDUSA_BUILD_VLLM") != "1":
        pytest.skip(f"SKIPPED, NOT CHECKED: no vLLM in {venv}; MEDUSA_BUILD_VLLM=1 builds it (3.4 GB)")
    checkpoint = request.getfixturevalue("checkpoints")[contract]
    command = ["bash", "scripts/check_vllm.sh", str(checkpoint), "--max-prompts", str(PROMPTS)]
    done = subprocess.run(
        [*command, "--max-new-tokens", str(TOKENS), "--out", str(tmp_path / "files")],
        cwd=ROOT,
        env=os.environ | {"PYTHON": sys.executable, "VLLM_VENV": str(venv)},
        capture_output=True,
        text=True,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def test_skipping_is_said(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "MEDUSA_BUILD_VLLM"} | {
        "VLLM_VENV": str(tmp_path / "none")
    }
    done = subprocess.run(
        ["bash", "scripts/check_vllm.sh", "x"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 3 and "skipped" in done.stdout


def test_counting_goes_past_the_cut() -> None:
    """vLLM counts accepted guesses before the limit cuts them: the second round published one token and matched two."""
    rounds = [
        {"ms": {}, "proposed": [5, 6, 7], "targets": [5, 6, 9, 1]},
        {"ms": {}, "proposed": [5, 6, 7], "targets": [5, 6, 8, 1], "num_accepted": 0},
        {"ms": {}, "proposed": [1, 6, 7], "targets": [5, 6, 7, 1]},
        {"ms": None, "proposed": [], "targets": []},
    ]
    assert accepted_by_position(rounds, 3) == (3, [2, 2, 0])


def good() -> dict:
    """Material for the judge in which all is well: 30 rounds of one prompt, 20 and 9 guesses accepted."""

    def round_(targets: list[int]) -> dict:
        return {"ms": {}, "prompt_id": "a", "root": 0, "accepted": [], "proposed": [5, 5], "targets": targets}

    rounds = [round_([5, 5, 5])] * 9 + [round_([5, 1, 5])] * 11 + [round_([1, 5, 5])] * 10
    counters = {"vllm:spec_decode_num_drafts": 30, "vllm:spec_decode_num_accepted_tokens_per_pos": [20, 9]}
    logits = torch.tensor([[[1.0, 2.0, 3.0]]])
    return {
        "prompts": [{"id": "a"}],
        "rounds": rounds,
        "plain": {"ids": [[0] * 30]},
        "spec": {"ids": [[0] * 30], "unused": [], "unfilled": [], "different": [], "counters": counters},
        "ours": logits,
        "theirs": logits.clone(),
        "heads": 2,
    }


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (None, None),
        (lambda g: g["spec"]["unused"].append("0.0.linear.bias"), "unused"),
        (lambda g: g["spec"]["unfilled"].append("lm_heads.0.weight"), "unfilled"),
        (lambda g: g["theirs"].mul_(1.01), "logits differ"),
        (lambda g: g["spec"].update(ids=[[0] * 29 + [1]]), "greedy text changes"),
        (lambda g: g["spec"]["counters"].update({"vllm:spec_decode_num_accepted_tokens_per_pos": [18, 9]}), "accepted"),
        (lambda g: g["spec"]["counters"].update({"vllm:spec_decode_num_drafts": 40}), "accepted counts"),
        (lambda g: g.update(rounds=g["rounds"][20:] * 3), "no guess was accepted"),
    ],
)
def test_the_judge_can_fail(change, word) -> None:
    material = good()
    if change:
        change(material)
    wrong = judge(**material)
    assert wrong == [] if word is None else any(word in line for line in wrong), wrong
