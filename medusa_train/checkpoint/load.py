"""Opening a checkpoint: strict both ways, every fault in one error, tensors mapped from the file rather than read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from medusa_train.checkpoint import abi
from medusa_train.checkpoint.atomic import recover
from medusa_train.checkpoint.identity import check_backbone
from medusa_train.checkpoint.inspect_ import inspect_checkpoint, read_json
from medusa_train.checkpoint.manifest import HeadsManifest
from medusa_train.checkpoint.problems import Problems
from medusa_train.errors import UserError, unknown_name

VERIFY = ("sizes", "hashes")


@dataclass(frozen=True)
class LoadedCheckpoint:
    """What a checkpoint holds.

    Attributes:
        heads: `modeling.heads.MedusaHeads` in eval mode, on the backbone's device and in its dtype.
        manifest: the checked manifest.
        tree: the content of `tree.json`, or None where no tree was searched yet.
        adapter_folder: the backbone's adapter, or None.
        backbone_folder: the changed backbone, whole, or None.
        folder: where it was read from.
    """

    heads: Any
    manifest: HeadsManifest
    tree: dict[str, Any] | None
    adapter_folder: Path | None
    backbone_folder: Path | None
    folder: Path


def load_checkpoint(
    folder: str | Path,
    base: Any = None,
    *,
    verify: str = "sizes",
    device: Any = None,
    dtype: Any = None,
    revision: str | None = None,
) -> LoadedCheckpoint:
    """Opens a checkpoint.

    Args:
        folder: a checkpoint's folder, or a hub id (owner/name), which is downloaded.
        base: the `Base` (or `BackboneId`) the heads shall run on; refused where they were trained for another. None
            checks the checkpoint alone.
        verify: "sizes" opens in milliseconds (structure, names, shapes, sizes, hashes of small files and of the
            header); "hashes" reads and hashes every byte.
        device, dtype: of the heads; by default the base's, else as stored, on the CPU.

    Raises:
        CheckpointError: with every fault found.
    """
    if verify not in VERIFY:
        raise unknown_name("verification", verify, VERIFY)
    path, problems = find_checkpoint(folder, revision=revision), Problems()
    manifest, _ = inspect_checkpoint(path, problems, hashes=verify == "hashes")
    if manifest is not None and base is not None:
        check_backbone(manifest, base, problems)
    problems.raise_if_any("this checkpoint cannot be used", path)
    model = getattr(base, "model", None)
    heads = _mapped_heads(path, manifest)
    if model is not None:
        device, dtype = device or model.device, dtype or _floating_dtype(model)
    heads = heads.to(device=device, dtype=dtype).eval().requires_grad_(False)
    changed = manifest.backbone.changed
    return LoadedCheckpoint(
        heads=heads,
        manifest=manifest,
        tree=read_json(path / abi.TREE_FILE, problems) if abi.TREE_FILE in manifest.files else None,
        adapter_folder=path / abi.ADAPTER_FOLDER if changed == "adapter" else None,
        backbone_folder=path / abi.BACKBONE_FOLDER if changed == "merged" else None,
        folder=path,
    )


def load_with_base(
    folder: str | Path,
    base: str | None = None,
    *,
    verify: str = "sizes",
    merge: bool = False,
    dtype: str = "auto",
    device: str | None = None,
    quantization: str | None = None,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    revision: str | None = None,
) -> tuple[Any, LoadedCheckpoint]:
    """Opens a checkpoint together with the backbone it was trained for, adapter or changed weights applied.

    Args:
        base: where the backbone lies, in place of the name the manifest gives (another place, never another model).
        merge: fold the adapter into the weights (faster decoding) instead of attaching it.
        dtype, device, quantization, attn_implementation, trust_remote_code: as `load_base`.

    Returns:
        (Base, LoadedCheckpoint); with an adapter, `Base.model` is the PeftModel, or the merged model.
    """
    from medusa_train.modeling.base import load_base

    path, problems = find_checkpoint(folder, revision=revision), Problems()
    # Everything that can be wrong with the checkpoint itself is said before a large model is loaded.
    manifest, _ = inspect_checkpoint(path, problems, hashes=verify == "hashes")
    problems.raise_if_any("this checkpoint cannot be used", path)
    entry, arguments = manifest.backbone, {}
    if entry.changed == "merged" and base is None:
        base = str(path / abi.BACKBONE_FOLDER)
    elif base is None:
        base, arguments = known_name(entry.name), {"revision": entry.revision}
    template = template_of(path)
    loaded = load_base(
        base,
        dtype=dtype,
        device=device,
        quantization=quantization,
        chat_template=template,
        attn_implementation=attn_implementation,
        trust_remote_code=trust_remote_code,
        **arguments,
    )
    checkpoint = load_checkpoint(path, loaded)
    if checkpoint.adapter_folder is not None:
        from medusa_train.checkpoint.changed import attach_adapter, merge_adapter

        # Hashed before the model is touched, so the fingerprint stays that of the files.
        _ = loaded.fingerprint
        model = attach_adapter(loaded.model, checkpoint.adapter_folder)
        loaded = replace(loaded, model=merge_adapter(model) if merge else model)
    return loaded, checkpoint


def find_checkpoint(folder: str | Path, *, revision: str | None = None) -> Path:
    """The local folder of a checkpoint: the folder itself (a cut swap is healed), or a hub id, downloaded.

    Raises:
        UserError: no such folder, and no such repository on the hub.
    """
    path = Path(folder).expanduser()
    recover(path)
    if path.exists():
        return path
    name = str(folder)
    if name.count("/") != 1 or name.startswith((".", "/", "~")) or name.endswith("/"):
        raise UserError(
            "no checkpoint there",
            where=name,
            fix="name the folder that `medusa-train fit` wrote, or a hub id (owner/name)",
        )
    from medusa_train.checkpoint.hub import download_checkpoint

    return download_checkpoint(name, revision)


def _mapped_heads(path: Path, manifest: HeadsManifest) -> Any:
    import torch
    from safetensors.torch import load_file

    from medusa_train.modeling.heads import HeadsConfig, MedusaHeads

    config = HeadsConfig(
        contract=manifest.head_contract,
        medusa_num_heads=manifest.medusa_num_heads,
        medusa_num_layers=manifest.medusa_num_layers,
        hidden_size=manifest.hidden_size,
        vocab_size=manifest.vocab_size,
        reduced_vocab_size=manifest.reduced_vocab_size,
        projection_bias=manifest.projection_bias,
        sees=manifest.sees,
        reads_layer=manifest.reads_layer,
    )
    with torch.device("meta"):
        heads = MedusaHeads(config)
    # Mapped copy-on-write from the file: nothing is read until it is used, and nothing can write back.
    heads.load_state_dict(load_file(path / abi.HEADS_FILE, device="cpu"), strict=True, assign=True)
    return heads


def _floating_dtype(model: Any) -> Any:
    import torch

    dtype = getattr(model, "dtype", None)
    return dtype if dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64) else None


def template_of(path: Path) -> str | None:
    """The chat template saved with the checkpoint, so that prompts are rendered as in training."""
    file = path / "chat_template.jinja"
    return str(file) if file.is_file() else None


def known_name(name: str) -> str:
    """An alias for a hub id that has one: an alias may also find weights that no hub is needed for."""
    from medusa_train.config.bases import BASES

    return next((alias for alias, entry in BASES.items() if entry.repo_id == name), name)
