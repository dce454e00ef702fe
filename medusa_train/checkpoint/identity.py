"""Which backbone a set of heads belongs to, and what differs where another one is offered."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medusa_train.checkpoint.manifest import BackboneEntry, HeadsManifest
from medusa_train.checkpoint.problems import Problems


@dataclass(frozen=True)
class BackboneId:
    """A backbone by its marks alone, for code that has no model loaded (`import`, tests).

    Attributes:
        name: hub id or folder; revision: hub commit or None.
        fingerprint: `modeling.fingerprint.fingerprint_folder` of its files.
        folder: where its files lie, or None.
        template_hash: of the chat template, or None.
        tokenizer: a transformers tokenizer, saved beside the heads, or None.
        hidden_size, vocab_size: D and V where known.
    """

    name: str
    fingerprint: str
    folder: Path | None = None
    revision: str | None = None
    template_hash: str | None = None
    tokenizer: Any = None
    hidden_size: int | None = None
    vocab_size: int | None = None


def _parts(base: Any) -> tuple[str | None, str | None]:
    """(config hash, tokenizer hash) of a base's files: they tell what differs where the fingerprint does."""
    from medusa_train.modeling.fingerprint import config_hash, tokenizer_hash

    if base.folder is None:
        return None, None
    return config_hash(base.folder), tokenizer_hash(base.folder)


def backbone_entry(base: Any, changed: str, merged_fingerprint: str | None) -> BackboneEntry:
    """The manifest's entry for a `Base` or a `BackboneId`."""
    config, tokenizer = _parts(base)
    return BackboneEntry(
        name=str(base.name),
        revision=base.revision,
        fingerprint=base.fingerprint,
        chat_template_hash=base.template_hash,
        config_hash=config,
        tokenizer_hash=tokenizer,
        changed=changed,
        merged_fingerprint=merged_fingerprint,
    )


def sizes_of(base: Any) -> tuple[int | None, int | None]:
    """(D, V) of a loaded `Base` (from its output projection) or of a `BackboneId` (None where it does not say)."""
    model = getattr(base, "model", None)
    if model is None:
        return getattr(base, "hidden_size", None), getattr(base, "vocab_size", None)
    from medusa_train.modeling.backbone import output_projection

    projection = output_projection(model)
    return projection.hidden_size, projection.vocab_size


def check_backbone(manifest: HeadsManifest, base: Any, problems: Problems) -> None:
    """Notes how `base` differs from the backbone the heads were trained for: sizes, weights, tokenizer, template."""
    entry = manifest.backbone
    hidden, vocab = sizes_of(base)
    fix = (
        f"load the heads with the backbone they were trained for, --base {entry.name}"
        + (f" (revision {entry.revision})" if entry.revision else "")
        + ", or train heads for this one"
    )
    for key, theirs, ours in (
        ("hidden size", hidden, manifest.hidden_size),
        ("vocabulary size", vocab, manifest.vocab_size),
    ):
        if theirs is not None and theirs != ours:
            problems.add("backbone", str(base.name), f"{key} {theirs}, the heads need {ours}", fix)
    if entry.changed == "merged" and base.fingerprint != entry.merged_fingerprint:
        unchanged = base.fingerprint == entry.fingerprint
        problems.add(
            "backbone",
            str(base.name),
            f"{'the unchanged' if unchanged else 'another'} model; these heads were trained with a changed backbone, "
            f"which lies in the checkpoint's folder `backbone`",
            "leave --base out, so that the changed backbone is loaded from the checkpoint",
        )
    elif entry.changed != "merged" and base.fingerprint != entry.fingerprint:
        _name_difference(manifest, base, problems, fix)
    if base.template_hash != entry.chat_template_hash:
        problems.add(
            "template",
            str(base.name),
            f"another chat template: {short(base.template_hash)}, trained with {short(entry.chat_template_hash)}",
            "use the chat template of the training run (it is saved with the checkpoint's tokenizer files)",
        )


def _name_difference(manifest: HeadsManifest, base: Any, problems: Problems, fix: str) -> None:
    entry = manifest.backbone
    config, tokenizer = _parts(base)
    kind, differs = "backbone", []
    if None not in (config, entry.config_hash) and config != entry.config_hash:
        differs.append("config")
    if None not in (tokenizer, entry.tokenizer_hash) and tokenizer != entry.tokenizer_hash:
        kind, differs = "tokenizer", [*differs, "tokenizer"]
    what = " and ".join(differs) + " differ" if differs else "same config and tokenizer, other weights"
    if config is None:
        what = "config, tokenizer or weights differ"
    problems.add(
        kind,
        str(base.name),
        f"another backbone ({what}): fingerprint {short(base.fingerprint)}, the heads were trained for "
        f"{entry.name} with {short(entry.fingerprint)}",
        fix,
    )


def short(digest: str | None) -> str:
    """The first digits of a hash, or 'none'."""
    return "none" if digest is None else digest[:12]
