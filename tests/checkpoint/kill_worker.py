"""Run as a program: saves over a checkpoint in forked children that are killed (SIGKILL) at every single step.

A step is an audit event of the interpreter (every open, rename, link, mkdir, remove, listing, foreign call), so no hook
in the code under test decides where it may die. After each death the folder must load, hashes and all, as the old
checkpoint or the new one. Usage: python -m tests.checkpoint.kill_worker FOLDER save|tree|merged exchange|renames|copies
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch

from medusa_train.checkpoint import atomic, load_checkpoint, store_tree
from tests.checkpoint.support import TREE, random_heads, save_toy, states_equal

EVENTS = ("open", "os.", "shutil.", "ctypes.", "mmap.")
NEW_TREE = {"format": 1, "paths": [[0], [1], [2]], "method": "joint"}


def write(folder: Path, what: str, seed: int) -> None:
    if what == "tree":
        store_tree(folder, NEW_TREE if seed % 2 else TREE)
    elif what == "merged":
        save_toy(folder, random_heads(seed=seed), policy="joint", merged=folder.parent / "model")
    else:
        save_toy(folder, random_heads(seed=seed))


def child(folder: Path, what: str, seed: int, deadline: int) -> None:
    seen = 0

    def count(event: str, _: tuple) -> None:
        nonlocal seen
        if event.startswith(EVENTS):
            seen += 1
            if seen == deadline:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    write(folder, what, seed)
    os._exit(0)


def state_of(folder: Path, what: str) -> int:
    """Parity of the seed that wrote what stands there; an exception where it is not whole."""
    loaded = load_checkpoint(folder, verify="hashes")
    if what == "tree":
        return [TREE, NEW_TREE].index(loaded.tree)
    return [states_equal(loaded.heads, random_heads(seed=seed)) for seed in (0, 1)].index(True)


def make_model(folder: Path) -> None:
    """A stand-in for changed weights: what matters here is that it is one more folder of files."""
    from safetensors.torch import save_file

    folder.mkdir()
    save_file({"w": torch.arange(6.0)}, folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "llama"}')


def main() -> None:
    folder, what, swap = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    torch.set_num_threads(1)
    if swap != "exchange":
        atomic._exchange = lambda *_: False
    if swap == "copies":
        os.link = lambda *_: (_ for _ in ()).throw(OSError("no hard links here"))
    make_model(folder.parent / "model")
    write(folder, "save" if what == "tree" else what, 0)
    step, old, survived = 0, 0, 0
    while True:
        step += 1
        process = os.fork()
        if process == 0:
            child(folder, what, 1 - old, step)
        _, status = os.waitpid(process, 0)
        now = state_of(folder, what)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0, "the writer failed by itself"
            assert now == 1 - old, "an undisturbed save did not arrive"
            break
        survived += now == old
        if now != old:
            old = now  # killed after the swap: the new one stands there, whole
    left = sorted(entry for entry in os.listdir(folder.parent) if entry not in (folder.name, "model"))
    assert left == [], f"litter of killed writers was not swept: {left}"
    print(f"{step - 1} kills, {survived} left the old checkpoint, {step - 1 - survived} the new one")
    assert step > 20 and 0 < survived < step - 1


if __name__ == "__main__":
    main()
