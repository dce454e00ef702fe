"""Training speed and memory on SmolLM2-135M (bf16, by default 40 % of the positions supervised), arms interleaved.

    python scripts/bench_training.py --base smollm2-135m --shape 4x1024x5 --rounds 3      (B x T x K)
    python scripts/bench_training.py --base smollm2-135m --shape 2x512x3 --rounds 5

Arms, one step of each in turn, medians over the rounds after one step to warm up:
    plain          backbone, then every head at every position: logits [K, B, T, V] kept for autograd, fp32 CE per head
    ours           supervised rows gathered first, projection and loss fused by chunks; fit's own module
    compiled       ours with `torch_compile: true` (--compile)
    backbone       its forward alone; `backbone compiled` with --compile
    floor          the matrix products that cannot be avoided, same shapes and dtype, and the optimizer's step
    cached         ours from cached hidden states (no backbone)
    cached floor   its products and the optimizer's step
    (turned)       a floor whose weights' gradients are multiplied the way round that is fastest here, as ours are; the
                   plain floors multiply as torch's autograd does

The plain way has a process of its own, so that its memory is handled as torch does by itself; `--plain kept` lets it
keep freed memory, as `fit` does, and `--plain unstacked` leaves the K heads' logits apart besides.
`extra` memory is the peak of a step over weights, gradients and optimizer state, from the kernel's high-water mark.

Measured on two cores of a shared AMX Xeon (wall clock, V = 49,152, chunks of 2,048 rows, own heads), medians in s of
the last run, and the ratios of three or four runs of a day:

    shape, threads   plain   ours   compiled   floor (turned)   cached   cached floor (turned)
    4x1024x5, 2      20.99   4.74     3.75      3.14 (2.79)      2.54         1.98 (1.98)
    2x512x3, 2        2.97   1.16     1.14      0.63 (0.46)      0.40         0.31 (0.31)
    2x512x5, 1        6.58   1.83       -       1.05 (1.31)      1.15         0.90 (0.68)

    ratio                                        4x1024x5, 2     2x512x3, 2     2x512x5, 1
    ours against plain                           4.4 to 5.4      2.6 to 3.2     3.6 to 4.5
    compiled against plain                       4.4 to 6.0      2.6 to 3.6
    cached against plain                         8.3 to 8.6      5.7 to 7.5     5.7 to 7.4
    extra memory, ours against plain             0.05 to 0.08    0.13 to 0.14   0.09
    ours, of the floor's speed                   61 to 70 %      54 to 66 %     57 to 65 %
    compiled, of the floor's speed               66 to 84 %      55 to 74 %
    cached, of the cached floor's speed          78 to 89 %      71 to 82 %     78 to 81 %

Of the turned floors ours reaches 59 and 40 %, cached 78 and 77 % (one run). Half of the plain way's time is memory that
is mapped and zeroed anew each step: with `--plain kept` it takes 2.3 and 1.85 times ours, with `--plain unstacked` 2.2
and 1.8. A compiled forward of the backbone takes 80 to 90 % of a stock one.

What keeps a step with its backbone below its floor is the stock backbone: at 4x1024x5 attention takes 0.62 s where its
bare products take 0.18, norms, gates and rotations 0.6 s; the loss adds 0.6 s (copies between bf16 and fp32 0.2,
softmax 0.25, turning gradients 0.1, ranks 0.05).

All positions supervised, 2x512x5, one core (`--threads 1 --supervised 1.0 --contract own --clock cpu`, other work
beside it): own heads 384 tokens/s, the process 3.0 GiB at its height; `--contract shared` 525 tokens/s and 0.8 GiB.

Cached hidden states, 1,656 rows a step, one core, 5 heads: own 430, shared 910, reduced to 8,192 tokens 3,180 rows/s
(`--threads 1 --shape 4x1024x5 --contract reduced`).
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa_train.allocator import give_back_freed, keep_freed_memory
from medusa_train.console import human_bytes, say, table
from medusa_train.modeling.backbone import hidden_states, output_projection
from medusa_train.modeling.base import load_base
from medusa_train.modeling.heads import HeadsConfig, MedusaHeads, new_heads
from medusa_train.provenance import environment
from medusa_train.training.compiling import compile_blocks
from medusa_train.training.fused import FusedOptions
from medusa_train.training.losses import IGNORE, channel_labels, supervised_rows
from medusa_train.training.memory import CLEAR, resident
from medusa_train.training.trainee import Objective, Trainee

HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"


@dataclass
class World:
    """One batch and one model for all arms."""

    model: nn.Module
    heads: MedusaHeads
    optimizer: torch.optim.Optimizer
    ids_BT: Tensor
    labels_KBT: Tensor
    chunk_rows: int


def shape_of(asked: argparse.Namespace) -> tuple[int, int, int]:
    """(B, T, K)."""
    batch, length, heads = map(int, asked.shape.split("x"))
    return batch, length, heads


def make_world(asked: argparse.Namespace) -> World:
    """SmolLM2 (or another base), heads with fp32 masters, random ids; each row supervised in one run at its end."""
    torch.manual_seed(0)
    batch, length, num_heads = shape_of(asked)
    model = load_base(asked.base, dtype="bfloat16").model.requires_grad_(False)
    projection = output_projection(model)
    reduced = asked.reduced if asked.contract == "reduced" else None
    config = HeadsConfig(asked.contract, num_heads, 1, projection.hidden_size, projection.vocab_size, reduced)
    token_map = None if reduced is None else torch.arange(reduced)
    heads = new_heads(config, projection, token_map, dtype=torch.float32)
    ids_BT = torch.randint(0, config.projection_rows, (batch, length))
    mask_BT = torch.zeros_like(ids_BT)
    mask_BT[:, length - round(length * asked.supervised) :] = 1
    labels = channel_labels(ids_BT, mask_BT, torch.zeros_like(ids_BT), [j + 2 for j in range(num_heads)])
    optimizer = torch.optim.AdamW(heads.parameters(), lr=1e-4, fused=True)
    return World(model, heads, optimizer, ids_BT, labels, asked.chunk_rows)


def plain_step(world: World, stacked: bool) -> Callable[[], None]:
    """All positions, all logits, autograd; `stacked` as [K, B, T, V], as the reference trainer has them."""
    projection = output_projection(world.model)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                hidden_BTD = hidden_states(world.model, world.ids_BT)
            logits = [world.heads.logits(hidden_BTD, j, projection) for j in range(world.heads.config.medusa_num_heads)]
            if stacked:
                logits = torch.stack(logits).unbind()
        losses = [
            F.cross_entropy(one.flatten(0, 1).float(), world.labels_KBT[j].flatten(), ignore_index=IGNORE)
            for j, one in enumerate(logits)
        ]
        del logits
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


def compiled_world(world: World) -> World:
    """The same with a second copy of the backbone, its layers compiled."""
    model = copy.deepcopy(world.model)
    compile_blocks(model, {"torch_compile": True})
    return replace(world, model=model)


def backbone_step(world: World) -> Callable[[], None]:
    """The frozen backbone's forward on all positions."""

    @torch.no_grad()
    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            hidden_states(world.model, world.ids_BT)

    return step


def floor_step(world: World, cached: bool, turned: bool) -> Callable[[], None]:
    """Matrix products only: the backbone's on all positions, the heads' three on supervised rows; optimizer.

    Args:
        turned: the weights' gradients as [D, V] products, not as [V, D] ones with a transposed left operand.
    """
    text = world.model.config
    rows = supervised_rows(world.labels_KBT)[0].numel()
    backbone = [] if cached else backbone_products(text, *world.ids_BT.shape)
    size, vocabulary, heads = text.hidden_size, world.heads.config.projection_rows, world.heads.config.medusa_num_heads
    z = torch.randn(rows, size, dtype=torch.bfloat16)
    shared = world.heads.projections is None  # one matrix for all heads, and no gradient of it
    weights = [torch.randn(vocabulary, size, dtype=torch.bfloat16) for _ in range(1 if shared else heads)]
    block = torch.randn(size, size, dtype=torch.bfloat16)
    gradients = [torch.zeros_like(parameter) for parameter in world.heads.parameters()]
    chunks = [slice(start, start + world.chunk_rows) for start in range(0, rows, world.chunk_rows)]

    def step() -> None:
        for left, right, times in backbone:
            for _ in range(times):
                left @ right
        for head in range(heads):
            w = weights[0 if shared else head]
            z @ block.T
            for chunk in chunks:
                logits = z[chunk] @ w.T
                logits @ w
                if not shared and turned:
                    z[chunk].T.contiguous() @ logits
                elif not shared:
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


def step_memory(step: Callable[[], None]) -> tuple[int, int]:
    """(bytes that one step needs above what lives between steps, resident bytes of the process at its height)."""
    give_back_freed()
    CLEAR.write_text("5")
    before = resident()["VmRSS"]
    step()
    height = resident()["VmHWM"]
    return height - before, height


def arms_of(world: World, asked: argparse.Namespace, names: list[str]) -> dict[str, Callable[[], None]]:
    """The steps of some arms, over one batch and one set of heads."""
    makers: dict[str, Callable[[], Callable[[], None]]] = {
        "plain": lambda: plain_step(world, stacked=asked.plain != "unstacked"),
        "ours": lambda: our_step(world, cached=False),
        "compiled": lambda: our_step(compiled_world(world), cached=False),
        "backbone": lambda: backbone_step(world),
        "backbone compiled": lambda: backbone_step(compiled_world(world)),
        "floor": lambda: floor_step(world, cached=False, turned=False),
        "floor (turned)": lambda: floor_step(world, cached=False, turned=True),
        "cached": lambda: our_step(world, cached=True),
        "cached floor": lambda: floor_step(world, cached=True, turned=False),
        "cached floor (turned)": lambda: floor_step(world, cached=True, turned=True),
    }
    return {name: makers[name]() for name in names}


def serve(pipe: Any, asked: argparse.Namespace, names: list[str], keep: bool) -> None:
    """A process of some arms: answers (arm, memory asked) with seconds (wall, CPU) or bytes (extra, in all)."""
    if keep:
        keep_freed_memory()  # as `medusa-train fit` does
    torch.set_num_threads(asked.threads)
    world = make_world(asked)
    arms = arms_of(world, asked, names)
    gradients = sum(p.numel() * p.element_size() for p in world.heads.parameters())
    pipe.send(supervised_rows(world.labels_KBT)[0].numel())
    while (order := pipe.recv()) is not None:
        name, memory = order
        if memory:
            rise, height = step_memory(arms[name])
            pipe.send((rise - gradients, height))
            continue
        began, cpu = time.perf_counter(), time.process_time()
        arms[name]()
        pipe.send((time.perf_counter() - began, time.process_time() - cpu))
    if asked.profile and "ours" in names:
        where_time_goes(world)


def start(asked: argparse.Namespace, names: list[str], keep: bool) -> tuple[Any, Any]:
    """(process, pipe) of a server of `names`."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    before = os.environ.pop(HUGE_PAGES, None)
    if keep:  # torch reads it when it is loaded, which is before `serve`
        os.environ[HUGE_PAGES] = "1"
    process = context.Process(target=serve, args=(there, asked, names, keep), daemon=True)
    process.start()
    os.environ.pop(HUGE_PAGES, None)
    if before is not None:
        os.environ[HUGE_PAGES] = before
    there.close()
    return process, here


def run_arms(asked: argparse.Namespace) -> tuple[int, dict[str, dict[str, list[float]]]]:
    """(supervised rows, seconds of every arm's steps, one step of each in turn; then its extra memory)."""
    compiled = ["compiled", "backbone", "backbone compiled"] if asked.compile else []
    ours = ["ours", *compiled, "floor", "floor (turned)", "cached", "cached floor", "cached floor (turned)"]
    groups = [(["plain"], asked.plain != "stock"), (ours, True)]
    groups = [([name for name in names if name not in asked.skip], keep) for names, keep in groups]
    servers = [(names, *start(asked, names, keep)) for names, keep in groups if names]
    supervised = max(pipe.recv() for _, _, pipe in servers)  # all are ready once they have said it
    arms = [(name, pipe) for names, _, pipe in servers for name in names]
    found: dict[str, dict[str, list[float]]] = {
        name: {"seconds": [], "cpu": [], "extra": [], "height": []} for name, _ in arms
    }
    for number in range(asked.rounds + 1):
        for name, pipe in arms:
            pipe.send((name, False))
            seconds, cpu = pipe.recv()
            if number:
                found[name]["seconds"].append(seconds)
                found[name]["cpu"].append(cpu)
        say(f"round {number} of {asked.rounds} done")
    for name, pipe in arms:  # measuring memory gives it back first, which would cost the steps time
        if "floor" not in name and "backbone" not in name:
            pipe.send((name, True))
            extra, height = pipe.recv()
            found[name]["extra"].append(extra)
            found[name]["height"].append(height)
    for _, process, pipe in servers:
        pipe.send(None)
        process.join()
    return supervised, found


def report(positions: int, supervised: int, found: dict[str, dict[str, list[float]]], clock: str) -> None:
    """Prints medians, spreads and the ratios that are asked for."""
    rows, median = [], {}
    for name, values in found.items():
        seconds = median[name] = statistics.median(values[clock])
        spread = f"{min(values[clock]):.2f}..{max(values[clock]):.2f}"
        memory = [human_bytes(statistics.median(values[kind])) if values[kind] else "" for kind in ("extra", "height")]
        speed = [f"{positions / seconds:.0f}", f"{supervised / seconds:.0f}"]
        rows.append([name, f"{seconds:.2f}", spread, *speed, *memory])
    columns = ["arm", "median s", "spread", "positions/s", "supervised rows/s", "extra memory", "process in all"]
    table(f"One step ({clock})", columns, rows)
    ratios = []
    for name in ("ours", "compiled", "cached"):
        if {"plain", name} <= median.keys():
            ratios.append([f"{name} against plain", f"{median['plain'] / median[name]:.2f}x"])
    if {"plain", "ours"} <= median.keys():
        extra = {name: statistics.median(found[name]["extra"]) for name in ("plain", "ours")}
        ratios.append(["extra memory, ours against plain", f"{extra['ours'] / extra['plain']:.3f}"])
    for ours, floor in (("ours", "floor"), ("compiled", "floor"), ("cached", "cached floor")):
        for kind in (floor, f"{floor} (turned)"):
            if {ours, kind} <= median.keys():
                ratios.append([f"{ours} reaches of the {kind}'s speed", f"{median[kind] / median[ours]:.1%}"])
    if {"backbone", "backbone compiled"} <= median.keys():
        ratios.append(["a compiled forward takes", f"{median['backbone compiled'] / median['backbone']:.1%}"])
    table("Ratios of medians", ["what", "value"], ratios)


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


def main() -> None:
    """Parses arguments and runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="smollm2-135m")
    parser.add_argument("--shape", default="2x512x3", help="B x T x K")
    parser.add_argument("--contract", choices=["own", "shared", "reduced"], default="own")
    parser.add_argument("--reduced", type=int, default=8192, metavar="V'", help="tokens of `reduced` heads")
    parser.add_argument("--supervised", type=float, default=0.4, help="share of the positions that is supervised")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--chunk-rows", type=int, default=2048)
    parser.add_argument("--skip", nargs="*", default=[], help="arms to leave out")
    parser.add_argument("--compile", action="store_true", help="also ours with compiled blocks (needs a C++ compiler)")
    parser.add_argument(
        "--plain", choices=["stock", "kept", "unstacked"], default="stock", help="which plain way; see above"
    )
    parser.add_argument(
        "--clock", choices=["seconds", "cpu"], default="seconds", help="wall time, or CPU time of a busy box"
    )
    parser.add_argument("--profile", action="store_true", help="also where a step's time goes")
    parser.add_argument("--json", type=Path, help="write the raw figures here")
    asked = parser.parse_args()
    batch, length, _ = shape_of(asked)
    supervised, found = run_arms(asked)
    report(batch * length, supervised, found, asked.clock)
    if asked.json:
        asked.json.write_text(json.dumps({"shape": asked.shape, "arms": found, "environment": environment()}, indent=1))


if __name__ == "__main__":
    main()
