"""Weights sharded over ranks: FSDP2 as the library leaves it to us, and tensors in shards (ZeRO-3's too) and whole.

- accelerate knows FSDP on accelerators only: on CPU ranks `fsdp: true` would silently be DDP. Here it is FSDP2 there
  too (gloo), so that what is tested on a CPU is what runs on GPUs.
- The library's own FSDP checkpoints hold the whole backbone. Ours hold trainable tensors and the optimizer's state.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn


def shard_on_cpu(accelerator: Any, plugin: Any) -> None:
    """Makes accelerate's state of several CPU ranks one of FSDP2, as it does by itself for GPUs."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    state = accelerator.state
    state.fsdp_plugin = plugin
    state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP


def mixed_precision(bf16: bool) -> Any:
    """FSDP2's policy: half-precision products, gradients summed over ranks in fp32, outputs as the module makes them.

    accelerate's own casts outputs and reduces in bf16 as well. Loss sums would lose all but 8 of their bits (699.4
    became 700), and each gradient would be rounded once a rank. Inputs keep their dtype: some are weights of the loss.
    """
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy

    dtype = torch.bfloat16 if bf16 else torch.float16
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)


def shard_again(model: nn.Module) -> None:
    """FSDP2 leaves the root's weights whole after a forward without backward: copies into them would be lost."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def save_fsdp_run(trainer: Any, folder: str) -> None:
    """Optimizer and schedule of an FSDP run; the tensors lie in `trainable.safetensors` already."""
    from accelerate.utils import save, save_fsdp_optimizer
    from transformers.trainer import SCHEDULER_NAME

    plugin = trainer.accelerator.state.fsdp_plugin
    save_fsdp_optimizer(plugin, trainer.accelerator, trainer.optimizer, trainer.model, folder)
    if trainer.args.should_save:
        save(trainer.lr_scheduler.state_dict(), str(Path(folder) / SCHEDULER_NAME))


def of_first_rank(value: Any) -> Any:
    """The first rank's value, on every rank; for what all must decide alike. Every rank calls it."""
    from accelerate.utils import broadcast_object_list

    return broadcast_object_list([value])[0]


def own_part(whole: Tensor, parameter: Tensor) -> Tensor:
    """What of a whole tensor belongs into this rank's `parameter`: all of it, or its shard."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(parameter, DTensor):
        return whole
    # Every rank has read the whole tensor itself: nothing is sent.
    device = parameter.to_local().device
    return distribute_tensor(whole.to(device), parameter.device_mesh, parameter.placements, src_data_rank=None)


def whole_tensor(stored: Tensor, parameter: nn.Parameter) -> Tensor:
    """All of a parameter, of which this rank may hold a shard; every rank must ask for it at the same point.

    Args:
        stored: what the model's state dict has for it (a DTensor under FSDP2, empty under ZeRO-3).
        parameter: the parameter itself; ZeRO-3 gathers that.
    """
    from torch.distributed.tensor import DTensor

    if isinstance(stored, DTensor):
        # Shards that are offloaded to the CPU travel over the ranks' own devices.
        return stored.to(stored.device_mesh.device_type).full_tensor()
    if hasattr(parameter, "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().clone()  # its memory goes where the block ends
    return stored
