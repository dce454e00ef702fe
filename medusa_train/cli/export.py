"""`medusa-train export`: a checkpoint in another program's layout, its tree as JSON, or the whole on the hub."""

from __future__ import annotations

import json
import tempfile
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from medusa_train.checkpoint import layouts
from medusa_train.console import human_bytes, say, table
from medusa_train.errors import UserError

Format = Enum("Format", {name.replace("-", "_"): name for name in layouts.FORMATS}, type=str)


class BackboneForm(str, Enum):
    """How a changed backbone travels."""

    merged = "merged"
    adapter = "adapter"
    none = "none"


HUB = "Hugging Face hub"


def command(
    checkpoint: Annotated[
        str, typer.Argument(help="Folder that `fit` or `import` wrote, or a hub id.", show_default=False)
    ],
    form: Annotated[
        Format,
        typer.Option(
            "--format",
            help="medusa: a checkpoint again. vllm, tgi: one folder for both. trtllm. fasterdecoding. hf-full: a whole "
            "model with the heads in it (Medusa-2 layout).",
        ),
    ] = Format.medusa,
    out: Annotated[
        Path | None, typer.Option(help="Folder to write: absent, empty, or an older export.", show_default=False)
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(help="Where the base lies, in place of the checkpoint's name for it.", show_default=False),
    ] = None,
    base_id: Annotated[
        str | None,
        typer.Option(
            help="What the written config calls the base (hub id or path).", show_default="as in the checkpoint"
        ),
    ] = None,
    backbone: Annotated[
        BackboneForm | None,
        typer.Option(
            help="For a backbone that training changed: merged (the whole model), adapter, or none.",
            show_default="what the checkpoint holds",
        ),
    ] = None,
    tree: Annotated[
        Path | None, typer.Option(help="Also write the tree here, as a JSON list of rank paths.", show_default=False)
    ] = None,
    no_tree: Annotated[bool, typer.Option("--no-tree", help="Leave the tree out of the exported folder.")] = False,
    report: Annotated[
        Path | None,
        typer.Option(
            help="report.json of eval-acceptance, for the model card.", show_default="looked for beside the checkpoint"
        ),
    ] = None,
    push_to_hub: Annotated[
        str | None,
        typer.Option(help="Upload to this repository (owner/name).", rich_help_panel=HUB, show_default=False),
    ] = None,
    private: Annotated[
        bool, typer.Option("--private", help="Make the repository private.", rich_help_panel=HUB)
    ] = False,
) -> None:
    """Write the heads in another program's layout, the tree as JSON, or all of it to the hub. What a layout cannot
    hold is expanded without loss (shared heads of several layers get a copy of the lm_head each) or refused with
    the reason (`reduced` heads have no place in other programs).
    """
    if out is None and push_to_hub is None and tree is None:
        raise UserError("nothing to write", fix="give --out DIR, --push-to-hub OWNER/NAME, or --tree FILE")
    if tree is not None:
        _write_tree(checkpoint, tree)
    if out is None and push_to_hub is None:
        return
    with tempfile.TemporaryDirectory(prefix="medusa-export-") as scratch:
        target = out or Path(scratch) / "export"
        _export(checkpoint, target, form.value, base, base_id, backbone, not no_tree, report, push_to_hub, out is None)
        if push_to_hub is not None:
            from medusa_train.checkpoint.hub import push_folder

            address = push_folder(target, push_to_hub, private=private, message=f"Medusa heads, layout {form.value}")
            say(f"pushed to {address}")


def _export(
    checkpoint: str,
    target: Path,
    form: str,
    base: str | None,
    base_id: str | None,
    backbone: BackboneForm | None,
    with_tree: bool,
    report: Path | None,
    repo_id: str | None,
    temporary: bool,
) -> None:
    from medusa_train.checkpoint.card import find_report, read_report, render_card
    from medusa_train.checkpoint.exporting import export_checkpoint
    from medusa_train.checkpoint.load import find_checkpoint
    from medusa_train.checkpoint.manifest import read_manifest
    from medusa_train.checkpoint.problems import Problems

    folder, problems = find_checkpoint(checkpoint), Problems()
    manifest = read_manifest(folder, problems)
    problems.raise_if_any("this checkpoint cannot be exported", folder)
    found = report or find_report(folder)
    card = render_card(
        manifest,
        form=form,
        report=read_report(found) if found else None,
        heads_bytes=manifest.files["medusa_heads.safetensors"].bytes,
        repo_id=repo_id,
        changed=None if backbone is None else backbone.value,
    )
    done = export_checkpoint(
        folder,
        target,
        form,
        base=base,
        base_id=base_id,
        backbone=None if backbone is None else backbone.value,
        with_tree=with_tree,
        card=card,
    )
    rows = [(name, human_bytes((target / name).stat().st_size)) for name in done.files]
    title = f"{form} ({done.contract} heads)" + ("" if temporary else f" in {target}")
    table(title, ["file", "size"], rows)
    for note in done.notes:
        say(f"note: {note}")
    if report is None and found is not None:
        say(f"the model card shows the figures of {found}")


def _write_tree(checkpoint: str, path: Path) -> None:
    from medusa_train.checkpoint.load import load_checkpoint
    from medusa_train.checkpoint.rank_paths import sorted_paths
    from medusa_train.provenance import write_atomic

    loaded = load_checkpoint(checkpoint)
    if loaded.tree is None:
        raise UserError("the checkpoint holds no tree", where=checkpoint, fix="search one with `medusa-train tree`")
    paths = sorted_paths(loaded.tree)
    write_atomic(path, json.dumps(paths) + "\n")
    say(f"tree of {len(paths)} nodes written to {path}")
