"""torch.compile of a backbone, block by block.

The library compiles the whole model that it trains: thirty unrolled layers, and here a loss that computes its own
gradient. One decoder layer compiled in place serves all its siblings, in an eighth of the time (12 s against 93 s for
SmolLM2-135M on two cores), renames nothing and leaves heads and loss alone. As in torchtitan.
"""

from __future__ import annotations

import os
import shutil
from typing import Any

import torch
from torch import nn

from medusa_train.console import say
from medusa_train.errors import UserError, unknown_name

# TrainingArguments' own switches: they would have the library compile the whole as well.
SWITCHES = ("torch_compile", "torch_compile_backend", "torch_compile_mode")


def compile_blocks(model: nn.Module, training: dict[str, Any]) -> int:
    """Compiles the transformers model's repeated blocks in place, where `training` asks for it; their number.

    Nothing is compiled before the first forward. Other shapes than the first compile once more, then with sizes left
    open.

    Raises:
        UserError: there is no such backend or mode, or no C++ compiler that the backend needs.
    """
    wanted, backend, mode = (training.get(name) for name in SWITCHES)
    if not (wanted or backend or mode):
        return 0
    backend = backend or "inductor"
    known = torch.compiler.list_backends(exclude_tags=())
    if backend not in known:
        raise unknown_name("training.torch_compile_backend", backend, known)
    _check_compiler(backend, next(model.parameters()).device)
    names = set(getattr(model, "_no_split_modules", None) or ())
    blocks = [module for module in model.modules() if type(module).__name__ in names]
    try:
        for block in blocks:
            block.compile(backend=backend, mode=mode)
    except RuntimeError as error:  # torch's words for an unknown mode name those that there are
        raise UserError(f"training.torch_compile_mode: {error}") from error
    say(f"{len(blocks)} blocks of the backbone will be compiled ({backend}) at the first step")
    return len(blocks)


def _check_compiler(backend: str, device: torch.device) -> None:
    if backend != "inductor" or device.type != "cpu" or os.environ.get("CXX"):
        return
    if not any(map(shutil.which, ("g++", "clang++", "c++"))):
        raise UserError(
            "training.torch_compile needs a C++ compiler on a CPU, and there is none",
            fix="install g++, or training.torch_compile=false",
        )
