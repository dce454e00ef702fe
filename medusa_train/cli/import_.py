"""`medusa-train import`: heads of another program become a checkpoint."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from medusa_train.console import say, table


class ContractChoice(str, Enum):
    """What becomes of the projections."""

    auto = "auto"
    own = "own"
    shared = "shared"


def command(
    source: Annotated[
        str,
        typer.Argument(
            help="Weights file (.safetensors, or a .pt that holds tensors only), folder, or hub id; in the layout of "
            "FasterDecoding, Medusa-2, vLLM, TGI, TensorRT-LLM or ModelOpt.",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Option(help="Checkpoint folder to write.", show_default=False)],
    base: Annotated[
        str | None,
        typer.Option(
            help="The base they belong to: alias, folder or hub id.", show_default="as the source's config says"
        ),
    ] = None,
    contract: Annotated[
        ContractChoice,
        typer.Option(
            help="auto: as in the file. own: shared heads get a copy of the lm_head each. shared: projections that "
            "equal the lm_head are taken away."
        ),
    ] = ContractChoice.auto,
    trust_tensors: Annotated[
        bool, typer.Option("--trust-tensors", help="Where the config's counts contradict the tensors, the tensors win.")
    ] = False,
    tree: Annotated[
        Path | None, typer.Option(help="A tree to store with them: a JSON list of rank paths.", show_default=False)
    ] = None,
    chat_template: Annotated[
        Path | None, typer.Option(help="Jinja file, for a base without a chat template.", show_default=False)
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Hub revision of the base.", show_default=False)] = None,
) -> None:
    """Turn another program's heads into a checkpoint, or say in one error all that is wrong with them. Counts come
    from the tensors and must equal the config's. Pickles are read without running code, and refused where they hold
    anything but tensors.
    """
    from medusa_train.checkpoint.importing import import_heads

    done = import_heads(
        source,
        out,
        base,
        contract=contract.value,
        trust_tensors=trust_tensors,
        tree=tree,
        chat_template=None if chat_template is None else str(chat_template),
        revision=revision,
    )
    for note in done.notes:
        say(f"note: {note}")
    rows = [("heads", done.heads), ("layers", done.layers), ("contract", done.contract), ("policy", done.policy)]
    table(f"imported into {done.folder}", ["", ""], rows)
    say(f"next: medusa-train doctor {done.folder}")
