"""One command that shows whether decoding is right and fast on this machine's GPU. Under 8 minutes there.

    python scripts/gpu_check.py --out gpu-check            # the real sizes, on CUDA
    python scripts/gpu_check.py --size small --out check   # the same steps at toy size, on any CPU

1. identity: greedy with a tree equals transformers' generate on a real model, float32 token for token; bfloat16 token
   for token or at near-ties that are shown; launched eagerly and as CUDA graphs.
2. overhead: what a round of 1..128 rows costs in plain steps, on a random Llama of 7B shape in bfloat16, launched
   eagerly, with fixed shapes, and with flex attention in place of sdpa (CUDA only).
3. training: the model answers prompts, heads are trained, a tree is searched, and the report is written, by the same
   commands that anybody would use.

Prints a table per part; everything is in OUT/gpu_check.json. The exit code is 1 where identity fails.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
import bench_decode

from medusa_train.console import say, table
from medusa_train.decoding.compare import first_divergence
from medusa_train.decoding.decode import TreeDecoder
from medusa_train.decoding.search import independent_tree
from medusa_train.decoding.settings import DecodeSettings
from medusa_train.modeling.heads import HeadsConfig, new_heads
from medusa_train.provenance import environment

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Size:
    """How large each part is."""

    prompts: int
    tokens: int
    llama: dict[str, int]
    rows: tuple[int, ...]
    prompt_tokens: int
    repeats: int
    distill: tuple[str, ...]
    fit: tuple[str, ...]
    evaluate: tuple[str, ...]


SEVEN_B = dict(
    hidden_size=4096,
    intermediate_size=11008,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=32,
    vocab_size=32000,
    max_position_embeddings=4096,
)
TOY = dict(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=512,
    max_position_embeddings=1024,
)
SIZES = {
    "full": Size(
        prompts=16,
        tokens=128,
        llama=SEVEN_B,
        rows=(1, 2, 4, 8, 16, 32, 64, 128),
        prompt_tokens=512,
        repeats=5,
        distill=("--synthesize", "400", "--max-new-tokens", "128"),
        fit=(),
        evaluate=("--max-prompts", "24", "--max-new-tokens", "96"),
    ),
    "small": Size(
        prompts=2,
        tokens=12,
        llama=TOY,
        rows=(1, 4, 16),
        prompt_tokens=32,
        repeats=1,
        distill=("--limit", "16", "--max-new-tokens", "16"),
        fit=("training.num_train_epochs=1", "heads.reduced_vocab_size=512", "data.heldout_fraction=0.3"),
        evaluate=("--max-prompts", "2", "--max-new-tokens", "8"),
    ),
}


# (attention, launch) by device.
WAYS = {
    "cuda": (("sdpa", "eager"), ("sdpa", "graph"), ("flex_attention", "graph")),
    "cpu": (("sdpa", "eager"), ("sdpa", "fixed")),
}


def main() -> None:
    """Runs the parts, prints tables, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=sorted(SIZES), default="full")
    parser.add_argument("--base", default="smollm2-135m", help="the real model of parts 1 and 3")
    parser.add_argument("--out", type=Path, default=Path("gpu-check"))
    parser.add_argument("--skip", choices=("identity", "overhead", "training"), nargs="*", default=[])
    arguments = parser.parse_args()
    size = SIZES[arguments.size]
    if arguments.size == "full" and not torch.cuda.is_available():
        parser.error("no CUDA device; --size small runs the same steps on the CPU")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    arguments.out.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"size": arguments.size, "environment": environment(), "seconds": {}}
    parts = {
        "identity": lambda: identity(arguments.base, size, device),
        "overhead": lambda: overhead(size, device),
        "training": lambda: training(arguments.base, size, arguments.out, device),
    }
    for name, part in parts.items():
        if name in arguments.skip:
            continue
        say(f"part {name}")
        started = time.perf_counter()
        result[name] = part()
        result["seconds"][name] = time.perf_counter() - started
        # Written after every part, so that a cut run leaves what it knows.
        (arguments.out / "gpu_check.json").write_text(json.dumps(result, indent=1) + "\n")
    table("seconds", ("part", "s"), [(name, f"{spent:.1f}") for name, spent in result["seconds"].items()])
    if not all(row["passed"] for row in result.get("identity", [])):
        sys.exit(1)


def identity(base: str, size: Size, device: str) -> list[dict[str, Any]]:
    """Tree decoding against generate, by dtype and way of launching."""
    from medusa_train.dataset import read_prompts, render_prompt
    from medusa_train.modeling.base import load_base

    rows = []
    for dtype in ("float32", "bfloat16"):
        loaded = load_base(base, dtype=dtype, device=device)
        heads = bench_decode.untrained_heads(loaded.model)
        conversations = list(read_prompts(str(ROOT / "data/prompts/heldout.jsonl")))[: size.prompts]
        prompts = [render_prompt(loaded, one.messages) for one in conversations]
        expected = [_generate(loaded.model, prompt, size.tokens) for prompt in prompts]
        tree = independent_tree(bench_decode.CHANCES, 31).tree
        for attention, launch in WAYS[device]:
            loaded.model.set_attn_implementation(attention)
            decoder = TreeDecoder(loaded.model, heads, tree, launch=launch)
            settings = DecodeSettings(max_new_tokens=size.tokens)
            parted = []
            for prompt, wanted in zip(prompts, expected, strict=True):
                found = decoder.decode([prompt], settings)[0].token_ids
                divergence = first_divergence(loaded.model, prompt, wanted, found)
                if divergence is not None:
                    parted.append({**asdict(divergence), "near_tie": divergence.near_tie})
            exact = dtype == "float32"
            passed = not parted if exact else all(one["near_tie"] for one in parted)
            how = {"dtype": dtype, "launch": launch, "attention": attention}
            rows.append({**how, "prompts": len(prompts), "parted": parted, "passed": passed})
    table(
        "greedy with a 31-node tree against transformers' generate",
        ("dtype", "launch", "attention", "prompts", "identical", "near-ties", "passed"),
        [
            (
                row["dtype"],
                row["launch"],
                row["attention"],
                row["prompts"],
                row["prompts"] - len(row["parted"]),
                sum(one["near_tie"] for one in row["parted"]),
                "yes" if row["passed"] else "NO",
            )
            for row in rows
        ],
    )
    return rows


def _generate(model: Any, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt], device=model.device)
    with torch.inference_mode():
        whole = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    return whole[0, len(prompt) :].tolist()


def overhead(size: Size, device: str) -> list[dict[str, Any]]:
    """c by rows on a random Llama, launched eagerly and with fixed shapes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**size.llama, tie_word_embeddings=False)
    torch.manual_seed(0)
    # Made in place in its dtype: 7B in float32 first would need twice the memory.
    with torch.device(device):
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    projection = bench_decode.output_projection(model)
    heads = new_heads(HeadsConfig("own", 4, 1, config.hidden_size, config.vocab_size), projection)
    results = []
    for attention, launch in WAYS[device]:
        model.set_attn_implementation(attention)
        say(f"attention {attention}")
        measured = bench_decode.run(
            model,
            heads,
            rows=list(size.rows),
            prompt_tokens=size.prompt_tokens,
            rounds=8,
            repeats=size.repeats,
            launch=launch,
            # Flex attention is compiled for every length that generate meets; the other two arms timed it already.
            generate=attention == "sdpa",
        )
        bench_decode.show(measured)
        results.append({**measured, "attention": attention})
    return results


def training(base: str, size: Size, out: Path, device: str) -> dict[str, Any]:
    """distill, fit, tree and eval-acceptance as commands; the report's summary."""
    rows, heads, report = out / "distill", out / "heads", out / "report"
    recipe = [f"base.name={base}", f"data.train=[{rows}]", f"output_dir={heads}", *size.fit]
    prompts = str(ROOT / "data/prompts/train.jsonl")
    heldout = str(ROOT / "data/prompts/heldout.jsonl")
    commands = {
        "distill": ["--base", base, "--prompts", prompts, *size.distill, "--out", str(rows), "--device", device],
        "fit": ["--recipe", str(ROOT / "recipes/quickstart.yaml"), *recipe],
        "tree": [str(heads), "--device", device],
        "eval-acceptance": [str(heads), "--suite", heldout, *size.evaluate, "--out", str(report), "--device", device],
    }
    spent = {}
    for name, words in commands.items():
        say(f"+ medusa-train {name} {' '.join(words)}")
        started = time.perf_counter()
        subprocess.run([sys.executable, "-m", "medusa_train", name, *words], check=True)
        spent[name] = time.perf_counter() - started
    table("training on a real model", ("stage", "s"), [(name, f"{s:.1f}") for name, s in spent.items()])
    return {"seconds": spent, "report": json.loads((report / "report.json").read_text())}


if __name__ == "__main__":
    main()
