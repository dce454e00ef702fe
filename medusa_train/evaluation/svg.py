"""Small pieces of SVG: text, bars, marks. Colours are classes of the page's style sheet, for dark mode and print."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

# Drawing units; the page scales a figure to its column, so that letters stay readable at phone width.
WIDTH = 400


def num(value: float) -> str:
    """A coordinate with at most two decimals."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def text(x: float, y: float, content: str, cls: str = "", anchor: str = "start") -> str:
    """A label; `anchor` is start, middle or end."""
    attributes = f' class="{cls}"' if cls else ""
    return f'<text x="{num(x)}" y="{num(y)}" text-anchor="{anchor}"{attributes}>{escape(content)}</text>'


def rect(x: float, y: float, width: float, height: float, cls: str, title: str = "") -> str:
    """A bar; `title` shows when the pointer rests on it."""
    inside = f"<title>{escape(title)}</title>" if title else ""
    return (
        f'<rect x="{num(x)}" y="{num(y)}" width="{num(max(width, 0))}" height="{num(max(height, 0))}" rx="2" '
        f'class="{cls}">{inside}</rect>'
    )


def line(x1: float, y1: float, x2: float, y2: float, cls: str, width: float | None = None) -> str:
    """A straight line; `width` in drawing units."""
    style = f' style="stroke-width:{num(width)}"' if width is not None else ""
    return f'<line x1="{num(x1)}" y1="{num(y1)}" x2="{num(x2)}" y2="{num(y2)}" class="{cls}"{style}/>'


def circle(x: float, y: float, radius: float, cls: str, title: str = "") -> str:
    """A disc or ring."""
    inside = f"<title>{escape(title)}</title>" if title else ""
    return f'<circle cx="{num(x)}" cy="{num(y)}" r="{num(radius)}" class="{cls}">{inside}</circle>'


def diamond(x: float, y: float, radius: float, cls: str, title: str = "") -> str:
    """A marker for predicted values, told from bars by its shape too, not by colour alone."""
    inside = f"<title>{escape(title)}</title>" if title else ""
    points = " ".join(
        f"{num(x + dx)},{num(y + dy)}" for dx, dy in ((0, -radius), (radius, 0), (0, radius), (-radius, 0))
    )
    return f'<polygon points="{points}" class="{cls}">{inside}</polygon>'


def interval(low: float, high: float, y: float, cls: str = "whisker") -> str:
    """A horizontal interval with end strokes, in drawing coordinates."""
    return line(low, y, high, y, cls) + line(low, y - 4, low, y + 4, cls) + line(high, y - 4, high, y + 4, cls)


def figure(height: float, label: str, parts: Iterable[str], width: float = WIDTH, cls: str = "plot") -> str:
    """The finished figure; `label` says in words what it shows, for whoever cannot see it."""
    return (
        f'<svg class="{cls}" viewBox="0 0 {num(width)} {num(height)}" role="img" aria-label="{escape(label)}" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>'
    )
