"""Folders that hold a backbone and its heads together: the Medusa-2 layout, written and taken apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from medusa_train.checkpoint.foreign import ForeignHeads, read_tensors
from medusa_train.checkpoint.identity import BackboneId
from medusa_train.checkpoint.problems import Problems
from medusa_train.checkpoint.tensorfile import write_tensors
from medusa_train.errors import UserError


def write_full_folder(staged: Path, model: Any, tensors: dict[str, Any], config: Any) -> None:
    """A whole model folder: the model as transformers saves it, one more shard with the heads, one index over all."""
    from safetensors import safe_open

    model.config.medusa_num_heads = config.medusa_num_heads
    model.config.medusa_num_layers = config.medusa_num_layers
    model.save_pretrained(staged)
    shards = sorted(staged.glob("*.safetensors"))
    total, weight_map, size = len(shards) + 1, {}, 0
    for number, shard in enumerate(shards, start=1):
        named = shard.rename(staged / f"model-{number:05d}-of-{total:05d}.safetensors")
        with safe_open(named, framework="pt") as handle:
            weight_map |= dict.fromkeys(handle.keys(), named.name)
        size += named.stat().st_size
    heads_shard = f"model-{total:05d}-of-{total:05d}.safetensors"
    write_tensors(staged / heads_shard, tensors)
    weight_map |= dict.fromkeys(tensors, heads_shard)
    size += (staged / heads_shard).stat().st_size
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
    (staged / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def changed_backbone(found: ForeignHeads, backbone: BackboneId, target: Path) -> Path | None:
    """The backbone of a whole-model folder, the heads taken out; None where it is the base, bit for bit."""
    from transformers import AutoModelForCausalLM

    from medusa_train.modeling.base import load_weights
    from medusa_train.modeling.fingerprint import missing_shards, weights_hash

    if not found.whole_model:
        if "medusa-2" in found.layouts:
            found.notes.append("named like Medusa-2 heads, but no backbone lies beside them; the base's own is assumed")
        return None
    if found.source.is_dir() and (absent := missing_shards(found.source)):
        raise UserError(
            f"the model is incomplete: {', '.join(absent[:5])} missing",
            where=str(found.source),
            fix="download it again",
        )
    target.mkdir(parents=True)
    files, weight_map = sorted(set(found.backbone.values())), {}
    for number, path in enumerate(files, start=1):
        name = "model.safetensors" if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        kept = {k: v for k, v in read_tensors(path, Problems()).items() if found.backbone.get(k) == path}
        write_tensors(target / name, {k: v.clone() for k, v in kept.items()})
        weight_map |= dict.fromkeys(kept, name)
    if weights_hash(target) == weights_hash(backbone.folder):
        found.notes.append("the backbone in the folder is the base, bit for bit: Medusa-1")
        return None
    if len(files) > 1:
        index = {"metadata": {}, "weight_map": weight_map}
        (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    (target / "config.json").write_text(json.dumps(_backbone_config(found, backbone), indent=2) + "\n")
    # Read it once as it will be read: what the folder lacks would otherwise be made up at random.
    load_weights(AutoModelForCausalLM, target, {"dtype": "auto"})
    found.notes.append("the backbone in the folder differs from the base: it is kept with the heads (Medusa-2)")
    return target


def _backbone_config(found: ForeignHeads, backbone: BackboneId) -> dict[str, Any]:
    """The folder's config without what speaks of heads; the model class is the base's, not a Medusa wrapper's."""
    dropped = ("medusa", "medusa_config", "version", "base_model_name_or_path", "auto_map", "architectures")
    config = {k: v for k, v in found.config.items() if k not in dropped and not k.startswith("medusa_")}
    base = json.loads((backbone.folder / "config.json").read_text())
    return config | {"architectures": base.get("architectures"), "model_type": base.get("model_type")}
