"""TrainingArguments from a recipe: the recipe's names verbatim over a few defaults that fit heads."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

from medusa_train.config.recipe import HeadsOnly, Recipe
from medusa_train.errors import UserError, unknown_name
from medusa_train.training.compiling import SWITCHES
from medusa_train.training.state import RunFolder

# Held-out checks and checkpoints ten times a run, unless the recipe says otherwise.
TENTH = 0.1
OURS = ("wandb", "tensorboard", "trackio")  # services with an extra of that name, and tests


def uses_cache(recipe: Recipe) -> bool:
    """Whether training reads cached hidden states."""
    return isinstance(recipe.policy, HeadsOnly) and recipe.policy.cache.enabled


def check_services(report_to: Any) -> None:
    """The services that curves go to are known and installed.

    Raises:
        UserError: with the command that installs what is missing.
    """
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    for service in [report_to] if isinstance(report_to, str) else report_to or []:
        if service in ("none", "all"):
            continue
        if service not in INTEGRATION_TO_CALLBACK:
            raise unknown_name("training.report_to", service, ["none", *INTEGRATION_TO_CALLBACK])
        if service in OURS and importlib.util.find_spec(service) is None:
            raise UserError(
                f"training.report_to is {service}, which is not installed", fix=f"pip install 'medusa-train[{service}]'"
            )


def training_arguments(recipe: Recipe, run: RunFolder, *, has_heldout: bool, base_dtype: Any) -> Any:
    """transformers.TrainingArguments for this recipe.

    Mixed precision follows the backbone's dtype unless the recipe sets bf16 or fp16. With cached hidden states
    `per_device_train_batch_size` counts supervised positions, otherwise packed rows.
    """
    import torch
    from transformers import TrainingArguments

    cuda = torch.cuda.is_available()
    values: dict[str, Any] = {
        "per_device_train_batch_size": 2048 if uses_cache(recipe) else 8,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 0.05,
        "logging_steps": 10,
        "save_strategy": "steps",
        "save_steps": TENTH,
        "eval_strategy": "steps" if has_heldout else "no",
        "eval_steps": TENTH,
        "report_to": "none",
        "project": "medusa-train",
        "seed": 0,
        "dataloader_pin_memory": cuda,
        "ddp_find_unused_parameters": False,
        **recipe.training,
    }
    # A pinned batch is copied without waiting for the step before it.
    pinned = cuda and values["dataloader_pin_memory"] and not values.get("use_cpu")
    values.setdefault("accelerator_config", {"non_blocking": bool(pinned)})
    if "bf16" not in values and "fp16" not in values:
        # accelerate ignores fp16 on a CPU; there the products of a half-precision base's heads run in fp32.
        values["bf16"], values["fp16"] = base_dtype == torch.bfloat16, base_dtype == torch.float16 and cuda
    if values.get("fp16") and (not cuda or values.get("use_cpu")):
        raise UserError(
            "training.fp16 needs a GPU",
            allowed="bf16 or neither on a CPU",
            fix="training.bf16=true training.fp16=false",
        )
    if values.pop("logging_nan_inf_filter", False):
        raise UserError(
            "training.logging_nan_inf_filter would hide a loss that is not finite, which ends the run here",
            where="recipe",
            allowed="false",
            fix="leave it out",
        )
    check_services(values["report_to"])
    if not cuda:
        values.setdefault("use_cpu", True)
    for name in SWITCHES:  # see compiling.py
        values.pop(name, None)
    values |= {
        "output_dir": str(run.state),
        "remove_unused_columns": False,
        "label_names": ["labels"],
        "logging_nan_inf_filter": False,  # a NaN is an error, not a gap in a curve
        "disable_tqdm": True,
    }
    if not has_heldout and values["eval_strategy"] != "no":
        raise UserError(
            "training.eval_strategy is set, and there are no held-out rows",
            fix="give data.heldout, or a data.heldout_fraction above 0",
        )
    os.environ.setdefault("WANDB_DIR", str(run.path))
    os.environ.setdefault("WANDB_PROJECT", "medusa-train")
    os.environ.setdefault("TRACKIO_DIR", str(run.path / "trackio"))
    os.environ.setdefault("TENSORBOARD_LOGGING_DIR", str(run.path / "tensorboard"))
    try:
        arguments = TrainingArguments(**values)
    except (TypeError, ValueError, ImportError) as error:
        raise UserError(f"training: {error}", where="recipe") from error
    if arguments.n_gpu > 1:
        # One process that sees several GPUs would become nn.DataParallel, which cuts batches along their first axis:
        # labels [C, M] along the channels. A process trains on one device; several devices are several processes.
        arguments._n_gpu = 1
    return arguments
