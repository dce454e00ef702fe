"""Joining a launcher, or becoming one: `fit` uses every visible GPU without being told how."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from medusa_train.console import console, say
from medusa_train.errors import UserError

LAUNCHED = ("LOCAL_RANK", "ACCELERATE_MIXED_PRECISION", "TORCHELASTIC_RUN_ID")


def under_launcher() -> bool:
    """Whether some launcher (torchrun, accelerate, ours) started this process."""
    return any(name in os.environ for name in LAUNCHED)


def is_main() -> bool:
    """Whether this process is the first of all ranks."""
    return int(os.environ.get("RANK", "0")) == 0


def meet() -> None:
    """Waits for all ranks, where there are several; ranks other than the first say nothing from then on."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return
    import torch
    from accelerate import PartialState

    console().quiet = not is_main()
    PartialState(cpu=not torch.cuda.is_available()).wait_for_everyone()


def launch_if_needed(recipe: Path, overrides: Sequence[str], *, restart: bool, nproc: int | None, launch: bool) -> bool:
    """Starts `fit` in several processes where that is wanted; returns True where it did (and they are done).

    Raises:
        UserError: more processes than GPUs; the processes failed.
    """
    if under_launcher() or not launch:
        return False
    import torch

    gpus = torch.cuda.device_count()
    count = nproc if nproc is not None else max(1, gpus)
    if gpus and count > gpus:
        raise UserError(f"--nproc {count} and {gpus} visible GPUs", allowed=f"1..{gpus}")
    if count == 1:
        return False
    words = ["-m", "medusa_train", "fit", "--recipe", str(recipe), *(["--restart"] if restart else []), *overrides]
    say(f"launching {count} processes")
    code = _launch(count, words, gpu=gpus > 0)
    if code:
        raise SystemExit(code)
    return True


def _launch(count: int, words: Sequence[str], gpu: bool) -> int:
    """Runs `python WORDS` in `count` processes with torch's elastic agent (what `accelerate launch` uses itself)."""
    if gpu:
        from accelerate.commands.launch import launch_command, launch_command_parser

        arguments = launch_command_parser().parse_args(
            ["--num_processes", str(count), "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no",
             "--multi_gpu", "--module", *words[1:]]
        )  # fmt: skip
        launch_command(arguments)
        return 0
    # accelerate starts one process on a CPU, whatever it is asked; its agent underneath starts as many as asked.
    import subprocess

    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count), *words]
    return subprocess.run(command, check=False).returncode
