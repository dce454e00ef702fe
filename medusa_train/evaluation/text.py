"""The report as text: printed at the end of a run and kept as report.txt."""

from __future__ import annotations

import io

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from medusa_train.evaluation.figures import Figures, headline
from medusa_train.evaluation.schema import AcceptanceReport

WIDTH = 110
STAGE_NAMES = {"propose": "propose", "tree_forward": "tree forward", "accept": "accept", "commit": "commit"}
# Divergences and prompts beyond this many stand in report.json and report.html only.
LISTED = 20


def text_report(report: AcceptanceReport) -> str:
    """The summary as plain text, lines of at most WIDTH characters."""
    stream = io.StringIO()
    Console(file=stream, width=WIDTH, color_system=None, highlight=False).print(summary(report))
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"


def summary(report: AcceptanceReport) -> RenderableType:
    """The summary as something rich can print, in colour on a terminal."""
    figures = Figures(report)
    parts: list[RenderableType] = [Text(f"Acceptance report: {report.setup.base}", style="bold"), Text(_setup(figures))]
    parts += [Text(""), _arms(figures, report)]
    parts += [_plain(figures, report)] if report.plain or report.generate else []
    for number, arm in enumerate(report.arms):
        parts += [Text(""), Text(f"{arm.name}", style="bold"), Text(headline(report, number))]
        parts += [_acceptance(figures, number, report), _heads(figures, number, report)]
        parts += [_calibration(figures, number, report)] if arm.tree.calibration else []
        parts.append(_times(figures, number))
        parts += [_exactness(figures, number, report)]
        if len(arm.categories) > 1:
            parts.append(_categories(figures, number, report))
    parts += [Text(""), *(Text(f"- {note}") for note in report.notes)]
    return Group(*parts)


def _setup(figures: Figures) -> str:
    text = figures.text
    return (
        f"{text('suite.used', 'count')} of {text('suite.available', 'count')} prompts of suite "
        f"{text('suite.name', 'text')} ({text('suite.turns', 'text')} turns), at most "
        f"{text('setup.max_new_tokens', 'count')} tokens each, {text('setup.dtype', 'text')} on "
        f"{text('setup.device', 'text')}, peak memory {text('setup.peak_memory_bytes', 'bytes')}.\n"
        f"In brackets: 95 % bootstrap interval over prompts, {text('setup.bootstrap_resamples', 'count')} resamples."
    )


def _grid(title: str, *columns: str) -> Table:
    grid = Table(
        title=title, title_justify="left", title_style="italic", show_edge=False, pad_edge=False, box=SIMPLE_HEAD
    )
    for index, column in enumerate(columns):
        bar = index > 0 and not column
        grid.add_column(column, justify="left" if index == 0 or bar else "right", overflow="fold")
    return grid


def _row(grid: Table, *cells: str) -> None:
    # Text, not str: rich would read the brackets of a name as markup.
    grid.add_row(*(Text(cell) for cell in cells))


def _arms(figures: Figures, report: AcceptanceReport) -> Table:
    grid = _grid("", "arm", "nodes", "tokens per round", "speed measured", "predicted E/c", "overhead c")
    for number, arm in enumerate(report.arms):
        at = f"arms.{number}"
        _row(
            grid,
            f"{arm.name}",
            figures.text(f"{at}.tree.nodes", "count"),
            figures.text(f"{at}.tokens_per_round", "ratio"),
            figures.text(f"{at}.speed.measured_speedup", "times"),
            figures.text(f"{at}.speed.predicted_speedup", "times"),
            figures.text(f"{at}.speed.overhead_c", "ratio"),
        )
    return grid


def _plain(figures: Figures, report: AcceptanceReport) -> Table:
    grid = _grid("", "baseline", "tokens", "speed", "median step", "10 % to 90 %")
    for number, arm in enumerate(report.plain):
        at = f"plain.{number}"
        _row(
            grid,
            f"{arm.name} ({arm.checkpoint})",
            figures.text(f"{at}.tokens", "count"),
            figures.text(f"{at}.tokens_per_second", "rate"),
            figures.text(f"{at}.step.median_ms", "ms"),
            f"{figures.text(f'{at}.step.p10_ms', 'ms')} to {figures.text(f'{at}.step.p90_ms', 'ms')}",
        )
    for number, arm in enumerate(report.generate):
        at = f"generate.{number}"
        _row(
            grid,
            f"transformers generate ({arm.checkpoint}), prefill counted",
            figures.text(f"{at}.tokens", "count"),
            figures.text(f"{at}.tokens_per_second", "rate"),
            f"{figures.text(f'{at}.identical', 'count')} of {figures.text(f'{at}.prompts', 'count')} same ids as plain",
            "",
        )
    return grid


def _acceptance(figures: Figures, number: int, report: AcceptanceReport) -> Table:
    at, arm = f"arms.{number}", report.arms[number]
    text = figures.text
    title = (
        f"{text(f'{at}.rounds', 'count')} rounds, {text(f'{at}.tokens', 'count')} tokens, "
        f"{text(f'{at}.num_accepted', 'count')} accepted guesses (roots not counted); rounds ended by "
        + ", ".join(f"{name} {text(f'{at}.ended.{name}', 'count')}" for name in arm.ended)
    )
    grid = _grid(title, "accepted guesses", "rounds", "at least so many", "predicted by the tree search", "")
    for accepted, rounds in enumerate(arm.accepted_histogram):
        survival = f"{at}.survival.{accepted - 1}"
        _row(
            grid,
            str(accepted),
            text(f"{at}.accepted_histogram.{accepted}", "count"),
            text(f"{survival}.share", "percent") if accepted else "100.0 %",
            text(f"{survival}.predicted", "percent") if accepted else "",
            "#" * round(30 * rounds / max(arm.rounds, 1)),
        )
    return grid


def _heads(figures: Figures, number: int, report: AcceptanceReport) -> Table:
    ranks = range(1, 11)
    grid = _grid("true next token at exactly this rank of the head's list", "head", *map(str, ranks), "of")
    for j, head in enumerate(report.arms[number].head_accuracy):
        at = f"arms.{number}.head_accuracy.{j}"
        cells = [figures.text(f"{at}.accuracy.{rank - 1}", "percent").removesuffix(" %") for rank in ranks]
        _row(grid, f"{head.head} (token t+{head.offset}), %", *cells, figures.text(f"{at}.count", "count"))
    return grid


def _calibration(figures: Figures, number: int, report: AcceptanceReport) -> Table:
    grid = _grid("the same on the text the tree was searched on", "head", *map(str, range(1, 11)), "of")
    for j, head in enumerate(report.arms[number].tree.calibration):
        at = f"arms.{number}.tree.calibration.{j}"
        cells = [figures.text(f"{at}.accuracy.{rank}", "percent").removesuffix(" %") for rank in range(10)]
        used = "" if head.head < report.arms[number].tree.depth else ", not in the tree"
        _row(grid, f"{head.head} (token t+{head.offset}{used}), %", *cells, figures.text(f"{at}.count", "count"))
    return grid


def _times(figures: Figures, number: int) -> Table:
    at = f"arms.{number}.times"
    grid = _grid("", "time of a round", *STAGE_NAMES.values(), "other", "whole round")
    for name, label in (("median_ms", "median"), ("mean_ms", "mean")):
        cells = [figures.text(f"{at}.{stage}.{name}", "ms") for stage in STAGE_NAMES]
        other = figures.text(f"{at}.other_mean_ms", "ms") if name == "mean_ms" else ""
        _row(grid, label, *cells, other, figures.text(f"{at}.total.{name}", "ms"))
    return grid


def _exactness(figures: Figures, number: int, report: AcceptanceReport) -> RenderableType:
    at, exact = f"arms.{number}.exactness", report.arms[number].exactness
    text = figures.text
    if not exact.checked:
        return Text(f"Mode {report.arms[number].mode}, {exact.promise}.")
    lines: list[RenderableType] = [
        Text(
            f"Exactness: {text(f'{at}.identical', 'count')} of {text(f'{at}.prompts', 'count')} answers identical, "
            f"{text(f'{at}.near_ties', 'count')} near-ties, {text(f'{at}.failures', 'count')} failures."
        )
    ]
    if exact.divergences:
        lines.append(Text(f"Rule: {exact.bound_rule}."))
        grid = _grid("", "prompt", "token", "plain", "logit", "this arm", "logit", "bound", "verdict")
        for n, found in enumerate(exact.divergences[:LISTED]):
            place = f"{at}.divergences.{n}"
            _row(
                grid,
                f"{found.prompt_id}/{found.turn}",
                text(f"{place}.position", "count"),
                repr(found.plain_text),
                text(f"{place}.plain_logit", "logit"),
                repr(found.arm_text) if found.arm_text is not None else "(stopped)",
                text(f"{place}.arm_logit", "logit"),
                text(f"{place}.bound", "logit"),
                found.verdict,
            )
        lines.append(grid)
        if len(exact.divergences) > LISTED:
            lines.append(Text(f"... and {len(exact.divergences) - LISTED} more in report.json"))
    return Group(*lines)


def _categories(figures: Figures, number: int, report: AcceptanceReport) -> Table:
    grid = _grid("", "category", "prompts", "tokens", "tokens per round", "speed measured")
    for n, row in enumerate(report.arms[number].categories):
        at = f"arms.{number}.categories.{n}"
        _row(
            grid,
            row.category,
            figures.text(f"{at}.prompts", "count"),
            figures.text(f"{at}.tokens", "count"),
            figures.text(f"{at}.tokens_per_round", "ratio"),
            figures.text(f"{at}.measured_speedup", "times"),
        )
    return grid
