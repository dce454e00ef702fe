"""The bounds on how far training may move the ordinary head: refused before training, checked at every held-out check
and once more on what is about to be stored."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from medusa_train.config.recipe import DriftSection, HeadsOnly, Recipe
from medusa_train.console import say
from medusa_train.errors import UserError


def check_bounds_apply(recipe: Recipe, has_heldout: bool) -> None:
    """Before training: drift is measured on held-out rows, so without them a bound would be one in name only.

    Says in a line that nothing is bounded where the bounds are the defaults.

    Raises:
        UserError: the recipe itself sets a bound, and there are no held-out rows.
    """
    if has_heldout or isinstance(recipe.policy, HeadsOnly):
        return
    bounds = recipe.policy.drift
    usual = DriftSection().model_dump()  # a dumped recipe names its defaults too
    named = sorted(name for name, value in bounds.model_dump().items() if value is not None and value != usual[name])
    if named:
        raise UserError(
            "drift is bounded, and there are no held-out rows to measure it on",
            where=", ".join(f"policy.drift.{name}" for name in named),
            fix="give data.heldout or a larger data.heldout_fraction; "
            + " ".join(f"policy.drift.{name}=null" for name in named)
            + " trains without a bound",
        )
    if any(value is not None for value in bounds.model_dump().values()):
        say("note: no rows are held out, so nothing bounds how far the ordinary head drifts")


def check_drift(bounds: DriftSection, metrics: Mapping[str, float], where: str, prefix: str = "") -> None:
    """Fails where held-out metrics are past a bound; a bounded figure that is not finite is past it.

    Args:
        metrics: with {prefix}drift_ce and {prefix}drift_kl (nats per token) and {prefix}drift_top1_agreement (0..1);
            without them nothing is checked.

    Raises:
        UserError: naming every bound that does not hold, at `where`.
    """
    if f"{prefix}drift_ce" not in metrics:
        return
    ce, kl, same = (float(metrics[f"{prefix}drift_{name}"]) for name in ("ce", "kl", "top1_agreement"))
    most_ce, most_kl, least = bounds.max_ce_increase, bounds.max_kl, bounds.min_top1_agreement
    problems = []
    if most_ce is not None and not (math.isfinite(ce) and ce <= most_ce):
        problems.append(f"CE rose by {ce:.4f} nats (max_ce_increase {most_ce})")
    if most_kl is not None and not (math.isfinite(kl) and kl <= most_kl):
        problems.append(f"KL is {kl:.4f} (max_kl {most_kl})")
    if least is not None and not (math.isfinite(same) and same >= least):
        problems.append(f"top-1 agreement is {same:.3f} (min_top1_agreement {least})")
    if problems:
        raise UserError(
            "the ordinary head drifted too far on held-out rows: " + "; ".join(problems),
            where=where,
            fix="lower the learning rate or policy.medusa_weight, use self_distill, or widen policy.drift",
        )


class DriftCallback(TrainerCallback):
    """Fails the run at the held-out check where the ordinary head moved further than the recipe allows."""

    def __init__(self, bounds: DriftSection) -> None:
        self.bounds = bounds

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, metrics: Any = None, **_: Any
    ) -> None:
        check_drift(self.bounds, metrics, f"step {state.global_step}", "eval_")
