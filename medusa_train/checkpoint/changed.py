"""Backbones that training changed: adapters and merged weights, written, applied and merged."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from medusa_train.checkpoint.atomic import copy_file
from medusa_train.checkpoint.inspect_ import holds_pickle
from medusa_train.errors import UserError

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
# Shards of this size load on machines whose memory barely holds the model.
MAX_SHARD = "4GB"


def stage_adapter(target: Path, adapter: Any, base_name: str) -> None:
    """Writes a PeftModel's adapter, or a saved adapter's folder, to `target` (config and safetensors, nothing else).

    The adapter's config names the base where `base_name` is a hub id: peft's `AutoPeftModel` needs it.
    """
    if isinstance(adapter, str | os.PathLike):
        source = Path(adapter)
        missing = [name for name in ADAPTER_FILES if not (source / name).is_file()]
        if missing:
            raise UserError(
                f"no adapter: {', '.join(missing)} missing", where=str(source), allowed="a folder that peft saved"
            )
        for name in ADAPTER_FILES:
            copy_file(source / name, target / name)
        _name_base(target / ADAPTER_FILES[0], base_name)
        return
    # save_embedding_layers: "auto" would ask the hub, and writes a copy of the embeddings where lm_head is a target.
    adapter.save_pretrained(target, safe_serialization=True, save_embedding_layers=False)
    for leftover in target.iterdir():
        if leftover.name not in ADAPTER_FILES:
            leftover.unlink()
    _name_base(target / ADAPTER_FILES[0], base_name)


def _name_base(path: Path, base_name: str) -> None:
    # Where it lay on the training machine is nobody's business, and a wrong path is worse than none.
    on_hub = base_name.count("/") == 1 and not base_name.startswith(("/", ".", "~"))
    config = json.loads(path.read_text())
    path.write_text(
        json.dumps(config | {"base_model_name_or_path": base_name if on_hub else None}, indent=2, sort_keys=True) + "\n"
    )


def stage_merged(target: Path, merged: Any, tokenizer: Any) -> str:
    """Writes a changed backbone (a model, or the folder of one) to `target`; returns its fingerprint.

    Sharded models keep their shards (`model.safetensors.index.json` and its files).
    """
    from medusa_train.modeling.fingerprint import fingerprint_folder

    if isinstance(merged, str | os.PathLike):
        source = Path(merged)
        if not (source / "config.json").is_file() or not list(source.glob("*.safetensors")):
            raise UserError("no model: config.json or *.safetensors missing", where=str(source))
        if pickles := holds_pickle(source):
            raise UserError(
                f"pickled weights ({pickles[0]}) are never put into a checkpoint",
                where=str(source),
                fix="save the model with `save_pretrained` (safetensors)",
            )
        for path in source.iterdir():
            if path.is_file():
                copy_file(path, target / path.name)
    else:
        merged.save_pretrained(target, max_shard_size=MAX_SHARD)
    if tokenizer is not None and not (target / "tokenizer_config.json").is_file():
        tokenizer.save_pretrained(target)
    return fingerprint_folder(target)


def attach_adapter(model: Any, folder: Path) -> Any:
    """The model with the adapter of `folder` on it (a PeftModel in eval mode); strict about the adapter's tensors."""
    from peft import PeftModel
    from safetensors import safe_open

    with safe_open(folder / ADAPTER_FILES[1], framework="pt") as handle:
        stored = set(handle.keys())
    wrapped = PeftModel.from_pretrained(model, str(folder), is_trainable=False)
    wanted = _adapter_names(wrapped)
    if stored != wanted:
        extra, absent = sorted(stored - wanted), sorted(wanted - stored)
        raise UserError(
            f"the adapter does not fit this backbone: {len(absent)} tensors missing (first: {absent[:1]}), "
            f"{len(extra)} unexpected (first: {extra[:1]})",
            where=str(folder),
            fix="load it with the backbone it was trained on",
        )
    return wrapped.eval()


def _adapter_names(model: Any) -> set[str]:
    from peft import get_peft_model_state_dict

    return set(get_peft_model_state_dict(model, save_embedding_layers=False))


def merge_adapter(model: Any) -> Any:
    """A PeftModel's adapter folded into the weights; returns the plain model (same logits, fp32 to 1e-5).

    An adapter on an lm_head that is tied to the embeddings would be folded into both; the two are untied first.
    """
    inner = model.get_base_model()
    output, embedding = inner.get_output_embeddings(), inner.get_input_embeddings()
    output_weight = getattr(output, "get_base_layer", lambda: output)().weight
    embedding_weight = getattr(embedding, "get_base_layer", lambda: embedding)().weight
    touched = hasattr(output, "get_base_layer") or hasattr(embedding, "get_base_layer")
    if touched and output_weight.data_ptr() == embedding_weight.data_ptr():
        import torch

        layer = output.get_base_layer() if hasattr(output, "get_base_layer") else output
        layer.weight = torch.nn.Parameter(output_weight.detach().clone(), requires_grad=False)
        inner.config.get_text_config(decoder=True).tie_word_embeddings = False
        inner.config.tie_word_embeddings = False
    return model.merge_and_unload()
