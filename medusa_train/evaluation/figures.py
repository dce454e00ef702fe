"""How a figure of the report is written, once for the text and the page: a path into the report and a kind of number.

Both views look every figure up by its path in `report.json` ("arms.0.speed.overhead_c") and write it with the same
function; on the page the path stands beside the figure in `data-field`, so that a test can compare them all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from medusa_train.console import human_bytes
from medusa_train.evaluation.schema import AcceptanceReport

NONE = "–"

_KINDS: dict[str, Callable[[float], str]] = {
    "count": lambda x: f"{x:,.0f}",
    "ratio": lambda x: f"{x:.3f}",
    "times": lambda x: f"{x:.2f}x",
    "percent": lambda x: f"{100 * x:.1f} %",
    "ms": lambda x: f"{x:.2f} ms",
    "seconds": lambda x: f"{x:.2f} s",
    "rate": lambda x: f"{x:.1f} tokens/s",
    "logit": lambda x: f"{x:.4f}",
    "bytes": human_bytes,
}


def write(value: Any, kind: str) -> str:
    """A number, or an estimate as "1.790 (1.702 to 1.881)", in the words of `kind`; "–" where there is none.

    Kinds: count, ratio, times, percent, ms, seconds, rate, logit, bytes, text.
    """
    if isinstance(value, dict) and "value" in value:
        middle = write(value["value"], kind)
        if value.get("low") is None:
            return middle
        return f"{middle} ({_bare(value['low'], kind)} to {_bare(value['high'], kind)})"
    if value is None:
        return NONE
    if kind == "text":
        return {True: "yes", False: "no"}.get(value, str(value)) if isinstance(value, bool) else str(value)
    return _KINDS[kind](value)


def _bare(value: float, kind: str) -> str:
    """The number of an interval's end: its unit was said already."""
    return write(value, kind).split(" ")[0].removesuffix("x")


class Figures:
    """Looks figures up in a report by their path."""

    def __init__(self, report: AcceptanceReport) -> None:
        self.data: dict[str, Any] = report.model_dump(mode="json")

    def at(self, path: str) -> Any:
        """The value at a dotted path; KeyError or IndexError where there is none."""
        value: Any = self.data
        for part in path.split("."):
            if value is None:
                return None
            value = value[int(part)] if isinstance(value, list) else value[part]
        return value

    def text(self, path: str, kind: str) -> str:
        """The value at `path`, written."""
        return write(self.at(path), kind)


def headline(report: AcceptanceReport, number: int) -> str:
    """What arm `number` won, in one or two sentences for somebody who knows nothing of the method."""
    figures, arm = Figures(report), report.arms[number]
    at = f"arms.{number}"
    words = (
        f"With {arm.heads} Medusa heads the model published {figures.text(f'{at}.tokens_per_round.value', 'ratio')} "
        "tokens per round instead of 1"
    )
    if arm.speed is None:
        return words + "."
    speed = figures.text(f"{at}.speed.measured_speedup.value", "times")
    words += (
        f", and wrote {speed.removesuffix('x')} times as fast as plain decoding of the same prompts in the same run."
    )
    exact = arm.exactness
    if not exact.checked:
        return f"{words} Mode {arm.mode} is {arm.promise}."
    if exact.identical == exact.prompts:
        all_of_them = f"All {exact.prompts} answers are" if exact.prompts > 1 else "The answer is"
        return f"{words} {all_of_them} token for token what plain greedy decoding gives."
    return (
        f"{words} {exact.identical} of {exact.prompts} answers are token for token what plain greedy decoding gives; "
        f"{exact.near_ties} part at a near-tie of two tokens, {exact.failures} for no such reason."
    )
