"""Throughput and peak memory of `distill --backend local` against transformers' `generate`.

Both arms answer the same prompts greedily with at most --new-tokens tokens; `generate` takes them in file order, 32
at a time, padded on the left. The arms alternate, each run in a process of its own, so that peak memory is each arm's
own. Tokens count up to and including the first stop token of a row, for both arms.

    python scripts/bench_distill.py --base smollm2-135m --prompts 256 --new-tokens 128 --rounds 3
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GENERATE_BATCH = 32


def mixed_prompts(count: int) -> list[str]:
    """Prompts of mixed length: one to twelve of the training prompts joined, short ones more often; always the same."""
    lines = (ROOT / "data" / "prompts" / "train.jsonl").read_text(encoding="utf-8").splitlines()
    texts, chance = [json.loads(line)["prompt"] for line in lines], random.Random(0)
    return ["\n\n".join(chance.choices(texts, k=int(12 ** chance.random()))) for _ in range(count)]


def peak_bytes() -> int:
    """Peak resident memory of this process since the mark was last cleared."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no VmHWM")


def run_arm(arm: str, options: argparse.Namespace) -> dict:
    """One run of one arm in this process: seconds, tokens, peak memory above the loaded model's."""
    import torch

    from medusa_train.dataset import Message, render_prompt
    from medusa_train.dataset.render import stop_token_ids
    from medusa_train.modeling.base import load_base

    torch.set_num_threads(options.threads)
    base = load_base(options.base, dtype=options.dtype, device="cpu")
    stop = stop_token_ids(base)
    prompts = [render_prompt(base, [Message("user", text)]) for text in mixed_prompts(options.prompts)]
    runner = {"distill": distill_arm, "generate": generate_arm}[arm]
    runner(base, prompts[:4], 4, stop, options)  # warm-up
    Path("/proc/self/clear_refs").write_text("5")  # peak memory counts from here
    clock = time.process_time if options.clock == "cpu" else time.perf_counter
    loaded, started = peak_bytes(), clock()
    tokens = runner(base, prompts, options.new_tokens, stop, options)
    seconds = clock() - started
    lengths = sorted(map(len, prompts))
    return {
        "seconds": seconds,
        "tokens": tokens,
        "rate": tokens / seconds,
        "peak": peak_bytes(),
        "above_model": peak_bytes() - loaded,
        "prompt_tokens": [lengths[0], lengths[len(lengths) // 2], lengths[-1]],
    }


def distill_arm(base, prompts, new_tokens, stop, options) -> int:
    """The engine of `distill`."""
    from medusa_train.dataset.requests import Request
    from medusa_train.dataset.run_local import engine_for
    from medusa_train.dataset.sampling import Decoding

    engine = engine_for(base, Decoding(), sorted(stop), batch_tokens=options.batch_tokens, max_rows=options.max_rows)
    for index, ids in enumerate(prompts):
        engine.submit(Request(index, ids, new_tokens))
    engine.run(lambda completion: None)
    return engine.generated


def generate_arm(base, prompts, new_tokens, stop, options) -> int:
    """transformers' `generate`, 32 prompts at a time in file order."""
    import torch

    tokens = 0
    for start in range(0, len(prompts), GENERATE_BATCH):
        batch = prompts[start : start + GENERATE_BATCH]
        width = max(map(len, batch))
        ids = torch.tensor([[0] * (width - len(row)) + row for row in batch])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in batch])
        with torch.inference_mode():
            out = base.model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=new_tokens,
                do_sample=False,
                eos_token_id=sorted(stop),
                pad_token_id=sorted(stop)[0],
            )
        for row in out[:, width:].tolist():
            ends = [index for index, token in enumerate(row) if token in stop]
            tokens += min(ends) + 1 if ends else len(row)
    return tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: on a busy machine, one thread")
    parser.add_argument("--batch-tokens", type=int, default=None)
    parser.add_argument("--max-rows", type=int, default=None)
    parser.add_argument("--arm", choices=("distill", "generate"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.arm:
        print(json.dumps(run_arm(options.arm, options)))
        return
    found: dict[str, list[dict]] = {"distill": [], "generate": []}
    for number in range(options.rounds):
        for arm in ("distill", "generate") if number % 2 == 0 else ("generate", "distill"):
            command = [sys.executable, __file__, *sys.argv[1:], "--arm", arm]
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
            result = json.loads(done.stdout.splitlines()[-1])
            found[arm].append(result)
            print(
                f"round {number + 1} {arm:8s} {result['rate']:7.1f} tokens/s  {result['tokens']} tokens in"
                f" {result['seconds']:.1f} s  peak {result['peak'] / 2**20:.0f} MiB"
                f" ({result['above_model'] / 2**20:.0f} above the loaded model)",
                flush=True,
            )
    report(found)


def report(found: dict[str, list[dict]]) -> None:
    """Medians, spreads and ratios of the arms."""
    shortest, middle, longest = found["distill"][0]["prompt_tokens"]
    print(f"prompts of {shortest} to {longest} tokens, median {middle}")
    for arm, results in found.items():
        rates = [result["rate"] for result in results]
        print(
            f"{arm:8s} median {statistics.median(rates):.1f} tokens/s ({min(rates):.1f} to {max(rates):.1f}),"
            f" peak {max(result['peak'] for result in results) / 2**20:.0f} MiB"
        )
    ratios = [left["rate"] / right["rate"] for left, right in zip(found["distill"], found["generate"], strict=True)]
    memory = max(r["peak"] for r in found["distill"]) / max(r["peak"] for r in found["generate"])
    print(
        f"ratio    median {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f});"
        f" peak memory {memory:.2f} of generate's"
    )


if __name__ == "__main__":
    main()
