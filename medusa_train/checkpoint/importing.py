"""`medusa-train import`: another program's heads become a checkpoint of ours, or one error says all that is wrong."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from medusa_train.checkpoint import abi, layouts
from medusa_train.checkpoint.foreign import ForeignHeads, read_foreign
from medusa_train.checkpoint.identity import BackboneId
from medusa_train.checkpoint.inspect_ import check_token_map, count_non_finite
from medusa_train.checkpoint.problems import Problems
from medusa_train.checkpoint.rank_paths import read_tree_file
from medusa_train.checkpoint.save import save_checkpoint
from medusa_train.checkpoint.whole_model import changed_backbone
from medusa_train.errors import UserError, unknown_name

CONTRACT_CHOICES = ("auto", "own", "shared")
_TRUST = "the tensors may be right and the config wrong: --trust-tensors takes the counts from the tensors"


@dataclass(frozen=True)
class Imported:
    """What came of an import: the checkpoint's folder, the counts, the contract, and what had to be done on the way."""

    folder: Path
    contract: str
    heads: int
    layers: int
    policy: str
    notes: list[str]


def import_heads(
    source: str | Path,
    out: str | Path,
    base: str | None = None,
    *,
    contract: str = "auto",
    trust_tensors: bool = False,
    tree: str | Path | None = None,
    chat_template: str | None = None,
    revision: str | None = None,
) -> Imported:
    """Reads heads of another program and writes them as the checkpoint `out`.

    Args:
        source: a weights file, a folder, or a hub id.
        base: the backbone they belong to; by default the one that the source's config names.
        contract: "auto" keeps what the file has; "own" gives shared heads a copy of the lm_head each; "shared" takes
            projections away that equal the lm_head bit for bit.
        trust_tensors: counts and sizes of the config may contradict the tensors; the tensors win.
        tree: a JSON file of rank paths to put into the checkpoint.
        revision: of the base.

    Raises:
        UserError: nothing readable there, or (CheckpointError) every reason why it cannot be a checkpoint.
    """
    if contract not in CONTRACT_CHOICES:
        raise unknown_name("contract", contract, CONTRACT_CHOICES)
    path = _local(source)
    if (path / abi.MANIFEST_FILE).is_file():
        raise UserError("this is a checkpoint of medusa-train already", where=str(path), fix="use it as it is")
    found = read_foreign(path)
    base_name = base or found.config.get("base_model_name_or_path")
    if not isinstance(base_name, str) or not base_name:
        raise UserError(
            "the config does not name a base, and heads fit one backbone only",
            where=str(path),
            fix="give it with --base",
        )
    backbone = backbone_marks(base_name, revision, chat_template)
    problems = Problems()
    layers = _check_complete(found, problems)
    _check_claims(found, layers, problems, trust_tensors)
    if found.token_map is not None and _token_map_fits(found.token_map, backbone.vocab_size, problems):
        # vLLM takes rows of the whole vocabulary too, and picks the map's rows while it loads.
        rows = found.token_map.long()
        found.projections = {
            head: weight if weight.shape[0] <= rows.numel() else weight[rows]
            for head, weight in found.projections.items()
        }
    _check_shapes(found, backbone, problems)
    problems.raise_if_any("these heads cannot be imported", path)
    heads = _assemble(found, layers, backbone, contract)
    tree_json = None if tree is None else read_tree_file(Path(tree), heads.config.medusa_num_heads)
    with tempfile.TemporaryDirectory(prefix="medusa-import-") as scratch:
        merged = changed_backbone(found, backbone, Path(scratch) / "backbone")
        policy = "heads_only" if merged is None else "joint"
        folder = save_checkpoint(
            out,
            heads,
            backbone,
            recipe={"imported": {"source": str(source), "layouts": sorted(found.layouts), "config": found.config}},
            policy=policy,
            data_manifest_hash=None,
            training={"imported_from": str(source), "notes": found.notes},
            merged=merged,
            tree=tree_json,
        )
    return Imported(folder, heads.config.contract, heads.config.medusa_num_heads, layers, policy, found.notes)


def _local(source: str | Path) -> Path:
    path, name = Path(source).expanduser(), str(source)
    if path.exists() or name.count("/") != 1 or name.startswith((".", "/", "~")):
        return path
    from medusa_train.checkpoint.hub import download_foreign

    return download_foreign(name)


def backbone_marks(name: str, revision: str | None, chat_template: str | None) -> BackboneId:
    """The marks of the base, without its weights in memory."""
    from transformers import AutoConfig

    from medusa_train.modeling.base import load_tokenizer
    from medusa_train.modeling.fingerprint import fingerprint_folder
    from medusa_train.modeling.sources import find_source

    source = find_source(name, revision=revision)
    tokenizer = load_tokenizer(name, revision=revision, chat_template=chat_template)
    config = AutoConfig.from_pretrained(source.folder).get_text_config(decoder=True)
    return BackboneId(
        name=source.name,
        fingerprint=fingerprint_folder(source.folder),
        folder=source.folder,
        revision=source.revision,
        template_hash=tokenizer.template_hash,
        tokenizer=tokenizer.tokenizer,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
    )


def _name(found: ForeignHeads, head: int, layer: int, part: str) -> str:
    """How the source would have named a block's tensor."""
    naming = layouts.VLLM if "vllm" in found.layouts and not _fasterdecoding(found) else layouts.FASTERDECODING
    return naming.block_name(head, layer, part)


def _fasterdecoding(found: ForeignHeads) -> bool:
    return bool(found.layouts - {"vllm"})


def _check_complete(found: ForeignHeads, problems: Problems) -> int:
    """R; every head must have the same blocks, weight and bias, and either all heads a projection or none."""
    heads = 1 + max([head for head, _, _ in found.blocks] + list(found.projections))
    layers = max([layer + 1 for _, layer, _ in found.blocks] + [0])
    fix = "the file is incomplete: get it again, or train the heads again"
    without_bias = not any(part == "bias" for _, _, part in found.blocks)
    for head in range(heads):
        for layer in range(layers):
            for part in ("weight", "bias"):
                if (head, layer, part) not in found.blocks and not (part == "bias" and without_bias):
                    problems.add("missing", _name(found, head, layer, part), "the tensor is missing", fix)
        if found.projections and head not in found.projections and not _one_for_all(found):
            name = (layouts.FASTERDECODING if _fasterdecoding(found) else layouts.VLLM).projection_name(head, layers)
            problems.add("missing", name, f"head {head} has no projection, others have one", fix)
        if found.projection_layers.get(head, layers) != layers:
            name = layouts.FASTERDECODING.projection_name(head, found.projection_layers[head])
            problems.add("count", name, f"stands where layer {layers} of {layers} should end", fix)
    if without_bias and layers:
        found.notes.append("the blocks have no bias in the file; they get zeros, which computes the same")
    if found.token_map is not None and not found.projections:
        problems.add("missing", "lm_heads.0.weight", "a token map without projections of its own", fix)
    return layers


def _one_for_all(found: ForeignHeads) -> bool:
    """vLLM's shared projection: lm_heads.0.weight alone, and the config says so."""
    return set(found.projections) == {0} and found.config.get("original_lm_head") is True


def _check_claims(found: ForeignHeads, layers: int, problems: Problems, trust_tensors: bool) -> None:
    heads = 1 + max([head for head, _, _ in found.blocks] + list(found.projections))
    hidden = next(iter(found.blocks.values()), next(iter(found.projections.values()), torch.empty(0))).shape[-1]
    truth = {"heads": heads, "layers": layers, "hidden": hidden}
    if found.projections and found.token_map is None:
        truth["vocab"] = next(iter(found.projections.values())).shape[0]
    words = {"heads": "heads", "layers": "layers", "hidden": "hidden size", "vocab": "vocabulary rows"}
    for key, (quantity, value) in layouts.counts_claimed(found.config).items():
        if quantity in truth and value != truth[quantity]:
            what = f"says {value} {words[quantity]}, the tensors have {truth[quantity]}"
            if trust_tensors:
                found.notes.append(f"config.json {key} {what}; the tensors were taken")
            else:
                problems.add("count", f"config.json {key}", what, _TRUST)
    if found.config.get("medusa_fc_bias") is False and any(part == "bias" for _, _, part in found.blocks):
        found.notes.append("medusa_fc_bias is false, so vLLM dropped these biases; they are kept here")


def _token_map_fits(token_map: Tensor, vocab: int, problems: Problems) -> bool:
    """True where the map is a list of the vocabulary's tokens; else the reasons go to `problems`."""
    before = len(problems.found)
    if token_map.dim() != 1 or token_map.is_floating_point() or token_map.is_complex() or not token_map.numel():
        what = f"{token_map.dtype} of shape {list(token_map.shape)}, a list of token numbers is needed"
        problems.add("shape", "token_map", what, "these heads are broken; get the file again")
    else:
        check_token_map(token_map.long(), vocab, "token_map", problems)
    return len(problems.found) == before


def _check_shapes(found: ForeignHeads, backbone: BackboneId, problems: Problems) -> None:
    hidden, vocab = backbone.hidden_size, backbone.vocab_size
    fix = f"these heads are of another backbone than {backbone.name}; name theirs with --base"
    rows = vocab if found.token_map is None else found.token_map.numel()
    wanted: list[tuple[str, Tensor, tuple[int, ...]]] = []
    for (head, layer, part), tensor in found.blocks.items():
        wanted.append((_name(found, head, layer, part), tensor, (hidden, hidden) if part == "weight" else (hidden,)))
    wanted += [(f"projection of head {head}", tensor, (rows, hidden)) for head, tensor in found.projections.items()]
    wanted += [(f"projection bias of head {head}", t, (rows,)) for head, t in found.projection_biases.items()]
    for name, tensor, shape in wanted:
        if tensor.numel() == 0:
            problems.add("empty", name, f"holds nothing, shape {list(shape)} is needed", fix)
        elif tuple(tensor.shape) != shape:
            problems.add("shape", name, f"shape {list(tensor.shape)}, {list(shape)} is needed for {backbone.name}", fix)
        elif not tensor.is_floating_point() or tensor.itemsize < 2:
            problems.add(
                "dtype",
                name,
                f"dtype {tensor.dtype}, floating point of 16 bits or more is needed",
                "dequantize the heads first",
            )
        elif count_non_finite(tensor):
            problems.add(
                "non-finite", name, "holds NaN or infinite numbers", "these heads are broken; train them again"
            )


def _assemble(found: ForeignHeads, layers: int, backbone: BackboneId, contract: str) -> Any:
    """Our heads, every tensor with memory of its own, in the widest dtype of the file (so nothing is rounded)."""
    from medusa_train.modeling.heads import HeadsConfig, MedusaHeads

    kind, projections = _projections(found, backbone, contract)
    tensors = [*found.blocks.values(), *(projections or {}).values()]
    dtype = tensors[0].dtype
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    if len({tensor.dtype for tensor in tensors}) > 1:
        found.notes.append(f"mixed dtypes in the file; everything is kept as {dtype}")
    config = HeadsConfig(
        contract=kind,
        medusa_num_heads=1 + max([head for head, _, _ in found.blocks] + list(found.projections)),
        medusa_num_layers=layers,
        hidden_size=backbone.hidden_size,
        vocab_size=backbone.vocab_size,
        reduced_vocab_size=found.token_map.numel() if kind == "reduced" else None,
        projection_bias=bool(found.projection_biases) and kind != "shared",
    )
    heads = MedusaHeads(config, dtype=dtype)
    with torch.no_grad():
        for (head, layer, part), tensor in found.blocks.items():
            getattr(heads.blocks[head][layer].linear, part).copy_(tensor)
        for head, tensor in (projections or {}).items():
            heads.projections[head].weight.copy_(tensor)
            if config.projection_bias:
                heads.projections[head].bias.copy_(found.projection_biases.get(head, torch.zeros(1)))
        if kind == "reduced":
            heads.token_map.copy_(found.token_map)
    return heads


def _projections(found: ForeignHeads, backbone: BackboneId, contract: str) -> tuple[str, dict[int, Tensor] | None]:
    """(contract, head -> projection or None for shared), as the file has it or as the person asked."""
    heads = 1 + max([head for head, _, _ in found.blocks] + list(found.projections))
    if found.token_map is not None:
        if contract != "auto":
            raise UserError(f"heads over a token map cannot become `{contract}`", fix="leave --contract out")
        one = found.projections.get(0)
        return "reduced", {head: one if _one_for_all(found) else found.projections[head] for head in range(heads)}
    projections: dict[int, Tensor] | None = dict(found.projections) or None
    if projections is not None and _one_for_all(found):
        if torch.equal(projections[0], lm_head_of(backbone).to(projections[0].dtype)):
            projections = None
        else:
            found.notes.append("the shared projection is not the base's lm_head; every head gets a copy of it (own)")
            projections = dict.fromkeys(range(heads), projections[0])
    if contract == "own" and projections is None:
        found.notes.append("shared heads: every head gets a copy of the base's lm_head")
        projections = dict.fromkeys(range(heads), lm_head_of(backbone))
    elif contract == "shared" and projections is not None:
        lm_head = lm_head_of(backbone)
        other = [head for head, weight in projections.items() if not torch.equal(weight, lm_head.to(weight.dtype))]
        if other or found.projection_biases:
            raise UserError(
                f"heads {other} have projections that differ from the base's lm_head",
                fix="they cannot become `shared` without loss; leave --contract out",
            )
        projections = None
    return ("shared" if projections is None else "own"), projections


def lm_head_of(backbone: BackboneId) -> Tensor:
    """The base's output projection [V, D] in its stored dtype.

    Raises:
        UserError: the lm_head has a bias, which a bare copy of the weight would lose.
    """
    from medusa_train.modeling.backbone import output_projection
    from medusa_train.modeling.base import load_base
    from medusa_train.modeling.heads import dense_projection

    # Any template does: no text is rendered here, and a base known by an alias may bring none of its own.
    base = load_base(str(backbone.folder), device="cpu", chat_template="{{ messages }}")
    weight, bias = dense_projection(output_projection(base.model))
    if bias is not None:
        raise UserError("the lm_head has a bias, so its weight alone is not a head's projection", where=backbone.name)
    return weight
