"""`medusa-train fit`: a recipe becomes a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def command(
    context: typer.Context,
    recipe: Annotated[Path, typer.Option("--recipe", "-r", help="The recipe (YAML); see recipes/.")],
    restart: Annotated[
        bool, typer.Option("--restart", help="Throw away the state of an earlier run of this output_dir.")
    ] = False,
    nproc: Annotated[
        int | None, typer.Option("--nproc", min=1, help="Processes to launch; by default one per visible GPU.")
    ] = None,
    launch: Annotated[
        bool, typer.Option("--launch/--no-launch", help="Start the processes; --no-launch trains in this one.")
    ] = True,
) -> None:
    """Train Medusa heads by a recipe; words after the options override it: section.key=value.

    Under a launcher (torchrun, accelerate launch) it joins; otherwise it launches itself on every visible GPU. An
    interrupted run of the same recipe goes on where it was.
    """
    from medusa_train.allocator import keep_freed_memory
    from medusa_train.config.load import load_recipe

    keep_freed_memory()

    loaded = load_recipe(recipe, context.args)
    from medusa_train.training.launch import launch_if_needed

    if launch_if_needed(recipe, context.args, restart=restart, nproc=nproc, launch=launch):
        return
    from medusa_train.training.fit import fit

    fit(loaded, replay=tree_replay(loaded.evaluation.replay_nodes), restart=restart)


def tree_replay(nodes: int):
    """Held-out ranks -> {"tokens_per_round": x}: a tree searched on half of the rows, replayed on the rest, both ways.

    Decoding belongs to another station than training, which is why this is handed in.
    """
    from medusa_train.decoding.ranks import Calibration, RankSpan
    from medusa_train.decoding.replay import replay
    from medusa_train.decoding.search import search

    def run(spans) -> dict[str, float]:
        import numpy as np

        held = [
            RankSpan(span.ranks_SK, np.ones(len(span.ranks_SK), dtype=bool), span.row_id, span.source) for span in spans
        ]
        whole = Calibration(tuple(held), 10)
        tokens = rounds = 0
        first, second = whole.split()
        for searched, replayed in ((first, second), (second, first)):
            tree = search(searched, nodes, "joint").tree
            result = replay(replayed.spans, tree, replayed.top_k)
            tokens, rounds = tokens + result.tokens, rounds + result.rounds
        return {"tokens_per_round": tokens / max(1, rounds)}

    return run
