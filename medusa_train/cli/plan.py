"""`medusa-train plan`: what a recipe costs, before it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer


def command(
    context: typer.Context,
    recipe: Annotated[Path, typer.Option("--recipe", "-r", help="A recipe file, or the name of one in the package.")],
    supervised: Annotated[
        float, typer.Option("--supervised", min=0.01, max=1.0, help="Share of the positions that is supervised.")
    ] = 0.4,
    nproc: Annotated[int, typer.Option("--nproc", min=1, help="Processes; sharded recipes divide by them.")] = 1,
    tree_nodes: Annotated[int, typer.Option("--tree-nodes", min=1, help="Rows of a verification tree.")] = 21,
    committed: Annotated[
        int, typer.Option("--committed", min=0, help="Positions in the K/V cache before the tree.")
    ] = 512,
    device: Annotated[
        Literal["cuda", "cpu"] | None,
        typer.Option("--device", help="Whose memory; by default the recipe's device, else what this machine has."),
    ] = None,
    tokens: Annotated[
        int | None, typer.Option("--tokens", min=1, help="Positions to train on in all; gives an estimate of the time.")
    ] = None,
) -> None:
    """Print parameters, bytes, FLOPs per token, peak memory per process and time of a recipe. Nothing is downloaded.

    Words after the options override the recipe: section.key=value.
    """
    from medusa_train.config.load import load_recipe

    loaded = load_recipe(recipe, context.args)
    from medusa_train.training.plan import plan_recipe
    from medusa_train.training.shapes import shape_of

    shape = shape_of(loaded.base.name, loaded.base.revision, loaded.base.trust_remote_code)
    plan = plan_recipe(loaded, shape, supervised_share=supervised, processes=nproc, device=device)
    _print_parameters(plan)
    _print_decoding(plan, tree_nodes, committed)
    _print_step(plan, nproc)
    if tokens is not None:
        _print_time(plan, tokens, nproc)


def _print_parameters(plan) -> None:
    from medusa_train.console import human_bytes, human_count, table
    from medusa_train.training.ledger import block_parameters

    heads = plan.heads
    rows = [["one residual block, D^2 + D", f"{block_parameters(heads.hidden_size):,}", ""]]
    count = heads.parameter_count()
    rows.append([f"heads, {heads.contract}, K={heads.medusa_num_heads} R={heads.medusa_num_layers}", f"{count:,}",
                 f"{human_bytes(2 * count)} in bf16"])  # fmt: skip
    rows.append(["backbone", f"{plan.shape.parameters:,}", f"{human_bytes(2 * plan.shape.parameters)} in bf16"])
    for name, number in plan.trainable.items():
        rows.append([f"trainable: {name}", f"{number:,}", human_count(number)])
    rows.append(["trainable in all", f"{sum(plan.trainable.values()):,}", human_count(sum(plan.trainable.values()))])
    table("Parameters", ["what", "numbers", "size"], rows)


def _print_decoding(plan, nodes: int, committed: int) -> None:
    from medusa_train.console import human_bytes, human_count, table
    from medusa_train.training.ledger import allowed_attention_pairs, dense_attention_pairs, head_flops, kv_bytes

    shape = plan.shape
    one = kv_bytes(1, shape.layers, shape.kv_heads, shape.head_dim, 2)
    rows = [
        ["head FLOPs of a round (one row), 2 K (R D^2 + V D)", human_count(head_flops(plan.heads, 1))],
        [f"K/V of {nodes} tree rows, bf16", human_bytes(nodes * one)],
        ["K/V of one committed position, bf16", human_bytes(one)],
        [f"attention pairs of {nodes} tree rows at {committed} positions, dense mask",
         f"{dense_attention_pairs(nodes, committed):,}"],
        ["the same, allowed by the mask: a root with leaves .. a chain",
         f"{allowed_attention_pairs(nodes, committed, 2 * nodes - 1):,} .. "
         f"{allowed_attention_pairs(nodes, committed, nodes * (nodes + 1) // 2):,}"],
        ["a plain step's FLOPs", human_count(shape.decoder_flops(1, committed) + 2 * shape.vocab * shape.hidden)],
    ]  # fmt: skip
    table("Decoding", ["what", "amount"], rows)


def _print_step(plan, processes: int) -> None:
    from medusa_train.console import human_bytes, human_count, table

    unit = "cached row" if plan.cached else "position"
    flops = [[name, human_count(value)] for name, value in plan.flops_per_token.items()]
    flops.append(["in all", human_count(plan.total_flops_per_token)])
    table(f"FLOPs per {unit}", ["part", "FLOPs"], flops)
    memory = [[name, human_bytes(value)] for name, value in plan.memory.parts.items()]
    memory.append(["a training step in all", human_bytes(plan.memory.total)])
    memory.append(["a held-out check", human_bytes(plan.check)])
    memory += [[what, human_bytes(value)] for what, value in plan.before.items()]
    memory.append(["at most", human_bytes(plan.height)])
    place = "a CPU (--device cuda for a GPU)" if plan.on_cpu else "a GPU"
    title = f"Memory per process ({processes}) on {place}, micro-batch of {plan.tokens_per_step:,} {unit}s"
    table(title, ["part", "bytes"], memory)


def _print_time(plan, tokens: int, processes: int) -> None:
    from medusa_train.console import human_count, human_seconds, out
    from medusa_train.training.measure import matmul_flops_per_second

    rate = matmul_flops_per_second()
    seconds = plan.total_flops_per_token * tokens / rate / processes
    out().print(
        f"Time: {human_count(tokens)} {'rows' if plan.cached else 'positions'} at this machine's "
        f"{human_count(rate)}FLOP/s (one bf16 product, measured): at least {human_seconds(seconds)}; "
        f"the rest of a step usually adds a quarter to a half",
        markup=False,
    )
