"""torch.compile of a backbone, block by block.

The library compiles the whole model that it trains: thirty unrolled layers, and here a loss that computes its own
gradient. One decoder layer compiled in place serves all its siblings, in an eighth of the time (12 s against 93 s for
SmolLM2-135M on two cores), renames nothing and leaves heads and loss alone. As in torchtitan.
"""

from __future__ import annotations

import os
import shutil
import sys
from typing import Any

import torch
from torch import nn

from medusa_train.console import say
from medusa_train.errors import UserError, unknown_name
from medusa_train.modeling.backbone import decoder_of

# TrainingArguments' own switches, any of which turns it on: they would have the library compile the whole as well.
SWITCHES = ("torch_compile", "torch_compile_backend", "torch_compile_mode")
# One code object serves all blocks, with and without gradients, masks and adapters; past torch's own limit of 8
# variants the rest would run uncompiled, with a word in the log only.
VARIANTS = 64


def compile_blocks(model: nn.Module, training: dict[str, Any]) -> list[nn.Module]:
    """Compiles the decoder's layers in place, where `training` asks for it; the layers.

    Nothing is compiled before their first forward. Sizes are left open from the start: bins differ in length, and a run
    that is resumed should run what the uninterrupted one ran. The layers stay compiled as long as the model lives.

    Raises:
        UserError: there is no such backend or mode, no compiler that the backend needs, no layers, or DeepSpeed.
    """
    wanted, backend, mode = (training.get(name) for name in SWITCHES)
    if not (wanted or backend or mode):
        return []
    if training.get("deepspeed"):
        raise UserError(
            "torch_compile does not go with deepspeed, whose hooks around every layer break what is compiled",
            where="training.torch_compile",
            fix="FSDP2 (recipes/medusa2-fsdp2.yaml), or leave training.torch_compile out",
        )
    backend, blocks = backend or "inductor", _layers(model)
    known = torch.compiler.list_backends(exclude_tags=())
    if backend not in known:
        raise unknown_name("training.torch_compile_backend", backend, known)
    torch._dynamo.config.recompile_limit = max(VARIANTS, torch._dynamo.config.recompile_limit)
    try:
        for block in blocks:
            block.compile(backend=backend, mode=mode, dynamic=True)
    except RuntimeError as error:  # torch's words for an unknown mode name those that there are
        raise UserError(f"training.torch_compile_mode: {error}") from error
    if backend == "inductor":
        _check_compiler(next(model.parameters()).device)
    say(f"{len(blocks)} layers of the backbone will be compiled ({backend}) when they are first run")
    return blocks


def _layers(model: nn.Module) -> list[nn.Module]:
    decoder, names = decoder_of(model), set(getattr(model, "_no_split_modules", None) or ())
    lists = (list(child) for child in decoder.children() if isinstance(child, nn.ModuleList))
    found = [module for module in decoder.modules() if type(module).__name__ in names] or next(lists, [])
    if not found:
        raise UserError(
            f"{type(decoder).__name__} has no list of layers to compile", fix="leave training.torch_compile out"
        )
    return found


def _check_compiler(device: torch.device) -> None:
    """What inductor calls: $CXX or g++ (clang++ on a Mac) for CPUs, a C compiler for Triton's launchers."""
    if device.type == "cpu":
        wanted = [os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")]
    else:
        wanted = [os.environ["CC"]] if os.environ.get("CC") else ["gcc", "clang"]
    if not any(map(shutil.which, wanted)):
        raise UserError(
            f"training.torch_compile needs a compiler, and there is no {' or '.join(wanted)}",
            fix=f"install {wanted[0]}, or leave training.torch_compile out",
        )
