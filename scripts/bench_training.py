"""Training speed and memory on SmolLM2-135M (bf16, own heads, 40 % of the positions supervised), arms interleaved.

    python scripts/bench_training.py --base smollm2-135m --shape 4x1024x5 --rounds 3      (B x T x K)
    python scripts/bench_training.py --base smollm2-135m --shape 2x512x3 --rounds 5
    python scripts/bench_training.py --vocabularies            peak memory of the loss by chunk and vocabulary

Arms, one step of each in turn, medians over the rounds after one step to warm up:
    plain          backbone, then every head at every position: logits [B, T, V] per head kept for autograd, fp32 CE
    ours           supervised rows gathered first, projection and loss fused by chunks; fit's own module
    floor          the matrix products that cannot be avoided, same shapes and dtype, and the optimizer's step
    cached         ours from cached hidden states (no backbone)
    cached floor   its products and the optimizer's step

`extra` memory is the peak of a step over weights, gradients and optimizer state, from the kernel's high-water mark.

Measured on two cores of a shared AMX Xeon (wall clock, own heads, V = 49,152, chunks of 2,048 rows):

    shape, threads   plain   ours   floor   cached  cached floor   plain : ours   extra memory, ours : plain
    4x1024x5, 2      10.53   5.30    3.77    3.15      2.56            2.0        548 MiB : 8.4 GiB
    2x512x3, 2        1.98   1.20    0.75    0.58      0.45            1.65       235 MiB : 1.4 GiB
    2x512x5, 1        3.97   1.90    1.23    1.26      0.84            2.1        178 MiB : 1.7 GiB

Ours reaches 71, 63 and 65 % of its floor, cached 81, 78 and 67 %; other runs of the first line gave 52 to 72 % and 74
to 93 %: on a shared machine the floor itself spreads by a third. Keeping freed memory (medusa_train/allocator.py, for
all arms alike) took cached steps from 3.2 to 2.0-2.8 s and the plain way's from 14-16 to 10.5 s, so that the ratio
between them fell from 2.6 to 2.0 while both became faster. Of a step at 2x512x3 products take 64 % (45 % before),
other elementwise work 12 %, copies between dtypes 9 %, attention 7 %, the optimizer 5 %, the loss's softmax 3 %. What
keeps a step with its backbone below its floor is that backbone's norms, gates, rotations and attention. Half of the
products' own time is the weights' gradient, whose transposed operand runs at 0.2 to 0.45 of the others' rate;
multiplying the other way round is fast, but turning the result costs as much (tried by blocks of 512 to 49,152
tokens).
Memory of the loss over 1,024 rows, by chunk (32, 128, 512): V = 32,000: 3, 9, 33 MiB; 128,000: 9, 34, 126 MiB;
256,000: 18, 65, 251 MiB, where all logits would take 0.3, 1.2 and 2.4 GiB.
"""

from __future__ import annotations

import os

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # torch reads it once; see keep_freed_memory below

import argparse
import ctypes
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa_train.allocator import keep_freed_memory
from medusa_train.console import human_bytes, say, table
from medusa_train.modeling.backbone import hidden_states, output_projection
from medusa_train.modeling.base import load_base
from medusa_train.modeling.heads import HeadsConfig, MedusaHeads, new_heads
from medusa_train.provenance import environment
from medusa_train.training.fused import FusedOptions, Projection, fused_cross_entropy
from medusa_train.training.losses import IGNORE, channel_labels, supervised_rows
from medusa_train.training.trainee import Objective, Trainee

SUPERVISED = 0.4


@dataclass
class World:
    """One batch and one model for all arms."""

    model: nn.Module
    heads: MedusaHeads
    optimizer: torch.optim.Optimizer
    ids_BT: Tensor
    labels_KBT: Tensor
    chunk_rows: int

    @property
    def positions(self) -> int:
        """B T."""
        return self.ids_BT.numel()


def make_world(base: str, batch: int, length: int, num_heads: int, chunk_rows: int) -> World:
    """SmolLM2 (or another base), own heads with fp32 masters, random ids; each row supervised in one run of 40 %."""
    torch.manual_seed(0)
    model = load_base(base, dtype="bfloat16").model
    projection = output_projection(model)
    config = HeadsConfig("own", num_heads, 1, projection.hidden_size, projection.vocab_size)
    heads = new_heads(config, projection, dtype=torch.float32)
    ids_BT = torch.randint(0, projection.vocab_size, (batch, length))
    mask_BT = torch.zeros_like(ids_BT)
    mask_BT[:, int(length * (1 - SUPERVISED)) :] = 1
    labels = channel_labels(ids_BT, mask_BT, torch.zeros_like(ids_BT), [j + 2 for j in range(num_heads)])
    optimizer = torch.optim.AdamW(heads.parameters(), lr=1e-4, fused=True)
    return World(model, heads, optimizer, ids_BT, labels, chunk_rows)


def plain_step(world: World) -> Callable[[], None]:
    """All positions, all logits, autograd."""
    projection = output_projection(world.model)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                hidden_BTD = hidden_states(world.model, world.ids_BT)
            logits = [world.heads.logits(hidden_BTD, j, projection) for j in range(world.heads.config.medusa_num_heads)]
        losses = [
            F.cross_entropy(one.flatten(0, 1).float(), world.labels_KBT[j].flatten(), ignore_index=IGNORE)
            for j, one in enumerate(logits)
        ]
        sum(losses).backward()
        finish(world)

    return step


def our_step(world: World, cached: bool) -> Callable[[], None]:
    """The module that fit trains, from ids or from cached rows."""
    config = world.heads.config
    objective = Objective("heads_only", config.medusa_num_heads, "fused", FusedOptions(world.chunk_rows, 16))
    trainee = Trainee(world.heads, output_projection(world.model), objective, None if cached else world.model)
    rows_M, labels_KM = supervised_rows(world.labels_KBT)
    scale_K = 0.8 / (labels_KM != IGNORE).sum(1)
    inputs = {"labels": labels_KM, "rows": rows_M, "input_ids": world.ids_BT, "expected": scale_K}
    if cached:
        hidden_MD = torch.randn(rows_M.numel(), config.hidden_size, dtype=torch.bfloat16)
        inputs = {"labels": labels_KM, "hidden": hidden_MD, "expected": scale_K}

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            sums = trainee(**inputs)["sums"]
        (sums * scale_K).sum().backward()
        finish(world)

    return step


def floor_step(world: World, cached: bool) -> Callable[[], None]:
    """Matrix products only: the backbone's on all positions, the heads' three on supervised rows; optimizer."""
    text = world.model.config
    rows = supervised_rows(world.labels_KBT)[0].numel()
    backbone = [] if cached else backbone_products(text, *world.ids_BT.shape)
    size, vocabulary, heads = text.hidden_size, world.heads.config.projection_rows, world.heads.config.medusa_num_heads
    z = torch.randn(rows, size, dtype=torch.bfloat16)
    w = torch.randn(vocabulary, size, dtype=torch.bfloat16)
    block = torch.randn(size, size, dtype=torch.bfloat16)
    gradients = [torch.zeros_like(parameter) for parameter in world.heads.parameters()]
    chunks = [slice(start, start + world.chunk_rows) for start in range(0, rows, world.chunk_rows)]

    def step() -> None:
        for left, right, times in backbone:
            for _ in range(times):
                left @ right
        for _ in range(heads):
            z @ block.T
            for chunk in chunks:
                logits = z[chunk] @ w.T
                logits @ w
                logits.T @ z[chunk]
            z.T @ z
        for parameter, gradient in zip(world.heads.parameters(), gradients, strict=True):
            parameter.grad = gradient
        finish(world)

    return step


def backbone_products(text: object, batch: int, length: int) -> list[tuple[Tensor, Tensor, int]]:
    """(left, right, times) of every product of the decoder's forward."""

    def make(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16)

    size, width, tokens = text.hidden_size, text.intermediate_size, batch * length
    head_dim = getattr(text, "head_dim", None) or size // text.num_attention_heads
    q, kv = text.num_attention_heads * head_dim, text.num_key_value_heads * head_dim
    shapes = [(size, q, 1), (size, kv, 2), (q, size, 1), (size, width, 2), (width, size, 1)]
    products = [(make(tokens, a), make(a, b), times * text.num_hidden_layers) for a, b, times in shapes]
    pairs = batch * text.num_attention_heads
    # Causal attention needs half of the pairs: half the keys stand for them.
    half = length // 2
    products.append((make(pairs, length, head_dim), make(pairs, head_dim, half), text.num_hidden_layers))
    products.append((make(pairs, length, half), make(pairs, half, head_dim), text.num_hidden_layers))
    return products


def finish(world: World) -> None:
    """The optimizer's step; gradients are freed, as the Trainer does."""
    world.optimizer.step()
    world.optimizer.zero_grad(set_to_none=True)


def resident() -> tuple[int, int]:
    """(now, high-water mark) of resident memory in bytes."""
    status = Path("/proc/self/status").read_text()
    found = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("Vm")}
    return found["VmRSS"], found["VmHWM"]


def extra_memory(step: Callable[[], None], gradients: int = 0) -> int:
    """Bytes that one step needs above what lives between steps and its gradients."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before, _ = resident()
    step()
    return resident()[1] - before - gradients


def run_arms(world: World, rounds: int, skip: set[str]) -> dict[str, dict[str, list[float]]]:
    """Seconds of every arm's steps, one step of each in turn; then one more step of each for its extra memory."""
    arms = {
        "plain": plain_step(world),
        "ours": our_step(world, cached=False),
        "floor": floor_step(world, cached=False),
        "cached": our_step(world, cached=True),
        "cached floor": floor_step(world, cached=True),
    }
    arms = {name: step for name, step in arms.items() if name not in skip}
    found: dict[str, dict[str, list[float]]] = {name: {"seconds": [], "cpu": [], "extra": []} for name in arms}
    gradients = sum(p.numel() * p.element_size() for p in world.heads.parameters())
    for number in range(rounds + 2):
        for name, step in arms.items():
            if number == rounds + 1:  # measuring memory gives it back first, which would cost the steps time
                found[name]["extra"].append(extra_memory(step, gradients))
                continue
            began, cpu = time.perf_counter(), time.process_time()
            step()
            if number:
                found[name]["seconds"].append(time.perf_counter() - began)
                found[name]["cpu"].append(time.process_time() - cpu)
        say(f"round {number} of {rounds} done" if number <= rounds else "memory measured")
    return found


def report(world: World, found: dict[str, dict[str, list[float]]], clock: str) -> None:
    """Prints medians, spreads and the ratios that are asked for."""
    rows, median = [], {}
    supervised = supervised_rows(world.labels_KBT)[0].numel()
    for name, values in found.items():
        seconds = median[name] = statistics.median(values[clock])
        spread = f"{min(values[clock]):.2f}..{max(values[clock]):.2f}"
        extra = "" if "floor" in name else human_bytes(statistics.median(values["extra"]))
        rows.append(
            [name, f"{seconds:.2f}", spread, f"{world.positions / seconds:.0f}", f"{supervised / seconds:.0f}", extra]
        )
    table(
        f"One step ({clock})", ["arm", "median s", "spread", "positions/s", "supervised rows/s", "extra memory"], rows
    )
    ratios = []
    if {"plain", "ours"} <= median.keys():
        memory = statistics.median(found["ours"]["extra"]) / statistics.median(found["plain"]["extra"])
        ratios += [
            ["ours against plain", f"{median['plain'] / median['ours']:.2f}x"],
            ["extra memory", f"{memory:.3f}"],
        ]
    for ours, floor in (("ours", "floor"), ("cached", "cached floor")):
        if {ours, floor} <= median.keys():
            ratios.append([f"{ours} reaches of its floor's speed", f"{median[floor] / median[ours]:.1%}"])
    table("Ratios", ["what", "value"], ratios)


def where_time_goes(world: World) -> None:
    """A step of `ours` by kind of operation (self time)."""
    from torch.profiler import profile

    step = our_step(world, cached=False)
    step()
    with profile() as profiler:
        step()
    kinds = {
        "matrix products": ("mm", "bmm", "addmm", "linear"), "attention": ("scaled_dot", "flash"),
        "optimizer": ("adamw",), "softmax of the loss": ("exp", "amax", "sub", "sum", "log", "scatter", "gather"),
        "copies between dtypes": ("copy", "to", "clone"), "ranks": ("topk",),
    }  # fmt: skip
    totals: dict[str, float] = {}
    for event in profiler.key_averages():
        name = event.key.removeprefix("aten::").strip("_")
        kind = next((kind for kind, words in kinds.items() if any(name.startswith(w) or w in name for w in words if
                     len(w) > 3 or name.startswith(w))), "other elementwise")  # fmt: skip
        totals[kind] = totals.get(kind, 0.0) + event.self_cpu_time_total / 1e6
    whole = sum(totals.values())
    rows = [[kind, f"{t:.2f}", f"{t / whole:.0%}"] for kind, t in sorted(totals.items(), key=lambda item: -item[1])]
    table("Where a step's time goes", ["kind", "seconds", "share"], rows)


def by_vocabulary(rows: int = 1024, size: int = 64) -> None:
    """Extra memory of the fused loss and of the plain one, by vocabulary and chunk."""
    lines = []
    for vocabulary in (32_000, 128_000, 256_000):
        w = torch.randn(vocabulary, size).bfloat16()
        x = torch.randn(rows, size).bfloat16().requires_grad_()
        labels = torch.randint(0, vocabulary, (rows,))
        line = [f"{vocabulary:,}"]
        for chunk in (32, 128, 512):
            projection = Projection(((x, w),))

            def fused(projection=projection, labels=labels, chunk=chunk) -> None:
                fused_cross_entropy(projection, labels, FusedOptions(chunk))[0].sum.backward()

            fused()
            line.append(human_bytes(extra_memory(fused)))
        line.append(human_bytes(rows * vocabulary * (2 + 4 + 4)))
        lines.append(line)
    columns = ["V", "chunk 32", "chunk 128", "chunk 512", "all logits (bf16, fp32, gradient), by formula"]
    table(f"Extra memory of the loss over {rows:,} rows", columns, lines)


def main() -> None:
    """Parses arguments and runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="smollm2-135m")
    parser.add_argument("--shape", default="2x512x3", help="B x T x K")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--chunk-rows", type=int, default=2048)
    parser.add_argument("--skip", nargs="*", default=[], help="arms to leave out")
    parser.add_argument(
        "--clock", choices=["seconds", "cpu"], default="seconds", help="wall time, or CPU time of a busy box"
    )
    parser.add_argument("--vocabularies", action="store_true", help="only peak memory by chunk and vocabulary")
    parser.add_argument("--profile", action="store_true", help="also where a step's time goes")
    parser.add_argument("--json", type=Path, help="write the raw figures here")
    asked = parser.parse_args()
    keep_freed_memory()  # as `medusa-train fit` does, for all arms alike
    torch.set_num_threads(asked.threads)
    if asked.vocabularies:
        by_vocabulary()
        return
    batch, length, heads = map(int, asked.shape.split("x"))
    world = make_world(asked.base, batch, length, heads, asked.chunk_rows)
    found = run_arms(world, asked.rounds, set(asked.skip))
    report(world, found, asked.clock)
    if asked.profile:
        where_time_goes(world)
    if asked.json:
        asked.json.write_text(json.dumps({"shape": asked.shape, "arms": found, "environment": environment()}, indent=1))


if __name__ == "__main__":
    main()
