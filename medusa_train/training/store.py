"""The end of a run: trained tensors become a checkpoint, heads in the backbone's dtype, adapter and all."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from medusa_train.checkpoint import tensorfile
from medusa_train.config.recipe import Joint, Recipe
from medusa_train.modeling.heads import MedusaHeads
from medusa_train.training.sharding import of_first_rank
from medusa_train.training.state import TENSORS, RunFolder, plain_name, trainable_tensors

if TYPE_CHECKING:
    from medusa_train.training.trainer import MedusaTrainer

HEADS, BACKBONE = "heads.", "backbone."


def store_run(
    trainer: MedusaTrainer, recipe: Recipe, base: Any, data_hash: str | None, run: RunFolder, output: Path, facts: dict
) -> None:
    """Writes the checkpoint; called by every rank (sharded weights are gathered), written by the first."""
    from medusa_train.checkpoint.save import save_checkpoint

    writes = trainer.args.should_save
    kept = trainer.sharded and recipe.evaluation.keep_best and (run.best / TENSORS).is_file()
    if of_first_rank(kept):  # gathering or not is every rank's decision, and the first one has the file
        tensors = load_file(run.best / TENSORS) if writes else {}
    else:
        tensors = trainable_tensors(trainer.model, keep=writes)
    if not writes:
        return
    dtype = stored_dtype(base)
    heads = heads_from(trainer.model.heads, tensors, dtype)
    changed = run.path / "changed"
    shutil.rmtree(changed, ignore_errors=True)
    arguments: dict[str, Any] = {}
    if trainer.model.objective.trains_backbone:
        full = isinstance(recipe.policy, Joint) and recipe.policy.adapter == "none"
        if full:
            write_backbone(trainer.model.backbone, tensors, changed, dtype)
        else:
            write_adapter(trainer.model.backbone, tensors, changed)
        arguments["merged" if full else "adapter"] = changed
    save_checkpoint(
        output,
        heads,
        base,
        recipe=recipe.resolved(),
        policy=recipe.policy.kind,
        data_manifest_hash=data_hash,
        training=facts,
        **arguments,
    )
    shutil.rmtree(changed, ignore_errors=True)


def stored_dtype(base: Any) -> torch.dtype:
    """The dtype heads are stored in: the backbone's, bf16 where that is quantized."""
    from medusa_train.modeling.backbone import output_projection

    dtype = output_projection(base.model).weight.dtype
    if base.quantization is not None or not dtype.is_floating_point:
        return torch.bfloat16
    return dtype


def heads_from(trained: MedusaHeads, tensors: dict[str, Tensor], dtype: torch.dtype) -> MedusaHeads:
    """A fresh set of heads with the trained tensors in `dtype`, on the CPU."""
    heads = MedusaHeads(trained.config, dtype=dtype)
    state = {name.removeprefix(HEADS): t.to(dtype) for name, t in tensors.items() if name.startswith(HEADS)}
    for name, buffer in trained.named_buffers(recurse=False):  # what is fixed and not trained: token map, hidden_rms
        state[name] = buffer.cpu()
    heads.load_state_dict(state, strict=True)
    return heads


def write_adapter(model: Any, tensors: dict[str, Tensor], folder: Path) -> None:
    """A LoRA adapter as peft lays it out, from gathered tensors (peft's own writer wants them on one device)."""
    folder.mkdir(parents=True)
    name = model.active_adapter
    stored = {
        key.removeprefix(BACKBONE).replace(f".{name}.", "."): tensor
        for key, tensor in tensors.items()
        if key.startswith(BACKBONE)
    }
    tensorfile.write_tensors(folder / "adapter_model.safetensors", stored)
    config = model.peft_config[name].to_dict()
    plain = {k: sorted(v) if isinstance(v, set) else v for k, v in config.items()}
    plain |= {"base_model_name_or_path": None, "inference_mode": True}
    (folder / "adapter_config.json").write_text(json.dumps(plain, indent=2, sort_keys=True, default=str) + "\n")


def write_backbone(model: Any, tensors: dict[str, Tensor], folder: Path, dtype: torch.dtype) -> None:
    """A fully trained backbone as a transformers folder, in the dtype it was loaded in."""
    saved = model.state_dict().keys()
    state = {plain_name(name): t for name, t in model.named_buffers() if name in saved or plain_name(name) in saved}
    first = {id(parameter): plain_name(name) for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters(remove_duplicate=False):  # a tied weight has two names
        state[plain_name(name)] = tensors[BACKBONE + first[id(parameter)]]
    state = {name: t.to(dtype) if t.is_floating_point() else t for name, t in state.items()}
    model.save_pretrained(folder, state_dict=state)
    config = json.loads((folder / "config.json").read_text())
    config["dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
