"""SIGKILL at any moment leaves the old checkpoint or the new one, whole."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from medusa_train.checkpoint import load_checkpoint
from tests.checkpoint.support import random_heads, save_toy, states_equal

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")
ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess:
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "MEDUSA_TRAIN_CACHE": str(Path(arguments[0]).parent.parent / "cache"),
    }
    command = [sys.executable, "-m", "tests.checkpoint.kill_worker", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize(
    ("what", "swap"),
    [
        ("save", "exchange"),
        ("save", "renames"),
        ("tree", "exchange"),
        pytest.param("tree", "copies", marks=pytest.mark.slow),
        pytest.param("merged", "exchange", marks=pytest.mark.slow),
    ],
)
def test_killed_at_every_step(tmp_path: Path, what: str, swap: str) -> None:
    (tmp_path / "work").mkdir()
    done = run(str(tmp_path / "work" / "heads"), what, swap)
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)


LOOP = """
import sys, itertools, torch
from pathlib import Path
from tests.checkpoint.support import random_heads, save_toy
torch.set_num_threads(1)
print("ready", flush=True)
for seed in itertools.count():
    save_toy(Path(sys.argv[1]), random_heads(seed=seed % 2, hidden=64, vocab=2000))
"""


@pytest.mark.parametrize("kills", [pytest.param(2, id="few"), pytest.param(150, id="many", marks=pytest.mark.slow)])
def test_killed_at_random_times(tmp_path: Path, kills: int) -> None:
    """Steps inside libraries (the writing of the tensors) are no audit events; random times reach them too."""
    folder, rng = tmp_path / "heads", random.Random(0)
    versions = [random_heads(seed=seed, hidden=64, vocab=2000) for seed in (0, 1)]
    save_toy(folder, versions[0])
    for _ in range(kills):
        process = subprocess.Popen(
            [sys.executable, "-c", LOOP, str(folder)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        assert process.stdout.readline() == b"ready\n"
        time.sleep(rng.uniform(0, 0.3))
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        loaded = load_checkpoint(folder, verify="hashes").heads
        assert any(states_equal(loaded, version) for version in versions)
    save_toy(folder, versions[1])
    assert os.listdir(tmp_path) == ["heads"]


def test_a_cut_swap_outlives_the_next_writer_s_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed between two renames, then a save fails: the retired folder is the only whole one and must stay."""
    from medusa_train.checkpoint import atomic
    from medusa_train.errors import UserError

    old = random_heads(seed=1)
    folder = save_toy(tmp_path / "heads", old)
    dead = 2**22 + 1  # above the kernel's largest process id
    folder.rename(tmp_path / f".heads.old-{dead}-abcd1234")

    def full(_: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(atomic, "fsync_tree", full)
    with pytest.raises(UserError, match="No space left"):
        save_toy(folder, random_heads(seed=2))
    assert states_equal(load_checkpoint(folder, verify="hashes").heads, old)
    assert os.listdir(tmp_path) == ["heads"]


def test_a_living_writer_s_folder_is_not_swept(tmp_path: Path) -> None:
    mine = tmp_path / f".heads.tmp-{os.getpid()}-abcd1234"
    mine.mkdir()
    save_toy(tmp_path / "heads")
    assert mine.is_dir()
