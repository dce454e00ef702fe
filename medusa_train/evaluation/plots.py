"""The figures of the report page, drawn from the report alone."""

from __future__ import annotations

from collections.abc import Sequence

from medusa_train.evaluation import svg
from medusa_train.evaluation.figures import write
from medusa_train.evaluation.schema import AcceptanceReport, ArmReport, Estimate, HeadAccuracy

STAGES = (
    ("propose", "heads guess"),
    ("tree_forward", "model checks"),
    ("accept", "compare"),
    ("commit", "keep"),
)


def accepted_histogram(arm: ArmReport) -> str:
    """Share of rounds by number of accepted guesses."""
    total, top, bottom, left = max(arm.rounds, 1), 24.0, 190.0, 10.0
    shares = [count / total for count in arm.accepted_histogram]
    step = (svg.WIDTH - 2 * left) / len(shares)
    highest = max([*shares, 1e-9])
    parts = [svg.line(left, bottom, svg.WIDTH - left, bottom, "axis")]
    for accepted, share in enumerate(shares):
        x, height = left + step * accepted, (bottom - top) * share / highest
        label = f"{accepted} accepted: {arm.accepted_histogram[accepted]} of {arm.rounds} rounds"
        width = min(step * 0.7, 70)
        parts.append(svg.rect(x + (step - width) / 2, bottom - height, width, height, "measured", label))
        parts.append(svg.text(x + step / 2, bottom - height - 6, write(share, "percent"), "value", "middle"))
        parts.append(svg.text(x + step / 2, bottom + 17, str(accepted), "tick", "middle"))
    parts.append(
        svg.text(svg.WIDTH / 2, bottom + 37, "guesses accepted in a round (the root comes on top)", "", "middle")
    )
    return svg.figure(bottom + 44, "Accepted guesses per round", parts)


def head_accuracy(arm: ArmReport) -> str:
    """One row per head: bars of this run, diamonds of the calibration (alone where the tree does not use the head)."""
    row, left = 66.0, 64.0
    step = (svg.WIDTH - left) / 10
    measured = {head.head: head for head in arm.head_accuracy}
    counted = {head.head: head for head in arm.tree.calibration}
    both = [*measured.values(), *counted.values()]
    highest = max([a for head in both for a in head.accuracy if a is not None] or [1.0]) or 1.0
    heads, parts = sorted(measured.keys() | counted.keys()), []
    for index, number in enumerate(heads):
        bottom = row * (index + 1)
        parts.append(svg.text(0, bottom - 22, f"head {number}", "strong"))
        parts.append(svg.text(0, bottom - 6, f"token t+{number + 2}"))
        parts.append(svg.line(left, bottom, svg.WIDTH, bottom, "axis"))
        for rank in range(10):
            x = left + step * rank
            if number in measured:
                parts.append(_accuracy_bar(measured[number], rank, x, bottom, step, (row - 22) / highest))
            share = counted[number].accuracy[rank] if number in counted else None
            if share is not None:
                said = f"head {number}, rank {rank + 1}: {write(share, 'percent')} in the calibration"
                parts.append(svg.diamond(x + step - 5, bottom - (row - 22) * share / highest, 4, "predicted", said))
    bottom = row * max(len(heads), 1)
    for rank in range(10):
        parts.append(svg.text(left + step * (rank + 0.5), bottom + 16, str(rank + 1), "tick", "middle"))
    parts.append(svg.text(left + step * 5, bottom + 35, "place in the head's list; bars in %", "", "middle"))
    return svg.figure(bottom + 42, "Exact-rank accuracy of every head", parts)


def _accuracy_bar(head: HeadAccuracy, rank: int, x: float, bottom: float, step: float, scale: float) -> str:
    share = head.accuracy[rank]
    height = scale * (share or 0.0)
    title = f"head {head.head}, rank {rank + 1}: {head.hits[rank]} of {head.count}"
    shown = "–" if share is None else f"{100 * share:.1f}"
    label = svg.text(x + step / 2, bottom - height - 4, shown, "value small", "middle")
    return svg.rect(x + 4, bottom - height, step - 8, height, "measured", title) + label


def survival(arm: ArmReport) -> str:
    """Share of rounds with at least d accepted guesses; the tree search's prediction as diamonds."""
    top, bottom, left = 24.0, 190.0, 10.0
    step = (svg.WIDTH - 2 * left) / max(len(arm.survival), 1)
    highest = max([max(level.share, level.predicted or 0.0) for level in arm.survival] or [1.0]) or 1.0
    parts = [svg.line(left, bottom, svg.WIDTH - left, bottom, "axis")]
    for index, level in enumerate(arm.survival):
        middle = left + step * (index + 0.5)
        height = (bottom - top) * level.share / highest
        width = min(step * 0.6, 60)
        title = f"at least {level.depth}: {level.rounds} of {arm.rounds} rounds"
        parts.append(svg.rect(middle - width / 2, bottom - height, width, height, "measured", title))
        parts.append(svg.text(middle, bottom - max(height, 0) - 6, write(level.share, "percent"), "value", "middle"))
        if level.predicted is not None:
            y = bottom - (bottom - top) * level.predicted / highest
            said = f"predicted {write(level.predicted, 'percent')}"
            parts.append(svg.diamond(middle + width / 2 + 9, y, 6, "predicted", said))
        parts.append(svg.text(middle, bottom + 17, f"≥ {level.depth}", "tick", "middle"))
    parts.append(svg.text(svg.WIDTH / 2, bottom + 37, "guesses accepted in a round", "", "middle"))
    return svg.figure(bottom + 44, "Share of rounds that reach each depth, measured and predicted", parts)


def tree(arm: ArmReport) -> str:
    """The tree from left to right: disc area = measured share of rounds, ring area = predicted share."""
    nodes = {tuple(node.path): node for node in arm.tree.node_list}
    children: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for path in sorted(nodes):
        children.setdefault(path[:-1], []).append(path)
    rows: dict[tuple[int, ...], float] = {}
    _place((), children, rows)
    spacing, column, left = 20.0, 84.0, 16.0
    width = max(svg.WIDTH, left + column * arm.tree.depth + 74)
    x = {path: left + column * len(path) for path in rows}
    y = {path: 18 + spacing * row for path, row in rows.items()}
    edges, discs = [], []
    for path, node in nodes.items():
        parent, share = path[:-1], node.share
        edges.append(svg.line(x[parent], y[parent], x[path], y[path], "edge", 0.8 + 7 * share))
        said = f"ranks {', '.join(str(rank + 1) for rank in path)}: accepted in {write(share, 'percent')} of rounds"
        if node.expected is not None:
            said += f", predicted {write(node.expected, 'percent')}"
        discs.append(svg.circle(x[path], y[path], _radius(share), "measured", said))
        if node.expected is not None:
            discs.append(svg.circle(x[path], y[path], _radius(node.expected), "ring"))
        label = f"{path[-1] + 1} · {100 * share:.1f}%"
        discs.append(svg.text(x[path] + 15, y[path] + 14, label, "small halo"))
    discs.append(svg.circle(x[()], y[()], 9, "root", "the root: the token that the model itself has decided"))
    height = 18 + spacing * (max(rows.values()) + 1)
    heads = [
        svg.text(left + column * level, height + 14, f"head {level - 1}", "tick", "middle")
        for level in range(1, arm.tree.depth + 1)
    ]
    heads.append(svg.text(left - 9, height + 14, "root", "tick"))
    return svg.figure(
        height + 22, f"The tree of {arm.tree.nodes} guesses", [*edges, *discs, *heads], width, "plot tree"
    )


def _place(path: tuple[int, ...], children: dict, rows: dict[tuple[int, ...], float]) -> float:
    """Leaves get rows of their own, one below the other; an inner node stands at its first child's height."""
    below = children.get(path, [])
    if not below:
        rows[path] = sum(1 for p in rows if not children.get(p))
    for child in below:
        _place(child, children, rows)
    if below:
        rows[path] = rows[below[0]]
    return rows[path]


def _radius(share: float) -> float:
    return 1.5 + 11 * share**0.5


def speed(report: AcceptanceReport) -> str:
    """Measured speed of every arm against plain decoding (1.0), with interval, and the prediction E/c as a diamond."""
    timed = [arm for arm in report.arms if arm.speed is not None]
    values = [
        x
        for arm in timed
        for e in (arm.speed.measured_speedup, arm.speed.predicted_speedup)
        for x in (e.value, e.high)
        if x is not None
    ]
    longest, row, right = max([1.0, *values]) * 1.02, 46.0, 60.0

    def x(value: float) -> float:
        return (svg.WIDTH - right) * value / longest

    parts = [_speed_row(0, row, "plain decoding", x(1.0), "1.00x", "plain", "")]
    for index, arm in enumerate(timed, start=1):
        measured, predicted = arm.speed.measured_speedup, arm.speed.predicted_speedup
        reach = max(x(v) for v in (measured.value or 0.0, measured.high or 0.0, predicted.value or 0.0))
        said = write(measured.value, "times")
        parts.append(_speed_row(index, row, arm.name, x(measured.value or 0.0), said, "measured", arm.name, reach))
        middle = row * index + 30
        if measured.low is not None and measured.high is not None:
            parts.append(svg.interval(x(measured.low), x(measured.high), middle))
        if predicted.value is not None:
            said = f"predicted {write(predicted.value, 'times')}"
            # On the bar's upper edge, where it does not hide the interval.
            parts.append(svg.diamond(x(predicted.value), row * index + 21, 6, "predicted", said))
    parts.append(svg.line(x(1.0), 0, x(1.0), row * (1 + len(timed)), "guide"))
    return svg.figure(row * (1 + len(timed)) + 6, "Speed against plain decoding", parts)


def _speed_row(
    index: int, row: float, label: str, length: float, value: str, cls: str, title: str, reach: float = 0.0
) -> str:
    top = row * index
    return (
        svg.text(0, top + 15, label)
        + svg.rect(0, top + 21, length, 18, cls, title)
        + svg.text(max(length, reach) + 11, top + 35, value, "value")
    )


def round_time(report: AcceptanceReport, arm: ArmReport) -> str:
    """Mean time of a plain step and of a round, the round split into its parts."""
    bars: list[tuple[str, list[tuple[str, float]]]] = []
    if arm.plain is not None:
        bars.append(("one plain step (1 token)", [("plain", report.plain[arm.plain].step.mean_ms)]))
    parts_ms = [(name, getattr(arm.times, name).mean_ms) for name, _ in STAGES]
    bars.append((_round_label(arm.tokens_per_round), [*parts_ms, ("other", arm.times.other_mean_ms)]))
    longest = max([sum(ms for _, ms in parts) for _, parts in bars] + [1e-9])
    scale, row = (svg.WIDTH - 70) / longest, 46.0
    drawn: list[str] = []
    for index, (label, parts) in enumerate(bars):
        drawn.append(svg.text(0, row * index + 15, label))
        x = 0.0
        for name, ms in parts:
            drawn.append(svg.rect(x, row * index + 21, ms * scale, 18, name, f"{name}: {write(ms, 'ms')}"))
            x += ms * scale
        total = write(sum(ms for _, ms in parts), "ms")
        drawn.append(svg.text(x + 6, row * index + 35, total, "value"))
    drawn += _legend(row * len(bars) + 14, [*parts_ms, ("other", arm.times.other_mean_ms)])
    return svg.figure(row * len(bars) + 66, "Where the time of a round goes", drawn)


def _round_label(tokens_per_round: Estimate) -> str:
    return f"one round ({write(tokens_per_round.value, 'ratio')} tokens)"


def _legend(top: float, parts: Sequence[tuple[str, float]]) -> list[str]:
    words = dict(STAGES) | {"other": "rest"}
    drawn = []
    for index, (name, ms) in enumerate(parts):
        x, y = 200 * (index % 2), top + 18 * (index // 2)
        drawn.append(svg.rect(x, y - 9, 10, 10, name))
        drawn.append(svg.text(x + 15, y, f"{words[name]}: {write(ms, 'ms')}"))
    return drawn
