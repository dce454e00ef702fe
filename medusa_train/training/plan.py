"""`plan`: what a recipe will cost, by formula, before anything is loaded.

Every figure is a sum of named parts. Activations follow the operations of a gated decoder layer as transformers runs
it; `tests/training/test_plan.py` holds FLOPs to a counter and memory to a measured run, within 15 %.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from medusa_train.config.recipe import HeadsOnly, Joint, LoraSection, Recipe, SelfDistill
from medusa_train.modeling.heads import HeadsConfig
from medusa_train.training.ledger import StepMemory, head_training_flops
from medusa_train.training.plan_memory import Micro, before_training, check_memory, recomputes, runs_on_cpu, step_memory
from medusa_train.training.shapes import BackboneShape


@dataclass(frozen=True)
class Plan:
    """The figures of a recipe.

    Attributes:
        heads: the heads' shape; shape: the backbone's.
        trainable: trainable numbers by group.
        tokens_per_step: positions that a process handles in one micro-batch (rows, with a cache).
        supervised: supervised rows among them.
        flops_per_token: backbone and heads, forward and backward, per position (per row with a cache).
        memory: bytes of one process by part, at the height of a training step.
        check: bytes at the height of a held-out check.
        before: bytes at the height of what comes before training, by what it is.
        on_cpu: whether memory is that of a CPU.
    """

    heads: HeadsConfig
    shape: BackboneShape
    trainable: dict[str, int]
    tokens_per_step: int
    supervised: int
    flops_per_token: dict[str, float]
    memory: StepMemory
    cached: bool
    on_cpu: bool
    check: int
    before: dict[str, int] = field(default_factory=dict)

    @property
    def height(self) -> int:
        """The most that a process holds at any time."""
        return max(self.memory.total, self.check, *self.before.values())

    @property
    def total_flops_per_token(self) -> float:
        """All FLOPs per position."""
        return sum(self.flops_per_token.values())


def plan_recipe(
    recipe: Recipe,
    shape: BackboneShape,
    *,
    supervised_share: float = 0.4,
    processes: int = 1,
    device: str | None = None,
) -> Plan:
    """The plan of a recipe on a backbone of that shape.

    Args:
        supervised_share: part of the positions that is supervised.
        processes: ranks; sharded (fsdp, deepspeed) parts are divided by it, data parallel ones are not.
        device: cpu or cuda; by default the recipe's, else what this machine has.

    Raises:
        UserError: the DeepSpeed config that the recipe names cannot be read.
    """
    heads = HeadsConfig(
        contract=recipe.heads.contract,
        medusa_num_heads=recipe.heads.medusa_num_heads,
        medusa_num_layers=recipe.heads.medusa_num_layers,
        hidden_size=shape.hidden,
        vocab_size=shape.vocab,
        reduced_vocab_size=recipe.heads.reduced_vocab_size,
        sees=recipe.heads.sees,
        reads_layer=recipe.heads.reads_layer,
    )
    cached = isinstance(recipe.policy, HeadsOnly) and recipe.policy.cache.enabled
    batch = int(recipe.training.get("per_device_train_batch_size", 2048 if cached else 8))
    tokens = batch if cached else batch * recipe.data.max_length
    micro = Micro(tokens, batch if cached else int(tokens * supervised_share), cached)
    on_cpu = runs_on_cpu(recipe, device)
    trainable = trainable_numbers(recipe, heads, shape)
    memory = step_memory(recipe, heads, shape, trainable, micro, processes, on_cpu)
    return Plan(
        heads=heads,
        shape=shape,
        trainable=trainable,
        tokens_per_step=tokens,
        supervised=micro.supervised,
        flops_per_token=flops_per_token(recipe, heads, shape, micro.supervised / tokens, cached),
        memory=memory,
        check=check_memory(recipe, heads, shape, memory, on_cpu),
        cached=cached,
        on_cpu=on_cpu,
        before=before_training(recipe, shape, trainable, cached, on_cpu),
    )


def trainable_numbers(recipe: Recipe, heads: HeadsConfig, shape: BackboneShape) -> dict[str, int]:
    """Trainable numbers by group, as `fit` prints them."""
    blocks = heads.block_parameters()
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
    if recomputes(recipe):
        parts["backbone, recomputed"] = forward
    lm_head = 2 * shape.vocab * shape.hidden * share
    products = 3 if full else 2
    parts["lm_head, forward and backward"] = lm_head * (products + (1 if isinstance(recipe.policy, SelfDistill) else 0))
    return parts
