"""Weights sharded over ranks (FSDP2, ZeRO): what the library leaves to us.

- accelerate knows FSDP on accelerators only: on CPU ranks `fsdp: true` would silently be DDP. Here it is FSDP2 there
  too (gloo), so that what is tested on a CPU is what runs on GPUs.
- The library's own FSDP and DeepSpeed checkpoints hold the whole backbone. Ours hold trainable tensors and the
  optimizer's shards.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor


def shard_on_cpu(accelerator: Any, plugin: Any) -> None:
    """Makes accelerate's state of several CPU ranks one of FSDP2, as it does by itself for GPUs."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    state = accelerator.state
    if accelerator.mixed_precision != "no":
        plugin.set_mixed_precision(accelerator.mixed_precision)
    state.fsdp_plugin = plugin
    state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP


def save_fsdp_run(trainer: Any, folder: str) -> None:
    """Optimizer and schedule of an FSDP run; the tensors lie in `trainable.safetensors` already."""
    from accelerate.utils import save, save_fsdp_optimizer
    from transformers.trainer import SCHEDULER_NAME

    plugin = trainer.accelerator.state.fsdp_plugin
    save_fsdp_optimizer(plugin, trainer.accelerator, trainer.optimizer, trainer.model, folder)
    if trainer.args.should_save:
        save(trainer.lr_scheduler.state_dict(), str(Path(folder) / SCHEDULER_NAME))


def own_part(whole: Tensor, parameter: Tensor) -> Tensor:
    """What of a whole tensor belongs into this rank's `parameter`: all of it, or its shard."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(parameter, DTensor):
        return whole
    # Every rank has read the whole tensor itself: nothing is sent.
    device = parameter.to_local().device
    return distribute_tensor(whole.to(device), parameter.device_mesh, parameter.placements, src_data_rank=None)


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
