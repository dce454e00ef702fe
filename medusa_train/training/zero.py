"""DeepSpeed (ZeRO): what the library leaves to us.

DeepSpeed resumes from files of its own, and those hold the module's whole state dict: under ZeRO-2 the frozen backbone
as well. `exclude_frozen_parameters` leaves out frozen parameters, but under one name each (a tied lm_head stays), and
what it wrote is then refused by the strict loading of everything that is no PeftModel. So the module itself says, by
torch's hooks, what of it a checkpoint holds and what may miss in one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from medusa_train.errors import UserError
from medusa_train.training.state import plain_name


def fill_deepspeed(arguments: Any, hidden_size: int) -> None:
    """Gives the `auto` sizes of a DeepSpeed config their numbers.

    The library reads hidden_size from `model.config`; what trains here is no transformers model and has none. The
    formulas are the library's own (transformers, integrations/deepspeed.py, trainer_config_finalize).
    """
    config = getattr(arguments, "hf_deepspeed_config", None)
    if config is None:
        return
    sizes = {"reduce_bucket_size": hidden_size * hidden_size}
    if config.is_zero3():
        sizes["stage3_prefetch_bucket_size"] = int(0.9 * hidden_size * hidden_size)
        sizes["stage3_param_persistence_threshold"] = 10 * hidden_size
    for name, size in sizes.items():
        config.fill_only(f"zero_optimization.{name}", size)


def leave_frozen_out(model: nn.Module) -> None:
    """From now on the module's state dict holds trainable parameters only, and loading one wants exactly those."""
    model.register_state_dict_post_hook(_drop_frozen)
    model.register_load_state_dict_post_hook(_frozen_may_miss)


def _trainable_names(model: nn.Module) -> set[str]:
    """All names of trainable parameters: a tied one has several."""
    named = model.named_parameters(remove_duplicate=False)
    return {plain_name(name) for name, parameter in named if parameter.requires_grad}


def _drop_frozen(model: nn.Module, state: dict[str, Tensor], prefix: str, _: Any) -> None:
    wanted = _trainable_names(model)
    for name in list(state):
        if name.startswith(prefix) and plain_name(name.removeprefix(prefix)) not in wanted:
            del state[name]


def _frozen_may_miss(model: nn.Module, found: Any) -> None:
    """Called by torch before a strict load complains about `found.missing_keys` and `found.unexpected_keys`.

    Raises:
        UserError: a trainable parameter misses, or there is one that the model does not have.
    """
    wanted = _trainable_names(model)
    odd = [name for name in found.missing_keys if plain_name(name) in wanted] + found.unexpected_keys
    if odd:
        raise UserError(f"the saved state does not fit: {odd[:3]} on one side only", fix="begin anew with --restart")
    found.missing_keys.clear()


def save_deepspeed_run(trainer: Any, folder: str) -> None:
    """Optimizer shards, trainable tensors and schedule of a DeepSpeed run; called by every rank."""
    from accelerate.utils import DeepSpeedSchedulerWrapper, save
    from transformers.trainer import SCHEDULER_NAME

    trainer.model_wrapped.save_checkpoint(folder, exclude_frozen_parameters=True)
    # A schedule of DeepSpeed's own lies in its files.
    if trainer.args.should_save and not isinstance(trainer.lr_scheduler, DeepSpeedSchedulerWrapper):
        save(trainer.lr_scheduler.state_dict(), str(Path(folder) / SCHEDULER_NAME))
