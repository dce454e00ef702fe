"""`medusa-train fit`: a recipe becomes a checkpoint."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from medusa_train.console import say
from medusa_train.errors import UserError

if TYPE_CHECKING:
    from medusa_train.config.recipe import Recipe


def command(
    context: typer.Context,
    recipe: Annotated[Path, typer.Option("--recipe", "-r", help="A recipe file, or a name from the package.")],
    restart: Annotated[
        bool, typer.Option("--restart", help="Throw away the state of an earlier run of this output_dir.")
    ] = False,
    nproc: Annotated[
        int | None, typer.Option("--nproc", min=1, help="Processes to launch; by default one per visible GPU.")
    ] = None,
    launch: Annotated[
        bool, typer.Option("--launch/--no-launch", help="Start the processes; --no-launch trains in this one.")
    ] = True,
    with_stages: Annotated[
        bool, typer.Option("--with-stages", help="Train the stage that this recipe begins from first, where missing.")
    ] = False,
) -> None:
    """Train Medusa heads by a recipe; words after the options override it: section.key=value.

    Under a launcher (torchrun, accelerate launch) it joins; otherwise it launches itself on every visible GPU. An
    interrupted run of the same recipe goes on where it was.
    """
    from medusa_train.allocator import keep_freed_memory
    from medusa_train.config.load import load_recipe
    from medusa_train.config.stages import missing_stage_one, stage_one_words

    keep_freed_memory()
    loaded = load_recipe(recipe, context.args)
    start = missing_stage_one(loaded)
    if start is not None:
        words = stage_one_words(loaded)
        line = shlex.join(["medusa-train", "fit", *words])
        if not with_stages:
            raise UserError(
                "the heads that this recipe begins from are not there yet",
                where=f"policy.init_from: {start}",
                fix=f"run `{line}` first, or add --with-stages to this command",
            )
        say(f"stage one first: {line}")
        _train(Path(words[1]), load_recipe(words[1], words[2:]), words[2:], restart, nproc, launch)
        say("stage two")
    _train(recipe, loaded, context.args, restart, nproc, launch)


def _train(recipe: Path, loaded: Recipe, overrides: list[str], restart: bool, nproc: int | None, launch: bool) -> None:
    """One stage: in this process, or in those that it launches."""
    from medusa_train.training.launch import launch_if_needed

    if launch_if_needed(recipe, overrides, restart=restart, nproc=nproc, launch=launch):
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
