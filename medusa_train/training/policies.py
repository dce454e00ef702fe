"""Policies: what is trainable, in which optimizer group, and what the loss is made of.

heads_only     the backbone is frozen, lm_head, norms and buffers included
joint          L_LM + lambda_0 L_medusa; LoRA, QLoRA or the whole backbone; heads learn at a higher rate
self_distill   KL(teacher || student) + lambda_0 L_medusa; the teacher is the same backbone with its adapter off
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from medusa_train.config.recipe import HeadsOnly, Joint, LoraSection, RampSection, Recipe
from medusa_train.console import say
from medusa_train.errors import UserError


@dataclass(frozen=True)
class ParamGroup:
    """One optimizer group: what it is called, the names of its tensors, its size, learning rate and decay.

    Holds no tensor: a reference taken before FSDP2 shards a parameter would keep the whole of it alive.

    Attributes:
        count: trainable numbers (full sizes, also under ZeRO-3).
    """

    name: str
    tensors: tuple[str, ...]
    count: int
    learning_rate: float
    weight_decay: float


def prepare_backbone(model: nn.Module, recipe: Recipe) -> nn.Module:
    """Freezes the backbone, or puts the policy's adapter on it, or makes all of it trainable.

    Returns:
        The model to train: the same, or a PeftModel around it.
    """
    policy = recipe.policy
    model.requires_grad_(False)
    if isinstance(policy, HeadsOnly):
        return model.eval()
    if isinstance(policy, Joint) and policy.adapter == "none":
        return model.requires_grad_(True)
    if recipe.base.quantization is not None:
        if policy.kind == "self_distill":
            # Medusa paper, section on self-distillation: LoRA without quantization is preferred for this reason.
            say("warning: the backbone is quantized, and with its adapter off so is the teacher: a worse one (paper)")
        from peft import prepare_model_for_kbit_training

        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    return _with_lora(model, policy.lora or LoraSection())


def _with_lora(model: nn.Module, lora: LoraSection) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    names = {name.rsplit(".", 1)[-1] for name, module in model.named_modules() if not list(module.children())}
    missing = [name for name in lora.target_modules if name not in names]
    if missing:
        raise UserError(
            f"policy.lora.target_modules names {', '.join(missing)}, which this backbone does not have",
            allowed=", ".join(sorted(name for name in names if name and not name.isdigit())),
        )
    config = LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=list(lora.target_modules),
        bias="none",
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, config)


def head_weight_factor(ramp: RampSection, step: int, total_steps: int) -> float:
    """The factor on lambda_0 at a step: 1, s, or sin(pi/2 s), s = progress over the ramp's fraction of the steps."""
    if ramp.shape == "constant":
        return 1.0
    progress = min(step / max(ramp.fraction * total_steps, 1.0), 1.0)
    return progress if ramp.shape == "linear" else math.sin(math.pi / 2 * progress)


def channel_weights(recipe: Recipe, step: int, total_steps: int) -> list[float]:
    """lambda_c of every channel at a step: the heads' numbers, behind 1 for the lm channel where there is one."""
    weights = recipe.head_weights()
    policy = recipe.policy
    if isinstance(policy, HeadsOnly):
        return weights
    factor = policy.medusa_weight * head_weight_factor(policy.ramp, step, total_steps)
    return [1.0, *(factor * weight for weight in weights)]


def split_groups(optimizer: torch.optim.Optimizer, model: nn.Module, multiplier: float) -> list[ParamGroup]:
    """Moves the heads' parameters (biases too) of a fresh optimizer into their own groups, at another rate.

    Returns:
        All groups as they are now, with the tensors' names.

    Raises:
        UserError: a trainable parameter is in no group or in two; it is named.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        heads = [p for p in group["params"] if _is_head(names.get(id(p), ""))]
        others = [p for p in group["params"] if not _is_head(names.get(id(p), ""))]
        rate = group.get("lr", optimizer.defaults["lr"])
        shared = {key: value for key, value in group.items() if key != "params"}
        if others:
            groups.append({**shared, "params": others, "part": "backbone"})
        if heads:
            groups.append({**shared, "params": heads, "lr": rate * multiplier, "part": "heads"})
    optimizer.param_groups[:] = groups
    described = []
    for group in groups:
        decay = group.get("weight_decay", 0.0)
        described.append(
            ParamGroup(
                f"{group['part']}{'' if decay == 0 else ' (weight decay)'}",
                tuple(names.get(id(p), "?") for p in group["params"]),
                sum(getattr(p, "ds_numel", p.numel()) for p in group["params"]),
                group["lr"],
                decay,
            )
        )
    check_cover(optimizer, model.named_parameters())
    return described


def _is_head(name: str) -> bool:
    return "heads." in name and "backbone." not in name


def check_cover(optimizer: torch.optim.Optimizer, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Every trainable parameter is in exactly one group, and nothing else is in any.

    Raises:
        UserError: with the names of those that are not.
    """
    seen: dict[int, int] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            seen[id(parameter)] = seen.get(id(parameter), 0) + 1
    problems = []
    for name, parameter in parameters:
        times = seen.pop(id(parameter), 0)
        if parameter.requires_grad and times != 1:
            problems.append(f"{name} is trainable and in {times} optimizer groups")
        elif not parameter.requires_grad and times:
            problems.append(f"{name} is frozen and in an optimizer group")
    if seen:
        problems.append(f"{len(seen)} tensors in optimizer groups belong to no module of the model")
    if problems:
        raise UserError("the optimizer's groups do not cover the trainable parameters once: " + "; ".join(problems))


def master_weights(backbone: torch.nn.Module) -> None:
    """Trainable parameters in fp32: a bf16 weight loses updates smaller than 1/256 of it."""
    for parameter in backbone.parameters():
        if parameter.requires_grad and parameter.dtype in (torch.bfloat16, torch.float16):
            parameter.data = parameter.data.float()
