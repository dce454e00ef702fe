"""`plan`: what a recipe will cost, by formula, before anything is loaded.

Every figure is a sum of named parts. Activations follow the operations of a gated decoder layer as transformers runs
it; `tests/training/test_plan.py` holds FLOPs to a counter and memory to a measured run, within 15 %.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from medusa_train.config.recipe import HeadsOnly, Joint, LoraSection, Recipe, SelfDistill
from medusa_train.modeling.heads import HeadsConfig
from medusa_train.training.ledger import (
    BF16,
    CPU_PIECE_TOKENS,
    FP32,
    StepMemory,
    block_parameters,
    head_flops,
    head_training_flops,
    loss_buffer_bytes,
)
from medusa_train.training.shapes import BackboneShape

# Numbers kept per token and layer for the backward pass of a decoder layer, in units of D and of the MLP's width:
# input, both norms' inputs and outputs, q k v o and the attention's output; gate, up, silu(gate) and their product.
KEPT_D, KEPT_MLP = 10, 4
QUANTIZED_BYTES = {"8bit": 1.0, "4bit": 0.55}  # NF4 with double-quantized scales


@dataclass(frozen=True)
class Plan:
    """The figures of a recipe.

    Attributes:
        heads: the heads' shape; shape: the backbone's.
        trainable: trainable numbers by group.
        tokens_per_step: positions that a process handles in one micro-batch (rows, with a cache).
        supervised: supervised rows among them.
        flops_per_token: backbone and heads, forward and backward, per position (per row with a cache).
        memory: bytes of one process by part.
    """

    heads: HeadsConfig
    shape: BackboneShape
    trainable: dict[str, int]
    tokens_per_step: int
    supervised: int
    flops_per_token: dict[str, float]
    memory: StepMemory
    cached: bool

    @property
    def total_flops_per_token(self) -> float:
        """All FLOPs per position."""
        return sum(self.flops_per_token.values())


def plan_recipe(recipe: Recipe, shape: BackboneShape, *, supervised_share: float = 0.4, processes: int = 1) -> Plan:
    """The plan of a recipe on a backbone of that shape.

    Args:
        supervised_share: part of the positions that is supervised.
        processes: ranks; sharded (fsdp, deepspeed) parts are divided by it, data parallel ones are not.
    """
    heads = HeadsConfig(
        contract=recipe.heads.contract,
        medusa_num_heads=recipe.heads.medusa_num_heads,
        medusa_num_layers=recipe.heads.medusa_num_layers,
        hidden_size=shape.hidden,
        vocab_size=shape.vocab,
        reduced_vocab_size=recipe.heads.reduced_vocab_size,
    )
    cached = isinstance(recipe.policy, HeadsOnly) and recipe.policy.cache.enabled
    batch = int(recipe.training.get("per_device_train_batch_size", 2048 if cached else 8))
    tokens = batch if cached else batch * recipe.data.max_length
    supervised = batch if cached else int(tokens * supervised_share)
    return Plan(
        heads=heads,
        shape=shape,
        trainable=trainable_numbers(recipe, heads, shape),
        tokens_per_step=tokens,
        supervised=supervised,
        flops_per_token=flops_per_token(recipe, heads, shape, supervised / tokens, cached),
        memory=memory_of(recipe, heads, shape, tokens, supervised, cached, processes),
        cached=cached,
    )


def trainable_numbers(recipe: Recipe, heads: HeadsConfig, shape: BackboneShape) -> dict[str, int]:
    """Trainable numbers by group, as `fit` prints them."""
    blocks = heads.medusa_num_heads * heads.medusa_num_layers * block_parameters(heads.hidden_size)
    groups = {"residual blocks": blocks, "projections": heads.parameter_count() - blocks}
    policy = recipe.policy
    if isinstance(policy, Joint) and policy.adapter == "none":
        groups["backbone"] = shape.parameters
    elif isinstance(policy, Joint | SelfDistill):
        groups["adapter"] = lora_numbers(policy.lora or LoraSection(), shape)
    return groups


def lora_numbers(lora: LoraSection, shape: BackboneShape) -> int:
    """r (in + out) of every targeted product."""
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sizes = {
        "q_proj": shape.hidden + q,
        "k_proj": shape.hidden + kv,
        "v_proj": shape.hidden + kv,
        "o_proj": q + shape.hidden,
        "gate_proj": shape.hidden + shape.intermediate,
        "up_proj": shape.hidden + shape.intermediate,
        "down_proj": shape.intermediate + shape.hidden,
    }
    layers = sum(sizes.get(name, 0) for name in lora.target_modules) * shape.layers
    return lora.r * (layers + (shape.hidden + shape.vocab if "lm_head" in lora.target_modules else 0))


def flops_per_token(
    recipe: Recipe, heads: HeadsConfig, shape: BackboneShape, share: float, cached: bool
) -> dict[str, float]:
    """FLOPs per position by part: the backbone sees every position, heads and lm_head only supervised ones."""
    parts = {"heads, forward and backward": head_training_flops(heads, 1) * share}
    if cached:
        return parts
    forward = shape.decoder_flops(1, recipe.data.max_length // 2)
    parts["backbone, forward"] = forward
    if isinstance(recipe.policy, HeadsOnly):
        return parts
    # The teacher is one more forward. With an adapter the weights' own gradient products are not needed.
    if isinstance(recipe.policy, SelfDistill):
        parts["teacher, forward"] = forward
    full = isinstance(recipe.policy, Joint) and recipe.policy.adapter == "none"
    parts["backbone, backward"] = forward * (2 if full else 1)
    if recipe.training.get("activation_checkpointing"):
        parts["backbone, recomputed"] = forward
    lm_head = 2 * shape.vocab * shape.hidden * share
    products = 3 if full else 2
    parts["lm_head, forward and backward"] = lm_head * (products + (1 if isinstance(recipe.policy, SelfDistill) else 0))
    return parts


def memory_of(
    recipe: Recipe, heads: HeadsConfig, shape: BackboneShape, tokens: int, supervised: int, cached: bool, processes: int
) -> StepMemory:
    """Bytes of one process at the height of a training step, by part."""
    numbers = trainable_numbers(recipe, heads, shape)
    trainable = sum(numbers.values())
    shards = processes if recipe.training.get("fsdp") or _zero_stage(recipe) >= 3 else 1
    state_shards = processes if recipe.training.get("fsdp") or _zero_stage(recipe) >= 2 else 1
    compute = FP32 if recipe.base.dtype == "float32" else BF16
    weight = QUANTIZED_BYTES.get(recipe.base.quantization or "", compute)
    full = "backbone" in numbers
    parts: dict[str, int] = {}
    if not cached:
        kept = shape.vocab * shape.hidden * (1 if shape.tied else 2)
        layers = shape.layers * shape.layer_parameters
        parts["backbone weights"] = 0 if full else int((layers * weight + kept * compute) / shards)
    elif heads.contract == "shared":
        parts["lm_head"] = shape.vocab * shape.hidden * compute
    parts["trainable weights, fp32"] = trainable * FP32 // shards
    parts["gradients, fp32"] = trainable * FP32 // state_shards
    eight_bit = "8bit" in str(recipe.training.get("optim", ""))
    parts["optimizer state"] = trainable * (2 if eight_bit else 2 * FP32) // state_shards
    parts["loss buffers"] = _loss_bytes(recipe, heads, shape, supervised, compute)
    parts["supervised rows"] = supervised * shape.hidden * compute * (2 * heads.medusa_num_heads + 2)
    if not cached:  # a frozen backbone's are freed before the loss, and stay with the process
        parts["activations"] = activation_bytes(recipe, shape, tokens, compute)
    if heads.contract != "shared" and not torch.cuda.is_available():
        # `fit` keeps freed memory on a CPU, and new gradients do not always find a place in it: one to three
        # projections more were measured on SmolLM2 (tests/training/test_plan.py).
        parts["freed memory that stays"] = min(heads.medusa_num_heads, 2) * heads.projection_rows * shape.hidden * FP32
    return StepMemory(parts)


def _loss_bytes(recipe: Recipe, heads: HeadsConfig, shape: BackboneShape, supervised: int, compute: int) -> int:
    """One chunk of logits, and one trained projection in the computing dtype with its gradient before it is summed.

    The loss computes the projections' gradients; with accumulation they stand beside the ones of earlier micro-batches.
    A CPU computes a half-precision gradient in pieces of a few MiB (fused.py).
    """
    rows = min(recipe.loss.chunk_rows, supervised)
    vocabulary = heads.projection_rows if isinstance(recipe.policy, HeadsOnly) else shape.vocab
    on_cpu = not torch.cuda.is_available()
    buffers = loss_buffer_bytes(rows, vocabulary, compute, on_cpu)
    sides = 2 if isinstance(recipe.policy, SelfDistill) else 1
    if heads.contract == "shared":
        return sides * buffers
    projection = vocabulary * shape.hidden
    beside = int(recipe.training.get("gradient_accumulation_steps", 1)) > 1
    copies = 1 if on_cpu and compute == BF16 else 2
    return sides * buffers + projection * (copies * compute + (heads.medusa_num_heads * FP32 if beside else 0))


def activation_bytes(recipe: Recipe, shape: BackboneShape, tokens: int, compute: int) -> int:
    """What the backbone keeps (trained) or holds for a moment (frozen)."""
    one_layer = tokens * compute * (KEPT_D * shape.hidden + KEPT_MLP * shape.intermediate)
    if isinstance(recipe.policy, HeadsOnly):
        if not torch.cuda.is_available():
            tokens = min(tokens, max(recipe.data.max_length, CPU_PIECE_TOKENS * torch.get_num_threads()))
        # No layer outlives the next; two fp32 copies belong to the norms.
        return tokens * (compute * (4 * shape.hidden + 3 * shape.intermediate) + 2 * FP32 * shape.hidden)
    if recipe.training.get("activation_checkpointing"):
        return tokens * compute * shape.hidden * shape.layers + one_layer
    return one_layer * shape.layers


def _zero_stage(recipe: Recipe) -> int:
    """The stage of a DeepSpeed config given in place or as a file; 0 without one."""
    config = recipe.training.get("deepspeed")
    if config is None:
        return 0
    if isinstance(config, str):
        import json
        from pathlib import Path

        try:
            config = json.loads(Path(config).read_text())
        except (OSError, ValueError):
            return 0
    return int(config.get("zero_optimization", {}).get("stage", 0))


def head_forward_flops(plan: Plan) -> int:
    """FLOPs of the heads for one decoded round (one row)."""
    return head_flops(plan.heads, 1)
