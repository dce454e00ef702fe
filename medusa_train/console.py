"""What a person sees while the program works: messages, progress and tables.

Messages and progress go to stderr, results to stdout, so that `medusa-train ... > file` keeps results only.
On a terminal, progress is a rich bar with rate and time left; elsewhere it is a plain line every few seconds, because
a log file cannot redraw.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as RichProgress
from rich.table import Table
from rich.text import Text

PLAIN_LINE_EVERY_S = 5.0


@functools.cache
def console() -> Console:
    """The console for messages and progress (stderr)."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


@functools.cache
def out() -> Console:
    """The console for results (stdout)."""
    return Console(highlight=False, soft_wrap=not sys.stdout.isatty())


def say(text: str) -> None:
    """One message line for the person at the terminal; `text` is printed as it is, brackets included."""
    console().print(text, markup=False)


class Progress:
    """A job of `total` units under way. `advance` and `describe` may be called from any thread."""

    def __init__(self, description: str, total: float | None, unit: str) -> None:
        self.description, self.total, self.unit, self.done = description, total, unit, 0.0
        self._started = time.monotonic()

    def advance(self, n: float = 1) -> None:
        """`n` more units are done."""
        self.done += n

    def describe(self, text: str) -> None:
        """Changes the words before the bar."""
        self.description = text

    def summary(self) -> str:
        """The state as one plain line: done/total, rate, time left."""
        elapsed = time.monotonic() - self._started
        rate = self.done / elapsed if elapsed > 0 else 0.0
        parts = [f"{self.description}: {self.done:,.0f}"]
        if self.total is not None:
            parts[0] += f"/{self.total:,.0f}"
        parts[0] += f" {self.unit}"
        parts.append(f"{rate:,.1f} {self.unit}/s")
        if self.total is not None and rate > 0 and self.done < self.total:
            parts.append(f"{human_seconds((self.total - self.done) / rate)} left")
        parts.append(f"{human_seconds(elapsed)} so far")
        return ", ".join(parts)


class _RateColumn(ProgressColumn):
    def __init__(self, unit: str) -> None:
        super().__init__()
        self.unit = unit

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:,.1f} {self.unit}/s", style="cyan")


class _BarProgress(Progress):
    def __init__(self, bar: RichProgress, description: str, total: float | None, unit: str) -> None:
        super().__init__(description, total, unit)
        self._bar, self._task = bar, bar.add_task(description, total=total)

    def advance(self, n: float = 1) -> None:
        super().advance(n)
        self._bar.update(self._task, advance=n)

    def describe(self, text: str) -> None:
        super().describe(text)
        self._bar.update(self._task, description=text)


@contextmanager
def progress(description: str, total: float | None, unit: str = "rows") -> Iterator[Progress]:
    """Shows a job under way: a bar on a terminal, else a plain line at the start, every 5 s, and at the end."""
    if console().is_terminal:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            _RateColumn(unit),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        with RichProgress(*columns, console=console()) as bar:
            yield _BarProgress(bar, description, total, unit)
        return
    job, stop = Progress(description, total, unit), threading.Event()

    def lines() -> None:
        # A thread, not the caller's `advance`, so that one long step does not look like a hang.
        while not stop.wait(PLAIN_LINE_EVERY_S):
            say(job.summary())

    say(f"{description}: started")
    ticker = threading.Thread(target=lines, daemon=True)
    ticker.start()
    try:
        yield job
    finally:
        stop.set()
        ticker.join()
        say(job.summary())


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Prints a table of results to stdout; numbers stand on the right."""
    grid = Table(title=title, title_justify="left")
    for index, name in enumerate(columns):
        numeric = all(isinstance(row[index], int | float) or _numeric(str(row[index])) for row in rows)
        grid.add_column(name, justify="right" if numeric and rows else "left")
    for row in rows:
        grid.add_row(*(Text(str(cell)) for cell in row))
    out().print(grid)


def _numeric(text: str) -> bool:
    return bool(text) and text[0] in "0123456789-+." and any(ch.isdigit() for ch in text)


def human_bytes(n: float) -> str:
    """Bytes with a binary prefix: 1024 -> '1.0 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(n) < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.1f} TiB"


def human_count(n: float) -> str:
    """A count with a decimal prefix: 1_340_000 -> '1.34M'."""
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(n) >= limit:
            return f"{n / limit:.2f}{suffix}"
    return f"{n:.0f}"


def human_seconds(s: float) -> str:
    """Seconds as '42 s', '3 min 05 s' or '2 h 07 min'."""
    s = round(s)
    if s < 60:
        return f"{s} s"
    minutes, seconds = divmod(s, 60)
    if minutes < 60:
        return f"{minutes} min {seconds:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


@contextmanager
def waiting(description: str) -> Iterator[None]:
    """For work of unknown length without steps (loading, converting): shows that it goes on, and how long it took."""
    if console().is_terminal:
        with console().status(description):
            yield
        return
    stop, started = threading.Event(), time.monotonic()

    def lines() -> None:
        while not stop.wait(PLAIN_LINE_EVERY_S):
            say(f"{description}: {human_seconds(time.monotonic() - started)} so far")

    ticker = threading.Thread(target=lines, daemon=True)
    ticker.start()
    try:
        yield
    finally:
        stop.set()
        ticker.join()
