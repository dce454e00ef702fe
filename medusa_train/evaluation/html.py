"""The report as one self-contained HTML page: no script, nothing loaded, light and dark, print and phone."""

from __future__ import annotations

import functools
import json
from typing import Any

from medusa_train.evaluation import plots
from medusa_train.evaluation.figures import Figures, headline
from medusa_train.evaluation.schema import AcceptanceReport


@functools.cache
def _environment() -> Any:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("medusa_train.evaluation", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # Quoted, so that spaces show; jinja's own tojson would spell out every angle bracket.
    environment.filters["quoted"] = lambda text: json.dumps(text, ensure_ascii=False)
    return environment


def html_report(report: AcceptanceReport) -> str:
    """The page. Every figure carries its path into report.json in `data-field` and how it is written in `data-kind`."""
    from markupsafe import Markup

    environment = _environment()
    figures = Figures(report)

    def figure(path: str, kind: str) -> Markup:
        return Markup('<span class="n" data-field="{}" data-kind="{}">{}</span>').format(
            path, kind, figures.text(path, kind)
        )

    return environment.get_template("report.html.jinja").render(
        report=report,
        f=figure,
        headline=lambda number: headline(report, number),
        style=Markup(environment.loader.get_source(environment, "report.css")[0]),
        plot=lambda name, *arguments: Markup(getattr(plots, name)(*arguments)),
    )
