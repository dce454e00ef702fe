"""Memory of a run by formula: what lives between steps, what a step adds, and what comes before the first one.

Activations follow the operations of a gated decoder layer as transformers runs it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import torch

from medusa_train.config.recipe import HeadsOnly, Joint, LoraSection, Recipe, SelfDistill
from medusa_train.errors import UserError
from medusa_train.modeling.heads import HeadsConfig
from medusa_train.training.ledger import (
    BF16,
    CHECK_ROWS,
    CHECK_TOKENS,
    CPU_PIECE_TOKENS,
    FP32,
    StepMemory,
    loss_buffer_bytes,
)
from medusa_train.training.shapes import BackboneShape

QUANTIZED_BYTES = {"8bit": 1.0, "4bit": 0.55}  # NF4 with double-quantized scales
# What lies idle between the activations that a CPU keeps for the backward pass, as a share of them: 22 to 40 % were
# measured on SmolLM2 with batches of one length, about 50 % with lengths that vary (tests/training/test_memory.py).
CPU_GAPS = 0.5
# Of a CPU's process besides tensors: rows, replay, libraries' own buffers; 30 to 130 MiB were measured.
CPU_SMALL = 64 << 20
# Parts of a step that live through a held-out check.
STANDING = ("backbone weights", "lm_head", "trainable weights, fp32", "optimizer state", "freed memory that stays",
            "small buffers")  # fmt: skip


class Micro(NamedTuple):
    """A micro-batch of one process: positions (rows, from a cache) and the supervised ones among them."""

    tokens: int
    supervised: int
    cached: bool


def runs_on_cpu(recipe: Recipe, device: str | None) -> bool:
    """Whether the run is a CPU's: as asked, else by the recipe, else by what this machine has."""
    named = device or recipe.base.device
    return not torch.cuda.is_available() if named is None else named.split(":")[0] == "cpu"


def recomputes(recipe: Recipe) -> bool:
    """Whether activations are recomputed in the backward pass, by the Trainer's key or FSDP's own."""
    sharding = recipe.training.get("fsdp_config") or {}
    return bool(recipe.training.get("activation_checkpointing") or sharding.get("activation_checkpointing"))


def step_memory(
    recipe: Recipe,
    heads: HeadsConfig,
    shape: BackboneShape,
    trainable: dict[str, int],
    micro: Micro,
    processes: int,
    on_cpu: bool,
) -> StepMemory:
    """Bytes of one process at the height of a training step, by part."""
    numbers, stage = sum(trainable.values()), zero_stage(recipe)
    shards = processes if recipe.training.get("fsdp") or stage >= 3 else 1
    state_shards = processes if recipe.training.get("fsdp") or stage >= 2 else 1
    compute = product_bytes(recipe)
    parts: dict[str, int] = {}
    if not micro.cached or (recipe.base.quantization and not on_cpu):
        parts["backbone weights"] = 0 if "backbone" in trainable else backbone_bytes(recipe, shape) // shards
    elif heads.contract == "shared" or not on_cpu:  # on a CPU it is a mapped file, read only by shared heads
        parts["lm_head"] = shape.vocab * shape.hidden * weight_bytes(recipe)
    parts["trainable weights, fp32"] = numbers * FP32 // shards
    parts["gradients, fp32"] = numbers * FP32 // state_shards
    if processes > 1 and state_shards == 1:
        parts["buckets that gradients are summed in"] = numbers * FP32
    eight_bit = "8bit" in str(recipe.training.get("optim", ""))
    parts["optimizer state"] = numbers * (2 if eight_bit else 2 * FP32) // state_shards
    parts["loss buffers"] = _loss_bytes(recipe, heads, shape, micro.supervised, on_cpu)
    parts["supervised rows"] = micro.supervised * shape.hidden * compute * (2 * heads.medusa_num_heads + 2)
    if not micro.cached:  # a frozen backbone's are freed before the loss, and stay with the process
        parts["activations"] = activation_bytes(recipe, shape, micro.tokens, on_cpu)
    if "backbone" in trainable and compute < FP32:
        parts["weights in the products' dtype"] = shape.parameters * compute
    if heads.contract != "shared" and on_cpu:
        # `fit` keeps freed memory on a CPU, and new gradients do not always find a place in it: so many projections
        # more were measured on SmolLM2 (tests/training/test_memory.py). Where the backbone trains it is given back.
        kept = 1 if micro.cached else 2 * heads.medusa_num_heads if isinstance(recipe.policy, HeadsOnly) else 2
        parts["freed memory that stays"] = kept * heads.projection_rows * shape.hidden * FP32
    if on_cpu and not isinstance(recipe.policy, HeadsOnly):
        gaps = int(CPU_GAPS * parts["activations"])
        parts["freed memory that stays"] = parts.get("freed memory that stays", 0) + gaps
    if on_cpu:
        parts["small buffers"] = CPU_SMALL
    return StepMemory(parts)


def check_memory(recipe: Recipe, heads: HeadsConfig, shape: BackboneShape, step: StepMemory, on_cpu: bool) -> int:
    """Bytes during a held-out check: what stays between steps, and fp32 logits of a few rows, as heldout.py scores."""
    standing = sum(step.parts.get(name, 0) for name in STANDING)
    vocabulary = heads.projection_rows if isinstance(recipe.policy, HeadsOnly) else shape.vocab
    drift = not isinstance(recipe.policy, HeadsOnly)  # two sets of logits, and the probabilities of both
    logits = CHECK_ROWS * vocabulary * FP32 * (5 if drift else 3)
    passing = 0 if "activations" not in step.parts else passing_bytes(recipe, shape, CHECK_TOKENS, on_cpu)
    scoring = logits + vocabulary * shape.hidden * FP32
    return standing + (scoring + passing if on_cpu else max(scoring, passing))  # a CPU's process keeps what is freed


def before_training(
    recipe: Recipe, shape: BackboneShape, trainable: dict[str, int], cached: bool, on_cpu: bool
) -> dict[str, int]:
    """Bytes of what comes before the first step and may be more than a step: {what: bytes}."""
    weights = backbone_bytes(recipe, shape)
    heads = FP32 * (trainable["residual blocks"] + trainable["projections"])
    if cached:
        rows = max(recipe.data.max_length, recipe.policy.cache.forward_tokens)
        return {"while hidden states are cached": weights + heads + passing_bytes(recipe, shape, rows, False)}
    if recipe.training.get("fsdp") or zero_stage(recipe) >= 3:
        return {"while every process loads the whole backbone, which is sharded afterwards": weights + heads}
    return {}


def backbone_bytes(recipe: Recipe, shape: BackboneShape) -> int:
    """Weights of the whole backbone as they are loaded; embeddings and lm_head are never quantized."""
    compute = weight_bytes(recipe)
    weight = QUANTIZED_BYTES.get(recipe.base.quantization or "", compute)
    embeddings = shape.vocab * shape.hidden * (1 if shape.tied else 2)
    return int(shape.layers * shape.layer_parameters * weight + embeddings * compute)


def weight_bytes(recipe: Recipe) -> int:
    """Of a number of the loaded backbone."""
    return FP32 if recipe.base.dtype == "float32" else BF16


def product_bytes(recipe: Recipe) -> int:
    """Of a number in the matrix products: mixed precision follows the backbone's dtype unless the recipe sets it."""
    asked = [recipe.training[name] for name in ("bf16", "fp16") if name in recipe.training]
    return (BF16 if any(asked) else FP32) if asked else weight_bytes(recipe)


def _loss_bytes(recipe: Recipe, heads: HeadsConfig, shape: BackboneShape, supervised: int, on_cpu: bool) -> int:
    """One chunk of logits, and one trained projection in the computing dtype with its gradient before it is summed.

    The loss computes the projections' gradients; with accumulation they stand beside the ones of earlier micro-batches.
    A CPU computes a half-precision gradient in pieces of a few MiB (fused.py).
    """
    rows, compute = min(recipe.loss.chunk_rows, supervised), product_bytes(recipe)
    vocabulary = heads.projection_rows if isinstance(recipe.policy, HeadsOnly) else shape.vocab
    buffers = loss_buffer_bytes(rows, vocabulary, compute, on_cpu)
    sides = 2 if isinstance(recipe.policy, SelfDistill) else 1
    projection = vocabulary * shape.hidden
    if heads.contract == "shared":
        # All channels train one lm_head, and each has computed its gradient before the first is added.
        return sides * buffers + (heads.medusa_num_heads * projection * FP32 if _is_full(recipe) else 0)
    beside = int(recipe.training.get("gradient_accumulation_steps", 1)) > 1
    copies = 1 if on_cpu and compute == BF16 else 2
    return sides * buffers + projection * (copies * compute + (heads.medusa_num_heads * FP32 if beside else 0))


def activation_bytes(recipe: Recipe, shape: BackboneShape, tokens: int, on_cpu: bool) -> int:
    """What the backbone keeps (trained) or holds for a moment (frozen)."""
    if isinstance(recipe.policy, HeadsOnly):
        return passing_bytes(recipe, shape, tokens, on_cpu)
    one_layer = tokens * saved_bytes(recipe, shape, on_cpu)
    if recomputes(recipe):
        stream = FP32 if _is_full(recipe) else weight_bytes(recipe)
        return tokens * stream * shape.hidden * shape.layers + one_layer
    return one_layer * shape.layers


def passing_bytes(recipe: Recipe, shape: BackboneShape, tokens: int, in_pieces: bool) -> int:
    """What a forward pass that keeps nothing holds for a moment; a CPU runs a training batch in pieces."""
    if in_pieces:
        tokens = min(tokens, max(recipe.data.max_length, CPU_PIECE_TOKENS * torch.get_num_threads()))
    # No layer outlives the next; two fp32 copies belong to the norms.
    return tokens * (product_bytes(recipe) * (4 * shape.hidden + 3 * shape.intermediate) + 2 * FP32 * shape.hidden)


def saved_bytes(recipe: Recipe, shape: BackboneShape, on_cpu: bool) -> int:
    """Bytes per token and layer that autograd saves in a trained backbone.

    Attention: q, k, v and its output. MLP: gate, up and silu(gate). Norms: the fp32 row. Trained weights: the rows
    they are multiplied with, behind LoRA's dropout with its mask (noise in fp32 on a CPU), or as each product casts
    them, and the fp32 rows before the norms' own weights.
    """
    compute, size = product_bytes(recipe), shape.hidden
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    saved = compute * (2 * q + 2 * kv) + compute * 3 * shape.intermediate + 2 * FP32 * size
    if _is_full(recipe):
        casts = 5 if compute < FP32 else 2  # of q, k, v, gate and up; in fp32 they share the norms' rows
        return saved + compute * (casts * size + shape.intermediate) + 2 * FP32 * size
    lora = recipe.policy.lora or LoraSection()
    inputs = {"o_proj": q, "down_proj": shape.intermediate, "lm_head": 0}
    mask = (FP32 if on_cpu else 1) if lora.dropout else 0
    return saved + sum(inputs.get(name, size) for name in lora.target_modules) * (compute + mask)


def _is_full(recipe: Recipe) -> bool:
    return isinstance(recipe.policy, Joint) and recipe.policy.adapter == "none"


def zero_stage(recipe: Recipe) -> int:
    """The stage of a DeepSpeed config given in place or as a file; 0 without one.

    Raises:
        UserError: the file cannot be read.
    """
    config = recipe.training.get("deepspeed")
    if config is None:
        return 0
    if isinstance(config, str):
        try:
            config = json.loads(Path(config).read_text())
        except (OSError, ValueError) as error:
            raise UserError(
                f"the DeepSpeed config cannot be read: {error}",
                where=f"training.deepspeed: {config}",
                fix="give its path from the folder you are in: training.deepspeed=PATH",
            ) from error
    return int(config.get("zero_optimization", {}).get("stage", 0))
