"""`medusa-train tree`: calibrates head ranks on held-out text, searches the verification tree, stores it."""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from medusa_train.cli.options import BaseOption, DeviceOption, DtypeOption, QuantizationOption, TrustRemoteCodeOption
from medusa_train.errors import UserError

TABLE_SIZES = (8, 16, 32, 64)
AUTO_SIZES = (3, 5, 7, 9, 11, 13, 15, 19, 23, 31, 47, 63)


class TreeMethod(str, Enum):
    """How paths are weighed."""

    joint = "joint"
    independent = "independent"


class Answers(str, Enum):
    """The text that ranks are counted along."""

    recorded = "recorded"
    greedy = "greedy"


CALIBRATION, SEARCH = "Calibration", "Search"


def command(
    checkpoint: Annotated[str, typer.Argument(help="Folder that `fit` wrote, or a hub id.", show_default=False)],
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="Rows to calibrate on (a folder of `distill`, or a file); repeatable.  "
            "[default: the held-out rows of the training recipe]",
            rich_help_panel=CALIBRATION,
            show_default=False,
        ),
    ] = None,
    max_rows: Annotated[
        int, typer.Option(min=1, help="Rows to calibrate on at most.", rich_help_panel=CALIBRATION)
    ] = 256,
    answers: Annotated[
        Answers,
        typer.Option(
            help="recorded: count along the rows as they are. greedy: answer their prompts again, greedily "
            "(for rows that were sampled or written by people; takes as long as decoding them).",
            rich_help_panel=CALIBRATION,
        ),
    ] = Answers.recorded,
    nodes: Annotated[
        str,
        typer.Option(
            help="Guessed nodes of the tree, the root not counted: a number, or auto: measure what rounds cost on "
            "this machine and take the size with the most tokens per second.",
            rich_help_panel=SEARCH,
        ),
    ] = "auto",
    max_nodes: Annotated[
        int, typer.Option(min=1, help="The largest size that auto tries.", rich_help_panel=SEARCH)
    ] = 63,
    method: Annotated[
        TreeMethod,
        typer.Option(
            help="joint: measured frequencies of whole rank paths where rounds begin. independent: the paper's "
            "product of per-head accuracies.",
            rich_help_panel=SEARCH,
        ),
    ] = TreeMethod.joint,
    smoothing: Annotated[
        float,
        typer.Option(
            min=0, help="joint: imagined independent positions beside the counted ones.", rich_help_panel=SEARCH
        ),
    ] = 128.0,
    tree: Annotated[
        str | None,
        typer.Option(
            help="Store this tree instead of searching: chain, chain:DEPTH, widths such as 4,3,2,2, or a JSON file of "
            "rank paths.",
            rich_help_panel=SEARCH,
            show_default=False,
        ),
    ] = None,
    top_k: Annotated[
        int,
        typer.Option(
            min=1,
            help="Ranks per head that the tree may use. Large trees gain from more; TensorRT-LLM takes 16.",
            rich_help_panel=SEARCH,
        ),
    ] = 32,
    store: Annotated[bool, typer.Option(help="Write tree.json into the checkpoint.")] = True,
    again: Annotated[
        bool, typer.Option("--again", help="Search even where the checkpoint has a tree searched with these options.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Also write tree.json's content to this file.", show_default=False)
    ] = None,
    base: BaseOption = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = None,
    quantization: QuantizationOption = None,
    trust_remote_code: TrustRemoteCodeOption = False,
) -> None:
    """Search the tree of guesses that the decoder verifies in one pass.

    Ranks of the true next tokens are counted in every head along held-out text, a tree is searched from them, and its
    tokens per round are estimated on rows that the search did not see. The tree is stored with the checkpoint.
    """
    size = _number_of_nodes(nodes)
    options = {
        "data": [str(path) for path in data or []],
        "max_rows": max_rows,
        "answers": answers.value,
        "nodes": nodes,
        "max_nodes": max_nodes,
        "method": method.value,
        "smoothing": smoothing,
        "tree": tree,
        "top_k": top_k,
        "dtype": dtype,
        "quantization": quantization,
    }
    from medusa_train.checkpoint import load_checkpoint, load_with_base, store_tree
    from medusa_train.checkpoint.atomic import check_not_cached
    from medusa_train.cli.tree_work import TreeJob, data_sha256, say_stored, show_tree

    known = load_checkpoint(checkpoint)
    if store:
        check_not_cached(known.folder)  # before the search, not after it
    options["data_sha256"] = data_sha256(known.manifest.recipe, data or [])
    if store and not again:
        present = known.tree
        if present is not None and present.get("options") == options:
            show_tree(present)
            say_stored(checkpoint, "already there, searched with these options (--again searches anew)")
            return
    loaded, opened = load_with_base(
        checkpoint,
        base,
        dtype=dtype,
        device=device,
        quantization=quantization,
        trust_remote_code=trust_remote_code,
        merge=quantization is None,
    )
    job = TreeJob(loaded, opened, method.value, smoothing, top_k)
    job.calibrate(data or [], max_rows, answers.value)
    content: dict[str, Any] = job.given(tree) if tree is not None else job.searched(size, max_nodes)
    content["options"] = options
    job.show_search(content, TABLE_SIZES)
    show_tree(content)
    if store:
        store_tree(opened.folder, content)
        say_stored(opened.folder, "stored")
    if out is not None:
        from medusa_train.provenance import write_atomic

        write_atomic(out, json.dumps(content, indent=1) + "\n")


def _number_of_nodes(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdigit() or not 1 <= int(text) <= 4096:
        raise UserError(f"--nodes {text}", allowed="auto, or a number from 1 to 4096")
    return int(text)
