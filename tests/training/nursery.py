"""Forks the command line, once per line of stdin (words, tab-separated): the imports are paid once, not per process.

Answers with the child's pid when it starts and with its exit code when it is gone. A child is a process of its own with
nothing done in it but imports, so killing it is killing the command.
"""

from __future__ import annotations

import os
import sys

import peft  # noqa: F401
from transformers import LlamaForCausalLM, Trainer  # noqa: F401

import medusa_train.cli.fit
import medusa_train.decoding.replay
import medusa_train.decoding.search
import medusa_train.training.fit  # noqa: F401
from medusa_train.cli.app import main


def run(words: list[str]) -> None:
    """The command line with `words`, in this process, to its end."""
    code = 1
    try:
        sys.argv = ["medusa-train", *words]
        sys.stdin.close()
        main()
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            run(line.rstrip("\n").split("\t"))
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
