"""Decoding speed by tree size, on one machine: a round against a plain step, the floor, and transformers' generate.

    python scripts/bench_decode.py --base smollm2-135m --dtype bfloat16 --threads 2
    python scripts/bench_decode.py --rows 1 16 64 --launch compile --json bench.json

Arms are interleaved: every repeat runs every arm once, so a machine that slows down slows them all. Printed: medians
and, in brackets, the quartiles. The floor of N rows is the matrix products alone: every linear layer of the decoder and
the lm_head on N rows, and of the heads on one row. Heads are untrained (reduced, 8,192 tokens) unless --checkpoint
names some: what they guess does not change what a round costs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from medusa_train.console import human_bytes, say
from medusa_train.decoding.decode import TreeDecoder
from medusa_train.decoding.search import independent_tree
from medusa_train.decoding.settings import DecodeSettings
from medusa_train.decoding.tree import DraftTree
from medusa_train.modeling.backbone import decoder_of, output_projection
from medusa_train.modeling.heads import HeadsConfig, new_heads
from medusa_train.provenance import environment

STAGES = ("propose", "forward", "accept", "commit")
# Chances by rank of an ordinary head; they only decide the shape of the trees.
CHANCES = np.array([[0.55, 0.15, 0.07, 0.04, 0.03, 0.02, 0.02, 0.01, 0.01, 0.01]] * 4)


def main() -> None:
    """Runs all arms, prints the table, writes JSON where asked."""
    arguments = _parser().parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    model, heads = _load(arguments)
    result = run(
        model,
        heads,
        rows=arguments.rows,
        prompt_tokens=arguments.prompt_tokens,
        rounds=arguments.rounds,
        repeats=arguments.repeats,
        launch=arguments.launch,
        generate=not arguments.no_generate,
    )
    result["environment"] = environment()
    show(result)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="smollm2-135m", help="alias, folder or hub id")
    parser.add_argument("--checkpoint", help="trained heads (their base is loaded instead of --base)")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device")
    parser.add_argument("--threads", type=int, help="CPU threads; the library's choice by default")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 16, 32, 64], help="packed rows, root counted")
    parser.add_argument("--prompt-tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=8, help="rounds per arm and repeat")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--launch", default="auto", help="auto, eager, fixed, graph or compile")
    parser.add_argument("--no-generate", action="store_true", help="leave transformers' generate out")
    parser.add_argument("--json", type=Path)
    return parser


def _load(arguments: argparse.Namespace) -> tuple[nn.Module, nn.Module]:
    if arguments.checkpoint:
        from medusa_train.checkpoint import load_with_base

        base, opened = load_with_base(arguments.checkpoint, dtype=arguments.dtype, device=arguments.device, merge=True)
        return base.model, opened.heads
    from medusa_train.modeling.base import load_base

    model = load_base(arguments.base, dtype=arguments.dtype, device=arguments.device).model
    return model, untrained_heads(model)


def untrained_heads(model: nn.Module, num_heads: int = 4) -> nn.Module:
    """Reduced heads of 8,192 tokens (all tokens of a smaller vocabulary)."""
    projection = output_projection(model)
    rows = min(8192, projection.vocab_size)
    config = HeadsConfig("reduced", num_heads, 1, projection.hidden_size, projection.vocab_size, rows)
    return new_heads(config, projection, torch.arange(rows))


class Floor:
    """The matrix products of a round of N rows, and nothing else."""

    def __init__(self, model: nn.Module, heads: nn.Module | None, rows: int) -> None:
        projection = output_projection(model)
        linears = [module for module in decoder_of(model).modules() if isinstance(module, nn.Linear)]
        weights = [module.weight for module in linears] + [projection.weight]
        self._work = [(_rows_of(weight, rows), weight) for weight in weights]
        if heads is not None:
            own = [module.weight for module in heads.modules() if isinstance(module, nn.Linear)]
            own += [projection.weight] if heads.config.contract == "shared" else []
            self._work += [(_rows_of(weight, 1), weight) for weight in own]

    @torch.inference_mode()
    def __call__(self) -> float:
        """Seconds of all products once."""
        _sync(self._work[0][1])
        started = time.perf_counter()
        for rows, weight in self._work:
            F.linear(rows, weight)
        _sync(self._work[0][1])
        return time.perf_counter() - started


def _rows_of(weight: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.randn(rows, weight.shape[1], device=weight.device).to(weight.dtype)


def _sync(tensor: torch.Tensor) -> None:
    if tensor.device.type == "cuda":
        torch.cuda.synchronize(tensor.device)


def run(
    model: nn.Module,
    heads: nn.Module,
    *,
    rows: list[int],
    prompt_tokens: int,
    rounds: int,
    repeats: int,
    launch: str,
    generate: bool = True,
) -> dict[str, Any]:
    """All arms, interleaved; seconds by arm."""
    sizes = sorted({1, *rows})
    vocab = output_projection(model).vocab_size
    prompt = np.random.default_rng(0).integers(0, vocab, prompt_tokens).tolist()
    trees = {size: independent_tree(CHANCES, size - 1).tree if size > 1 else DraftTree() for size in sizes}
    decoders = {size: TreeDecoder(model, heads, tree, launch=launch) for size, tree in trees.items()}
    # Lone spare rounds of 1 row: 1 token each; of a tree: at most depth + 1, so ask for enough tokens.
    floors = {size: Floor(model, heads if size > 1 else None, size) for size in sizes}
    times: dict[str, dict[int, list[Any]]] = {"round": {}, "floor": {}}
    generated: list[float] = []
    for repeat in range(repeats + 1):
        say(f"repeat {repeat} of {repeats}" + (" (warm-up)" if repeat == 0 else ""))
        for size in sizes:
            settings = DecodeSettings(max_new_tokens=rounds + 1, stop_token_ids=())
            done = decoders[size].decode([prompt], settings, trace=True)[0]
            floor = min(floors[size]() for _ in range(3))
            if repeat:
                spent = [one.seconds for one in done.rounds if one.seconds is not None]
                times["round"].setdefault(size, []).extend(spent)
                times["floor"].setdefault(size, []).append(floor)
        if generate:
            seconds = _generate(model, prompt, rounds)
            if repeat:
                generated.append(seconds)
    cache = decoders[max(sizes)].room(1, prompt_tokens + rounds + max(sizes) + 1)[0]
    return _summed_up(times, generated, trees, prompt_tokens, cache.num_bytes, launch)


def _generate(model: nn.Module, prompt: list[int], rounds: int) -> float:
    """Seconds per step of transformers' greedy generate; the prompt's time taken off."""
    ids = torch.tensor([prompt], device=model.device)
    common = dict(attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0)

    def timed(count: int) -> float:
        _sync(ids)
        started = time.perf_counter()
        model.generate(ids, max_new_tokens=count, min_new_tokens=count, **common)
        _sync(ids)
        return time.perf_counter() - started

    return (timed(rounds + 1) - timed(1)) / rounds


def _quartiles(values: list[float]) -> dict[str, float]:
    low, middle, high = (statistics.quantiles(values, n=4) if len(values) > 1 else values * 3)[:3]
    return {"median_ms": 1000 * middle, "low_ms": 1000 * low, "high_ms": 1000 * high, "samples": len(values)}


def _summed_up(
    times: dict, generated: list[float], trees: dict, prompt_tokens: int, cache_bytes: int, launch: str
) -> dict[str, Any]:
    sizes = sorted(times["round"])
    round_of = {size: _quartiles([one.total for one in times["round"][size]]) for size in sizes}
    floor_of = {size: _quartiles(times["floor"][size]) for size in sizes}
    plain, plain_floor = round_of[1]["median_ms"], floor_of[1]["median_ms"]
    rows = []
    for size in sizes:
        overhead = round_of[size]["median_ms"] / plain
        floor = floor_of[size]["median_ms"] / plain_floor
        rows.append(
            {
                "rows": size,
                "nodes": trees[size].num_nodes,
                "round": round_of[size],
                "floor": floor_of[size],
                "stages_ms": {
                    stage: 1000 * statistics.median(getattr(one, stage) for one in times["round"][size])
                    for stage in STAGES
                },
                "c": overhead,
                "floor_c": floor,
                "c_over_floor_c": overhead / floor,
                "round_over_floor": round_of[size]["median_ms"] / floor_of[size]["median_ms"],
            }
        )
    return {
        "prompt_tokens": prompt_tokens,
        "launch": launch,
        "cache_bytes": cache_bytes,
        "rows": rows,
        "generate": _quartiles(generated) if generated else None,
    }


def show(result: dict[str, Any]) -> None:
    """The table, plain decoding against generate, and memory; plain text, so that a narrow log keeps every column."""
    print(f"launch {result['launch']}, {result['prompt_tokens']} prompt tokens; ms are medians, quartiles in brackets")
    print(
        f"{'rows':>4} {'ms/round':>20} {'propose':>8} {'forward':>8} {'accept':>7} {'commit':>7} {'floor':>7} "
        f"{'c':>5} {'floor c':>7} {'c/floor c':>9} {'round/floor':>11}"
    )
    for row in result["rows"]:
        spent, stages = row["round"], row["stages_ms"]
        quartiles = f"{spent['median_ms']:.1f} [{spent['low_ms']:.1f}-{spent['high_ms']:.1f}]"
        print(
            f"{row['rows']:>4} {quartiles:>20} {stages['propose']:>8.2f} {stages['forward']:>8.2f} "
            f"{stages['accept']:>7.2f} {stages['commit']:>7.2f} {row['floor']['median_ms']:>7.1f} {row['c']:>5.2f} "
            f"{row['floor_c']:>7.2f} {row['c_over_floor_c']:>9.2f} {row['round_over_floor']:>11.2f}"
        )
    if result["generate"]:
        plain, other = result["rows"][0]["round"], result["generate"]
        print(
            f"plain {plain['median_ms']:.1f} ms/step, transformers generate {other['median_ms']:.1f} "
            f"[{other['low_ms']:.1f}-{other['high_ms']:.1f}] ms/step: ratio "
            f"{other['median_ms'] / plain['median_ms']:.2f}"
        )
    print(f"key/value cache of the widest arm {human_bytes(result['cache_bytes'])}")


if __name__ == "__main__":
    main()
