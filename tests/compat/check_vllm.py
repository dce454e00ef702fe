"""vLLM itself against our own decoder on the same checkpoint: tensors, logits, texts and accepted counts.

Called by scripts/check_vllm.sh. Runs in our environment and starts vLLM in its own. What must hold, in float32:

1. every tensor of the exported folder is in the loaded module, bit for bit, and no parameter is left unfilled;
2. the logits of the loaded module on real hidden states equal ours;
3. vLLM with the heads writes what vLLM writes without them (greedy), which is what our plain decoding writes;
4. accepted guesses per position agree with `medusa-train eval-acceptance --tree chain`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(__file__).with_name("vllm_program.py")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--base", help="folder of the base, where the checkpoint's name for it does not lead there")
    parser.add_argument("--venv", required=True, help="environment with vLLM 0.32.0 in it")
    parser.add_argument("--max-prompts", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--out", help="keep the files here")
    return parser.parse_args()


def our_side(options: argparse.Namespace, work: Path) -> tuple[list[dict], Path, int]:
    """(prompts with ids, base folder, K); writes the export, hidden states and our logits into `work`."""
    from medusa_train.checkpoint import load_with_base
    from medusa_train.checkpoint.exporting import export_checkpoint
    from medusa_train.dataset import Message, render_prompt
    from medusa_train.evaluation.suites import load_suite
    from medusa_train.modeling.backbone import hidden_states, output_projection

    base, loaded = load_with_base(options.checkpoint, options.base, dtype="float32", device="cpu", merge=True)
    suite = load_suite("heldout").take(options.max_prompts)
    prompts = [
        {
            "id": prompt.id,
            "ids": list(render_prompt(base, [Message(*m) for m in (*prompt.context, ("user", prompt.turns[0]))])),
        }
        for prompt in suite.prompts
    ]
    hidden = hidden_states(base.model, torch.tensor([prompts[0]["ids"]]))[0].detach()
    projection, heads = output_projection(base.model), loaded.heads
    with torch.no_grad():
        ours = torch.stack([heads.logits(hidden, head, projection) for head in range(heads.config.medusa_num_heads)])
    save_file({"hidden": hidden.contiguous()}, work / "hidden.safetensors")
    save_file({"logits": ours.contiguous()}, work / "our_logits.safetensors")
    changed = loaded.manifest.backbone.changed != "none"
    export_checkpoint(
        options.checkpoint,
        work / "export",
        "vllm",
        base=options.base,
        base_id=None if changed else str(base.folder),
        backbone="merged" if changed else None,
    )
    served = work / "export" / "backbone" if changed else base.folder
    return prompts, served, heads.config.medusa_num_heads


def evaluate(options: argparse.Namespace, work: Path) -> list[dict]:
    """The rounds of `eval-acceptance --tree chain`, one dict per round."""
    command = [
        *(sys.executable, "-m", "medusa_train", "eval-acceptance", options.checkpoint, "--tree", "chain"),
        *("--suite", "heldout", "--max-prompts", str(options.max_prompts), "--dtype", "float32", "--device", "cpu"),
        *("--max-new-tokens", str(options.max_new_tokens), "--out", str(work / "report")),
        *("--trace", str(work / "trace.jsonl")),
        *(("--base", options.base) if options.base else ()),
    ]
    subprocess.run(command, cwd=ROOT, check=True)
    return [json.loads(line) for line in (work / "trace.jsonl").read_text().splitlines()]


def run_vllm(options: argparse.Namespace, work: Path, job: dict, name: str) -> dict:
    (work / f"{name}.job.json").write_text(json.dumps(job))
    out = work / f"{name}.json"
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    log = work / f"{name}.log"
    with open(log, "w") as handle:
        command = [str(Path(options.venv) / "bin" / "python"), str(PROGRAM), str(work / f"{name}.job.json"), str(out)]
        done = subprocess.run(command, env=environment, stdout=handle, stderr=subprocess.STDOUT)
    if done.returncode:
        sys.exit(f"vLLM failed ({name}); the end of its log:\n" + "\n".join(log.read_text().splitlines()[-25:]))
    return json.loads(out.read_text())


def accepted_by_position(rounds: list[dict], heads: int) -> tuple[int, list[int]]:
    """(drafts, accepted per position) as vLLM counts them: before an answer's end or limit cuts the accepted run."""
    drafts, accepted = 0, [0] * heads
    for round_ in rounds:
        if round_["ms"] is None:
            continue  # the root alone ended the answer; nothing was verified
        drafts += 1
        for position, (guess, target) in enumerate(zip(round_["proposed"], round_["targets"], strict=False)):
            if guess != target:
                break
            accepted[position] += 1
    return drafts, accepted


def compare(options: argparse.Namespace) -> list[str]:
    """What does not hold, one line each; prints what does."""
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(options.out or scratch)
        work.mkdir(parents=True, exist_ok=True)
        prompts, base, heads = our_side(options, work)
        rounds = evaluate(options, work)
        job = {
            "base": str(base),
            "heads": None,
            "num_heads": heads,
            "prompts": [prompt["ids"] for prompt in prompts],
            "max_tokens": options.max_new_tokens,
            "dtype": "float32",
            "max_model_len": max(len(prompt["ids"]) for prompt in prompts) + options.max_new_tokens + heads + 8,
            "hidden": str(work / "hidden.safetensors"),
        }
        plain = run_vllm(options, work, job, "plain")
        spec = run_vllm(options, work, job | {"heads": str(work / "export")}, "medusa")
        ours, theirs = (
            load_file(work / "our_logits.safetensors")["logits"],
            load_file(work / "medusa.json.safetensors")["logits"],
        )
    return judge(prompts, rounds, plain, spec, ours, theirs, heads)


def judge(
    prompts: list[dict],
    rounds: list[dict],
    plain: dict,
    spec: dict,
    ours: torch.Tensor,
    theirs: torch.Tensor,
    heads: int,
) -> list[str]:
    wrong = []
    for label in ("unused", "unfilled", "different"):
        print(f"tensors {label}: {len(spec[label])}")
        if spec[label]:
            wrong.append(f"{label} tensors: {spec[label]}")
    gap = float((ours - theirs[..., : ours.shape[-1]]).abs().max() / ours.abs().max())
    agree = float((ours.argmax(-1) == theirs[..., : ours.shape[-1]].argmax(-1)).float().mean())
    print(f"logits: largest difference {gap:.2e} of the largest logit; same best token in {100 * agree:.2f} %")
    if gap > 1e-5 or agree < 1:
        wrong.append(f"logits differ: {gap:.2e}, best tokens agree in {100 * agree:.2f} %")
    same = sum(a == b for a, b in zip(plain["ids"], spec["ids"], strict=True))
    print(f"texts, vLLM with heads = vLLM without: {same} of {len(prompts)}")
    if same != len(prompts):
        wrong.append("vLLM's greedy text changes with the heads on")
    mine: dict[str, list[int]] = {prompt["id"]: [] for prompt in prompts}
    for round_ in rounds:
        mine[round_["prompt_id"]] += [round_["root"], *round_["accepted"]]
    equal = sum(mine[prompt["id"]] == ids for prompt, ids in zip(prompts, spec["ids"], strict=True))
    print(f"texts, eval-acceptance = vLLM: {equal} of {len(prompts)}")
    drafts, accepted = accepted_by_position(rounds, heads)
    counters = spec["counters"]
    their_drafts = counters["vllm:spec_decode_num_drafts"]
    their_accepted = counters["vllm:spec_decode_num_accepted_tokens_per_pos"]
    print(f"rounds: {drafts} here, {their_drafts} in vLLM")
    print(f"accepted per position: {accepted} here, {their_accepted} in vLLM")
    # Equal texts leave one round per prompt to dispute: whether the last one is drafted at all.
    slack = len(prompts) if equal == len(prompts) else max(len(prompts), round(0.05 * drafts))
    pairs = [(drafts, their_drafts), *zip(accepted, their_accepted, strict=True)]
    if any(abs(a - b) > slack for a, b in pairs):
        wrong.append(f"accepted counts differ by more than {slack}")
    if not any(accepted):
        wrong.append("no guess was accepted at all, so agreement says nothing: use trained heads")
    return wrong


def main() -> None:
    wrong = compare(arguments())
    for line in wrong:
        print(f"FAILED: {line}")
    print("vLLM serves these heads rightly" if not wrong else "vLLM check failed")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
