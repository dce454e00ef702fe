"""How many processes are launched, and what the launching one says of ranks that failed: their own words."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from transformers.training_args import ParallelMode

from medusa_train.cli.app import main
from medusa_train.errors import UserError
from medusa_train.training import launch
from tests.training.support import trainer_of, write_world

Ranks = Callable[[], int]


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*launch.LAUNCHED, "RANK", launch.ERRORS):
        monkeypatch.delenv(name, raising=False)


def rank(number: int, words: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """The command line as rank `number` runs it, in this process; its exit code."""
    with monkeypatch.context() as patch:
        patch.setenv("RANK", str(number))
        patch.setenv("LOCAL_RANK", str(number))
        patch.setattr(sys, "argv", ["medusa-train", *words])
        with pytest.raises(SystemExit) as end:
            main()
    return end.value.code


def launched(ranks: Ranks, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> tuple[int, str]:
    """Exit code and words of a launching process, with `ranks` in place of torch's elastic agent."""
    monkeypatch.setattr(launch, "_launch", lambda *_, **__: ranks())
    with pytest.raises(SystemExit) as end:
        launch.launch_if_needed(Path("r.yaml"), [], restart=False, nproc=2, launch=True)
    assert launch.ERRORS not in os.environ
    return end.value.code, capfd.readouterr().err


def test_the_mistake_of_one_rank_is_told_with_its_number(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    code, said = launched(lambda: rank(1, ["fit", "--recipe", "nowhere.yaml"], monkeypatch), monkeypatch, capfd)
    assert code == 2
    assert "\nrank 1: error: nowhere.yaml: no such recipe" in said and said.count("nowhere.yaml") == 1


def test_the_same_mistake_of_all_ranks_is_told_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    def ranks() -> int:
        codes = {rank(number, ["fit", "--recipe", "nowhere.yaml"], monkeypatch) for number in (1, 0)}
        return codes.pop()

    code, said = launched(ranks, monkeypatch, capfd)
    assert code == 2
    assert "\nerror: nowhere.yaml: no such recipe" in said and said.count("nowhere.yaml") == 1


def test_a_mistake_comes_before_a_defect_that_it_caused_in_another_rank(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    def ranks() -> int:
        launch.leave_word("Traceback: connection closed by peer", 1)  # rank 0, earlier
        return rank(1, ["fit", "--recipe", "nowhere.yaml"], monkeypatch)

    code, said = launched(ranks, monkeypatch, capfd)
    assert code == 2
    assert "rank 1: error: nowhere.yaml" in said and "Traceback" not in said


def test_ranks_that_left_no_word_are_told_of_by_signal_or_code(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    code, said = launched(lambda: -signal.SIGKILL, monkeypatch, capfd)
    assert code == 1 and "was ended by signal 9 (9: often memory)" in said
    code, said = launched(lambda: 3, monkeypatch, capfd)
    assert code == 1 and "ended with exit code 3" in said
    code, said = launched(lambda: 128 + signal.SIGTERM, monkeypatch, capfd)
    assert code == 130 and "error" not in said


class Stub:
    """Stands for the launched processes: remembers what was started, and all is well."""

    def __init__(self) -> None:
        self.started: list[tuple[int, list[str], bool]] = []

    def __call__(self, count: int, words: Sequence[str], gpu: bool) -> int:
        self.started.append((count, list(words), gpu))
        return 0


@pytest.mark.parametrize(
    ("gpus", "nproc", "count"),
    [(3, None, 3), (3, 2, 2), (3, 3, 3), (3, 1, None), (1, None, None), (0, None, None), (0, 2, 2)],
)
def test_as_many_processes_as_gpus_or_as_asked_for(
    gpus: int, nproc: int | None, count: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process is this one; two on a machine without GPUs are two on its CPU."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(launch, "_launch", stub := Stub())
    done = launch.launch_if_needed(Path("r.yaml"), ["a.b=1"], restart=False, nproc=nproc, launch=True)
    assert done == (count is not None)
    words = ["fit", "--recipe", "r.yaml", "a.b=1"]
    assert stub.started == ([] if count is None else [(count, words, gpus > 0)])


def test_restart_is_passed_on_and_no_launch_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(launch, "_launch", stub := Stub())
    assert not launch.launch_if_needed(Path("r.yaml"), [], restart=True, nproc=None, launch=False)
    assert not stub.started
    assert launch.launch_if_needed(Path("r.yaml"), [], restart=True, nproc=None, launch=True)
    assert stub.started == [(2, ["fit", "--recipe", "r.yaml", "--restart"], True)]


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(launch, "_launch", stub := Stub())
    with pytest.raises(UserError, match="--nproc 4 and 3 visible GPUs") as error:
        launch.launch_if_needed(Path("r.yaml"), [], restart=False, nproc=4, launch=True)
    assert error.value.allowed == "1..3" and not stub.started


def test_gpus_are_launched_through_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate.commands import launch as accelerate_launch

    seen = []
    monkeypatch.setattr(accelerate_launch, "launch_command", seen.append)
    assert launch._launch(3, ["fit", "--recipe", "r.yaml", "a.b=1"], gpu=True) == 0
    (args,) = seen
    assert (args.num_processes, args.num_machines, args.multi_gpu, args.module) == (3, 1, True, True)
    assert (args.training_script, args.training_script_args) == ("medusa_train", ["fit", "--recipe", "r.yaml", "a.b=1"])


def test_one_process_that_sees_several_gpus_trains_on_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--no-launch`, `--nproc 1` and `fit()` from Python: no nn.DataParallel, which would cut the labels' channels.

    The library counts GPUs by this very function, also where (as here) there is none to go to.
    """
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    world = write_world(tmp_path / "world")
    trainer = trainer_of(world, tmp_path / "out", training={"use_cpu": False, "per_device_train_batch_size": 3})
    assert trainer.args.parallel_mode == ParallelMode.NOT_PARALLEL
    assert trainer.args.train_batch_size == 3
    assert not isinstance(trainer._wrap_model(trainer.model), torch.nn.DataParallel)
