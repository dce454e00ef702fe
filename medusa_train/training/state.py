"""The run folder: what lies in it, what may be resumed, and writing trainable tensors.

<output_dir>.run/recipe.json          the resolved recipe; a run is only ever continued under the same one
<output_dir>.run/state/checkpoint-N/  trainable tensors, optimizer, schedule, RNG; whole once COMPLETE lies in it
<output_dir>.run/best/                the tensors of the best held-out check
<output_dir>.run/cache/               hidden states
<output_dir>.run/log.jsonl            one line per log entry
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from medusa_train.checkpoint import tensorfile
from medusa_train.config.load import diff_recipes
from medusa_train.config.recipe import Recipe
from medusa_train.errors import UserError
from medusa_train.provenance import fsync_folder, write_atomic
from medusa_train.training.sharding import own_part, whole_tensor

COMPLETE = "COMPLETE"
TENSORS = "trainable.safetensors"
CURVES = ("wandb", "tensorboard", "trackio")  # folders of theirs in a run folder


@dataclass(frozen=True)
class RunFolder:
    """The folder beside a checkpoint that holds a run's state."""

    path: Path

    @classmethod
    def of(cls, recipe: Recipe) -> RunFolder:
        """`<output_dir>.run`."""
        output = Path(recipe.output_dir).expanduser()
        return cls(output.with_name(output.name + ".run"))

    @property
    def state(self) -> Path:
        """Where the Trainer's checkpoints lie."""
        return self.path / "state"

    @property
    def best(self) -> Path:
        """The best tensors so far."""
        return self.path / "best"

    @property
    def log(self) -> Path:
        """Log entries, one JSON object a line."""
        return self.path / "log.jsonl"

    @property
    def finished(self) -> Path:
        """Written once the checkpoint of this recipe is in place."""
        return self.path / "finished.json"

    def open(self, recipe: Recipe, restart: bool) -> None:
        """Makes the folder for this recipe, or checks that it is this recipe's.

        What an earlier run left that had nothing to go on from is removed, its best tensors and its log included.
        Bounds on drift steer nothing: a run that was stopped by one goes on under another.

        Raises:
            UserError: it holds the run of another recipe; what differs is shown.
        """
        saved = self.path / "recipe.json"
        if restart:
            self._clear()
            saved.unlink(missing_ok=True)
        try:
            old = json.loads(saved.read_text())
        except FileNotFoundError:
            old = None
        begun = self.last_whole() is not None or self.finished.is_file()
        differences = [] if old is None else diff_recipes(_without_bounds(old), _without_bounds(recipe.resolved()))
        if differences and begun:
            raise UserError(
                "this run was begun with another recipe: " + "; ".join(differences),
                where=str(self.path),
                fix="train into another output_dir, or begin anew with --restart",
            )
        if old is not None and not begun:
            # It never got to a checkpoint, and may have been another recipe's: nothing of it is this run's.
            self._clear()
        self.path.mkdir(parents=True, exist_ok=True)
        write_atomic(saved, json.dumps(recipe.resolved(), indent=2) + "\n")

    def _clear(self) -> None:
        """Removes what a run made; hidden states stay, they know themselves what they were made from."""
        for part in (self.state, self.best, *(self.path / name for name in CURVES)):
            shutil.rmtree(part, ignore_errors=True)
        for file in (self.finished, self.log):
            file.unlink(missing_ok=True)

    def last_whole(self) -> Path | None:
        """The newest checkpoint that was written to its end, or None."""
        found = []
        for folder in self.state.glob("checkpoint-*"):
            if (folder / COMPLETE).is_file():
                found.append(folder)
        return max(found, key=lambda folder: int(folder.name.rsplit("-", 1)[1]), default=None)

    def remove_torn(self) -> None:
        """Removes checkpoints whose writing was cut off."""
        for folder in self.state.glob("checkpoint-*"):
            if not (folder / COMPLETE).is_file():
                shutil.rmtree(folder, ignore_errors=True)

    def remove_old(self, keep: int) -> None:
        """Removes all but the newest `keep` checkpoints; one is no longer whole before anything of it goes."""
        folders = sorted(self.state.glob("checkpoint-*"), key=lambda folder: int(folder.name.rsplit("-", 1)[1]))
        for folder in folders[:-keep]:
            (folder / COMPLETE).unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The trainable parameters by the names they have without wrappers (torch.compile, activation checkpointing)."""
    return {plain_name(name): parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def plain_name(name: str) -> str:
    """A tensor's name without what wrappers put into it."""
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def trainable_tensors(model: nn.Module, keep: bool = True) -> dict[str, Tensor]:
    """The trainable tensors of a module, whole, by name, on the CPU.

    Where weights are sharded every rank must call it at the same point, and all of them gather one tensor after the
    other; with `keep` false a rank does its part and returns {}.
    """
    parameters = trainable_parameters(model)
    # Under FSDP2 this also shards again what a forward left whole.
    stored = {plain_name(name): tensor for name, tensor in model.state_dict().items()}
    missing = sorted(parameters.keys() - stored.keys())
    if missing:
        raise RuntimeError(f"the model's state holds no {missing[0]}")
    found = {}
    for name in sorted(parameters):
        whole = whole_tensor(stored[name], parameters[name])
        if keep:
            found[name] = whole.detach().to("cpu").contiguous()
    return found


def write_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Writes `trainable.safetensors`, whole or not at all; empty tensors (a sharding not gathered) are refused.

    Raises:
        OSError: the disk is full, or refuses.
    """
    empty = [name for name, tensor in tensors.items() if tensor.numel() == 0]
    if empty:
        raise RuntimeError(f"{empty[0]} is empty: the weights were not gathered before saving")
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{TENSORS}.partial"
    # Names that share memory (a tied weight) are written once each; safetensors wants memory of their own.
    own = {name: tensor.clone() if tensor._base is not None else tensor for name, tensor in tensors.items()}
    tensorfile.write_tensors(temporary, own)
    temporary.replace(folder / TENSORS)
    fsync_folder(folder)


@torch.no_grad()
def read_tensors(folder: Path, model: nn.Module) -> None:
    """Copies the tensors of `folder` into the module's trainable parameters; names and shapes must be the same."""
    stored = load_file(folder / TENSORS, device="cpu")
    wanted = trainable_parameters(model)
    if stored.keys() != wanted.keys():
        raise UserError(
            f"the saved state does not fit: {sorted(stored.keys() ^ wanted.keys())[:3]} on one side only",
            where=str(folder),
        )
    for name, parameter in wanted.items():
        if parameter.shape != stored[name].shape:
            raise UserError(
                f"{name} is {list(stored[name].shape)}, the model needs {list(parameter.shape)}", where=str(folder)
            )
        parameter.copy_(own_part(stored[name], parameter))


def append_log(path: Path, entry: dict[str, Any]) -> None:
    """One line of the run's log."""
    with open(path, "a", encoding="utf-8") as handle:
        handle.write(json.dumps(entry) + "\n")


def _without_bounds(resolved: dict[str, Any]) -> dict[str, Any]:
    """A resolved recipe without what steers nothing, the bounds on drift."""
    policy = {name: value for name, value in resolved["policy"].items() if name != "drift"}
    return {**resolved, "policy": policy}
