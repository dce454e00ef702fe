"""What a run held at its height, to be laid beside what was planned."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from medusa_train.allocator import give_back_freed

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass
class MemoryMeter:
    """Bytes of tensors at the height of what runs between `begin` and `peak`.

    On an accelerator torch counts. On a CPU the kernel does (Linux): the tensors that live at `begin`, by their sizes,
    and the rise of resident memory above that. Pages of mapped files (weights, cached hidden states, libraries that
    are loaded late) are the page cache's and are left out of the rise.
    """

    device: torch.device
    _held: int = 0
    _before: dict[str, int] | None = None

    def begin(self, living: Iterable[Tensor]) -> None:
        """Counts from here; `living` are the tensors of the run that exist already."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        storages = {local.data_ptr(): local.nbytes for local in map(_local, living)}
        self._held = sum(storages.values())
        give_back_freed()
        try:
            CLEAR.write_text("5")  # the high-water mark starts anew (proc(5))
            self._before = resident()
        except OSError:
            self._before = None

    def peak(self) -> int | None:
        """Bytes, or None where the system does not tell."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return None if self._before is None else self._count("VmHWM")

    def give_back_above(self, limit: int) -> None:
        """Gives freed memory back where this process holds more than `limit` bytes (CPU only)."""
        if self._before is not None and self._count("VmRSS") > limit:
            give_back_freed()

    def _count(self, kind: str) -> int:
        now = resident()
        mapped = max(0, now["RssFile"] - self._before["RssFile"])
        return self._held + now[kind] - self._before["VmRSS"] - mapped


class MemoryCallback(TrainerCallback):
    """Meters train(): `peak` holds the bytes at its height once it has ended.

    On a CPU it also keeps freed memory in bounds. Activations of batches of ever other lengths leave gaps in the heap
    that the next ones do not fit into: a LoRA run on SmolLM2 that needed 2.6 GiB grew to 10 in 40 steps.

    Attributes:
        expected: bytes that a step needs, as planned; what is held above that between steps is given back. None where
            nothing is kept for a backward pass through the backbone: giving back costs the next step time.
    """

    def __init__(self, device: torch.device) -> None:
        self.meter, self.peak, self.expected = MemoryMeter(device), None, None

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        optimizer: Any = None,
        **_: Any,
    ) -> None:
        self.meter.begin(living_tensors(model, optimizer))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self.expected is not None:
            self.meter.give_back_above(self.expected)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.peak = self.meter.peak()


def living_tensors(model: nn.Module, optimizer: Any) -> list[Tensor]:
    """Weights, buffers, and what a resumed optimizer has already."""
    states = getattr(optimizer, "state", {}).values()
    found = [*model.parameters(), *model.buffers()]
    return found + [value for state in states for value in state.values() if isinstance(value, Tensor)]


def resident() -> dict[str, int]:
    """Bytes of this process by the kernel's names: VmRSS (now), VmHWM (its height), RssFile (mapped files).

    Raises:
        OSError: there is no /proc.
    """
    lines = (line.split() for line in STATUS.read_text().splitlines())
    return {words[0].removesuffix(":"): int(words[1]) * 1024 for words in lines if words[0].startswith(("Vm", "Rss"))}


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor.detach()
