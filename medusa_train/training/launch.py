"""Joining a launcher, or becoming one: `fit` uses every visible GPU without being told how."""

from __future__ import annotations

import json
import logging
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from medusa_train.console import console, say
from medusa_train.errors import UserError

ERRORS = "MEDUSA_TRAIN_RANK_ERRORS"  # a folder in which ranks leave word of why they end
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
    words = ["fit", "--recipe", str(recipe), *(["--restart"] if restart else []), *overrides]
    say(f"launching {count} processes")
    with tempfile.TemporaryDirectory(prefix="medusa-train-ranks-") as folder:
        os.environ[ERRORS] = folder
        try:
            code = _launch(count, words, gpu=gpus > 0)
        finally:
            del os.environ[ERRORS]
        if code:
            raise SystemExit(_tell(Path(folder), code))
    return True


def _launch(count: int, words: Sequence[str], gpu: bool) -> int:
    """Runs `python -m medusa_train WORDS` in `count` processes with torch's elastic agent (accelerate's own too).

    Returns:
        0, or the exit code of the first process that failed; negative: the signal that ended it.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    logging.disable(logging.CRITICAL)  # the agent's own tale of a failed process; this process logs nothing else
    try:
        if gpu:
            from accelerate.commands.launch import launch_command, launch_command_parser

            launch_command(launch_command_parser().parse_args(
                ["--num_processes", str(count), "--num_machines", "1", "--mixed_precision", "no",
                 "--dynamo_backend", "no", "--multi_gpu", "--module", "medusa_train", *words]
            ))  # fmt: skip
        else:
            # accelerate starts one process on a CPU, whatever it is asked; its agent underneath starts what it is told.
            from torch.distributed import run

            run.run(run.parse_args(["--standalone", "--nproc-per-node", str(count), "-m", "medusa_train", *words]))
    except ChildFailedError as error:
        return error.get_first_failure()[1].exitcode
    except SignalException as stop:
        return 128 + int(stop.sigval)
    finally:
        logging.disable(logging.NOTSET)
    return 0


def leave_word(text: str, code: int) -> bool:
    """A rank tells the process that launched it why it ends; False where nobody there would listen.

    Args:
        text: what a person will read.
        code: 2 for their mistake, 1 for a defect with its traceback.
    """
    rank = os.environ.get("RANK", "0")
    if ERRORS in os.environ:
        word = {"rank": int(rank), "at": time.time(), "text": text, "code": code}
        Path(os.environ[ERRORS], f"{rank}.json").write_text(json.dumps(word))
        return True
    if not is_main():
        # Under someone else's launcher: the first rank mostly has the same to say, and then this one is ended first.
        time.sleep(2.0)
        console().quiet = False
    return False


def _tell(folder: Path, code: int) -> int:
    """Prints why the ranks failed, once: a person's mistake before a defect, the earliest of each; the exit code."""
    if code in (128 + 2, 128 + 15):
        return 130
    words = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    if not words:
        reason = f"was ended by signal {-code} (9: often memory)" if code < 0 else f"ended with exit code {code}"
        say(f"error: a training process {reason}\n  to mend it: the same command goes on from the last checkpoint")
        return 1
    first = min(words, key=lambda word: (-word["code"], word["at"]))
    # All ranks meet the same mistake at about the same time; it is no matter of one of them then.
    alone = sum(word["text"] == first["text"] for word in words) == 1
    say(f"rank {first['rank']}: {first['text']}" if alone else first["text"])
    return first["code"]
