"""`medusa-train show`: the rows a model will train on, token by token."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from medusa_train.errors import UserError


def command(
    data: Annotated[
        list[str], typer.Argument(help="Files, folders of `distill`, or hub dataset ids.", show_default=False)
    ],
    base: Annotated[
        str,
        typer.Option(
            help="Hub id, local folder or alias: its tokenizer and template render the rows.", show_default=False
        ),
    ],
    rows: Annotated[int, typer.Option("--rows", "-n", min=0, help="Rows to print.")] = 3,
    skip: Annotated[int, typer.Option(min=0, help="Rows to pass over first.")] = 0,
    position: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Position whose hidden state's targets are listed.",
            show_default="before the first supervised token",
        ),
    ] = None,
    heads: Annotated[int, typer.Option(min=1, help="Heads to list targets for.")] = 5,
    max_length: Annotated[int, typer.Option(min=8, help="Row and bin length, as data.max_length.")] = 2048,
    one_row_per_turn: Annotated[
        bool, typer.Option("--one-row-per-turn", help="As data.render.one_row_per_turn: a row for each assistant turn.")
    ] = False,
    supervise_terminator: Annotated[
        bool, typer.Option(help="As data.render.supervise_terminator: train on the token that ends a turn.")
    ] = True,
    sample: Annotated[
        int, typer.Option(min=1, help="Conversations to read for statistics and the estimate of drops.")
    ] = 2000,
    check: Annotated[
        bool, typer.Option("--check", help="Also ask the base how likely it finds the answers (loads the model).")
    ] = False,
    check_rows: Annotated[int, typer.Option(min=1, help="Rows that --check reads.")] = 32,
    chat_template: Annotated[
        str | None, typer.Option(help="File with a Jinja chat template.", show_default="the tokenizer's own")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Hub revision.", show_default="main")] = None,
    trust_remote_code: Annotated[bool, typer.Option(help="Run the model repository's own code.")] = False,
) -> None:
    """Print rows with supervised tokens coloured (⟦marked⟧ where there is no colour), and what each head learns
    where."""
    from itertools import islice

    from medusa_train.console import table
    from medusa_train.dataset.files import sources_of
    from medusa_train.dataset.journal import is_journal
    from medusa_train.dataset.rows import RowCounts, RowOptions, iter_rows
    from medusa_train.dataset.show import statistics
    from medusa_train.modeling.base import load_base, load_tokenizer

    for path in data:
        if not is_journal(path):
            sources_of(path)  # a missing file is said before anything loads
    names = {"revision": revision, "chat_template": chat_template, "trust_remote_code": trust_remote_code}
    loaded: Any = (load_base if check else load_tokenizer)(base, **names)
    counts = RowCounts()
    options = RowOptions(max_length, supervise_terminator, one_row_per_turn)
    found = []
    for row in islice(iter_rows(data, loaded, options, counts), sample):
        found.append(row)
    if not found:
        counts.read.check(1.0)
        raise UserError("no usable row", where=", ".join(data))
    for row in found[skip : skip + rows]:
        _print_row(loaded, row, position, heads)
    table("Rows", ("what", "value"), statistics(found, max_length))
    _print_drops(counts, len(found) == sample)
    if check:
        _check(loaded, found[skip : skip + check_rows])


def _print_row(base: Any, row: Any, position: int | None, heads: int) -> None:
    from medusa_train.console import out, table
    from medusa_train.dataset.show import coloured, default_position, plain_marks, targets_at, token_text

    at = default_position(row) if position is None else min(position, len(row) - 1)
    out().rule(f"{row.source}  {len(row)} tokens, {row.supervised} supervised", align="left")
    if out().is_terminal:
        out().print(coloured(base, row, at))
    else:
        out().print(plain_marks(base, row), markup=False)
    lines = []
    for target in targets_at(row, at, heads):
        name = "lm_head" if target.head < 0 else f"head {target.head}"
        token = "-" if target.token is None else repr(token_text(base, target.token))
        kind = "past the end" if target.token is None else "supervised" if target.supervised else "not supervised"
        lines.append((name, f"t+{target.head + 2}", target.position, token, kind))
    title = f"From position {at}, {token_text(base, row.input_ids[at])!r}"
    table(title, ("channel", "predicts", "position", "token", "loss"), lines)


def _print_drops(counts: Any, stopped_early: bool) -> None:
    from medusa_train.console import out

    read = counts.read
    share = read.dropped / max(1, read.rows_in)
    about = "about " if stopped_early else ""
    text = f"{about}{share:.1%} of the conversations are dropped: {read.summary()}; {counts.truncated} rows are cut"
    out().print(f"{text} ({read.rows_in:,} read)", markup=False)
    for example in read.examples:
        out().print(f"  {example}", markup=False)


def _check(base: Any, rows: Any) -> None:
    from medusa_train.console import out, progress, table
    from medusa_train.dataset.check import OWN_GREEDY_AGREEMENT, OwnText, how_own

    found = []
    with progress("asking the base", total=len(rows), unit="rows") as bar:
        for row, own in how_own(base, rows):
            found.append((row, own))
            bar.advance()
    total = OwnText(
        sum(own.tokens for _, own in found),
        sum(own.log_prob for _, own in found),
        sum(own.agreements for _, own in found),
    )
    strangest = sorted(found, key=lambda pair: pair[1].mean_log_prob)[:5]
    lines = [("all", total.tokens, f"{total.mean_log_prob:.3f}", f"{total.greedy_agreement:.1%}")]
    lines += [(r.source, own.tokens, f"{own.mean_log_prob:.3f}", f"{own.greedy_agreement:.1%}") for r, own in strangest]
    table(
        "How likely the base finds the answers (all, and the five it finds strangest)",
        ("row", "supervised tokens", "mean log-prob", "greedy agreement"),
        lines,
    )
    if not total.is_own:
        out().print(
            f"warning: the base agrees with {total.greedy_agreement:.0%} of the tokens (its own text: more than"
            f" {OWN_GREEDY_AGREEMENT:.0%}). Heads trained on text that the model would not say guess worse:"
            " let `medusa-train distill` answer these prompts instead.",
            style="yellow",
            markup=False,
        )
