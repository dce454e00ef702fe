"""`medusa-train export`: a checkpoint in another program's layout, without loss, or refused by name."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from medusa_train.checkpoint import abi, layouts
from medusa_train.checkpoint.atomic import copy_file, staged_folder
from medusa_train.checkpoint.layouts import ExportFormat
from medusa_train.checkpoint.load import LoadedCheckpoint, load_checkpoint, load_with_base
from medusa_train.checkpoint.problems import Problems
from medusa_train.checkpoint.rank_paths import sorted_paths
from medusa_train.checkpoint.tensorfile import write_tensors
from medusa_train.checkpoint.whole_model import write_full_folder
from medusa_train.errors import UserError, unknown_name

BACKBONE_CHOICES = ("merged", "adapter", "none")
# Says which checkpoint an export came from; a folder with this file in it may be replaced by another export.
_MARK = "medusa_export.json"
_PT_NOTE = (
    "its loader wants medusa_lm_head.pt, a pickle, which is never written here. On the serving machine: "
    'python -c "import torch, safetensors.torch as s; '
    "torch.save(s.load_file('medusa_lm_head.safetensors'), 'medusa_lm_head.pt')\""
)


@dataclass
class Exported:
    """What an export wrote: the folder, the format, the contract it ended up in, notes for the person."""

    folder: Path
    format: str
    contract: str
    files: list[str]
    notes: list[str] = field(default_factory=list)


def export_checkpoint(
    checkpoint: str | Path,
    out: str | Path,
    form: str,
    *,
    base: str | None = None,
    base_id: str | None = None,
    backbone: str | None = None,
    with_tree: bool = True,
    card: str | None = None,
) -> Exported:
    """Writes the heads of `checkpoint` to the folder `out` in format `form`.

    Args:
        form: a key of `layouts.FORMATS`.
        base: where the backbone lies, in place of the manifest's name.
        base_id: what the written config calls the base (hub id or path); the manifest's name by default.
        backbone: for checkpoints whose backbone changed: "merged" (whole model beside the heads), "adapter", or "none".
            By default the heads travel with what the checkpoint holds.
        with_tree: write the tree along where the program has a file for it.
        card: text of a README.md to put in.

    Raises:
        UserError: the format cannot hold these heads (named, with the way out), or the folder is taken.
    """
    if form not in layouts.FORMATS:
        raise unknown_name("format", form, layouts.FORMATS)
    target, chosen = Path(out), layouts.FORMATS[form]
    _check_target(target)
    loaded = load_checkpoint(checkpoint, verify="hashes")
    refusals(chosen, loaded, with_tree=with_tree).raise_if_any(f"cannot be exported as {form}", loaded.folder)
    choice = _backbone_choice(loaded, backbone, chosen)
    with staged_folder(target) as staged:
        _keep_hidden(target, staged)
        if form == "medusa":
            exported = _native(loaded, staged, base, choice)
        else:
            exported = _foreign(loaded, chosen, staged, target, base, base_id, choice)
        if with_tree and chosen.tree_file and loaded.tree is not None:
            (staged / chosen.tree_file).write_text(json.dumps(sorted_paths(loaded.tree)) + "\n")
        if card is not None:
            (staged / "README.md").write_text(card, encoding="utf-8")
        if form != "medusa":
            about = {"format": form, "checkpoint_manifest_sha256": loaded.manifest.manifest_sha256}
            (staged / _MARK).write_text(json.dumps(about) + "\n")
    exported.folder = target
    exported.files = sorted(p.relative_to(target).as_posix() for p in target.rglob("*") if p.is_file())
    return exported


def _check_target(target: Path) -> None:
    ours = (_MARK, abi.MANIFEST_FILE)
    if target.exists() and not target.is_dir():
        raise UserError("a file stands there", where=str(target), fix="name another folder with --out")
    if target.is_dir() and any(target.iterdir()) and not any((target / name).is_file() for name in ours):
        raise UserError(
            "something else stands there, and an export replaces its whole folder",
            where=str(target),
            allowed="a folder that is absent, empty, or an older export",
        )


def _keep_hidden(target: Path, staged: Path) -> None:
    """A clone of a hub repository is a likely target; its `.git` and `.gitattributes` stay."""
    for entry in target.glob(".*") if target.is_dir() else ():
        if entry.is_dir() and not entry.is_symlink():
            shutil.copytree(entry, staged / entry.name, symlinks=True)
        else:
            shutil.copy2(entry, staged / entry.name, follow_symlinks=False)


def refusals(form: ExportFormat, loaded: LoadedCheckpoint, *, with_tree: bool) -> Problems:
    """Everything in the checkpoint that this program cannot hold without loss."""
    config, problems = loaded.heads.config, Problems()
    if config.sees != "hidden" and form.name != "medusa":
        problems.add(
            "config",
            "heads",
            f"heads that see the parent cannot go to {form.program}: its heads read the hidden state alone",
            "train heads with `heads.sees: hidden` for this program",
        )
    if config.contract == "reduced" and form.reduced is not None:
        problems.add(
            "config",
            "heads",
            f"`reduced` heads ({config.reduced_vocab_size} of {config.vocab_size} tokens) have no place in "
            f"{form.program}: it reads one row per token, and a row that is missing has no value that always loses",
            form.reduced,
        )
    if config.projection_bias and not form.projection_bias:
        problems.add(
            "config",
            "heads",
            f"the heads' projections have a bias, for which {form.program} has no tensor",
            "serve this model with `medusa-train generate`, or train `shared` heads",
        )
    if form.repeats_one_block and _blocks_differ(loaded.heads):
        problems.add(
            "config",
            "heads",
            f"each head has {config.medusa_num_layers} different blocks; {form.program} builds one block and "
            "repeats it, so that the last one would be used for all",
            "export with --format trtllm: the same tensor names, for programs that build every block",
        )
    if with_tree and loaded.tree is not None:
        layouts.check_tree_limits(form, sorted_paths(loaded.tree), problems)
    return problems


def _blocks_differ(heads: Any) -> bool:
    """True where a head's blocks are not all the same numbers."""
    import torch

    for blocks in heads.blocks:
        for block in blocks:
            first = blocks[0].linear
            if not torch.equal(block.linear.weight, first.weight) or not torch.equal(block.linear.bias, first.bias):
                return True
    return False


def _backbone_choice(loaded: LoadedCheckpoint, wanted: str | None, form: ExportFormat) -> str:
    changed = loaded.manifest.backbone.changed
    if wanted is not None and wanted not in BACKBONE_CHOICES:
        raise unknown_name("backbone choice", wanted, BACKBONE_CHOICES)
    if form.name == "hf-full":
        if wanted not in (None, "merged"):
            raise UserError(f"hf-full is a whole model folder, so --backbone {wanted} does not apply", allowed="merged")
        return "merged"
    if changed == "none":
        if wanted in ("merged", "adapter"):
            raise UserError(
                f"--backbone {wanted}: the backbone of this checkpoint is the base, unchanged",
                fix="leave --backbone out; the base itself serves",
            )
        return "none"
    if wanted == "adapter" and changed == "merged":
        raise UserError("this checkpoint holds changed weights, no adapter", allowed="merged, none")
    if wanted == "none" and form.name == "medusa":
        raise UserError("a checkpoint without its changed backbone cannot be loaded rightly", allowed="merged, adapter")
    return wanted or changed


def _native(loaded: LoadedCheckpoint, staged: Path, base: str | None, choice: str) -> Exported:
    """A checkpoint again: a copy, or one whose adapter is folded into a whole backbone."""
    exported = Exported(staged, "medusa", loaded.heads.config.contract, [])
    if choice != "merged" or loaded.manifest.backbone.changed == "merged":
        for name in (*loaded.manifest.files, abi.MANIFEST_FILE):
            copy_file(loaded.folder / name, staged / name)
        return exported
    from medusa_train.checkpoint.identity import BackboneId
    from medusa_train.checkpoint.save import save_checkpoint

    entry = loaded.manifest.backbone
    merged, _ = load_with_base(loaded.folder, base, merge=True, device="cpu")
    identity = BackboneId(
        entry.name, entry.fingerprint, merged.folder, entry.revision, entry.chat_template_hash, merged.tokenizer
    )
    inner = staged / "checkpoint"
    save_checkpoint(
        inner,
        loaded.heads,
        identity,
        recipe=loaded.manifest.recipe,
        policy=loaded.manifest.policy,
        data_manifest_hash=loaded.manifest.data_manifest_hash,
        training=loaded.manifest.training,
        merged=merged.model,
        tree=loaded.tree,
    )
    for path in list(inner.iterdir()):
        path.rename(staged / path.name)
    inner.rmdir()
    exported.notes.append("the adapter is folded into the folder `backbone`")
    return exported


def _foreign(
    loaded: LoadedCheckpoint,
    form: ExportFormat,
    staged: Path,
    target: Path,
    base: str | None,
    base_id: str | None,
    choice: str,
) -> Exported:
    config = loaded.heads.config
    shared = config.contract == "shared" and form.shared(config.medusa_num_layers)
    exported = Exported(staged, form.name, "shared" if shared else "own", [])
    expand = config.contract == "shared" and not shared
    needs_lm_head = expand or (shared and form.lm_head_copy)
    model = None
    if needs_lm_head or choice == "merged":
        model = load_with_base(loaded.folder, base, merge=True, device="cpu")[0].model
    if expand:
        exported.notes.append(
            f"shared heads with {config.medusa_num_layers} layers do not fit {form.program}: "
            "every head got a copy of the lm_head (same logits, a larger file)"
        )
    tensors = head_tensors(form, loaded.heads, _lm_head(model) if needs_lm_head else None, shared=shared)
    if form.name == "hf-full":
        write_full_folder(staged, model, tensors, config)
        _save_tokenizer(loaded, staged)
        return exported
    write_tensors(staged / form.weights_file, tensors)
    name = base_id or loaded.manifest.backbone.name
    if choice == "merged":
        model.save_pretrained(staged / abi.BACKBONE_FOLDER)
        _save_tokenizer(loaded, staged / abi.BACKBONE_FOLDER)
        name = base_id or str(target.resolve() / abi.BACKBONE_FOLDER)
        exported.notes.append(f"serve the changed model, not the base: {name}")
    elif choice == "adapter":
        shutil.copytree(loaded.adapter_folder, staged / abi.ADAPTER_FOLDER)
        exported.notes.append("the base must be served with the adapter in the folder `adapter`")
    elif loaded.manifest.backbone.changed != "none":
        exported.notes.append("these heads need their changed backbone, which was left out on request")
    written = layouts.config_for(
        form,
        heads=config.medusa_num_heads,
        layers=config.medusa_num_layers,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        shared=shared,
        base=name,
    )
    (staged / abi.CONFIG_FILE).write_text(json.dumps(written, indent=2) + "\n")
    if form.name == "fasterdecoding":
        exported.notes.append(_PT_NOTE)
    return exported


def head_tensors(form: ExportFormat, heads: Any, lm_head: Any, *, shared: bool) -> dict[str, Any]:
    """Foreign name -> tensor, each with its own memory. `lm_head` [V, D] where shared heads need it, else None."""
    config, tensors = heads.config, {}
    for head, blocks in enumerate(heads.blocks):
        for layer, block in enumerate(blocks):
            for part in ("weight", "bias"):
                tensors[form.naming.block_name(head, layer, part)] = getattr(block.linear, part)
        if not shared:
            weight = heads.projections[head].weight if heads.projections is not None else lm_head
            tensors[form.naming.projection_name(head, config.medusa_num_layers)] = weight
    if shared and form.lm_head_copy:
        tensors[layouts.VLLM_SHARED_PROJECTION] = lm_head
    return {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}


def _lm_head(model: Any) -> Any:
    from medusa_train.modeling.backbone import output_projection
    from medusa_train.modeling.heads import dense_projection

    weight, bias = dense_projection(output_projection(model))
    if bias is not None:
        raise UserError(
            "the base's lm_head has a bias, which a copy of its weight would lose",
            fix="this program cannot serve shared heads of this base; train `own` heads without a bias",
        )
    return weight


def _save_tokenizer(loaded: LoadedCheckpoint, folder: Path) -> None:
    """The tokenizer files that lie in the checkpoint, beside a whole model."""
    ours = (abi.HEADS_FILE, abi.CONFIG_FILE, abi.TREE_FILE)
    for name in loaded.manifest.files:
        if "/" not in name and name not in ours:
            copy_file(loaded.folder / name, folder / name)
