"""What the launching process says of ranks that failed: their own words, left by the command line of each rank."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from medusa_train.cli.app import main
from medusa_train.training import launch

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
