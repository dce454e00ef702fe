"""`medusa-train eval-acceptance`: what the heads win, measured on real answers."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from medusa_train.cli.options import BaseOption, DeviceOption, DtypeOption, QuantizationOption, TrustRemoteCodeOption
from medusa_train.errors import UserError


class Turns(str, Enum):
    """Which turns of a multi-turn prompt are answered."""

    first = "first"
    all = "all"


class AcceptanceMode(str, Enum):
    """How guesses are accepted."""

    greedy = "greedy"
    typical = "typical"
    sample = "sample"


DEFAULT_PROMPTS = 24
DECODING, SAMPLING, OUTPUT = "What is decoded", "Acceptance modes", "Output"


def command(
    checkpoints: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CHECKPOINT...",
            help="Folder that `fit` wrote, or a hub id; several stand side by side in one report.",
            show_default=False,
        ),
    ] = None,
    suite: Annotated[
        str,
        typer.Option(
            help="heldout, mt-bench, spec-bench, or a file of prompts in any shape that distill reads.",
            rich_help_panel=DECODING,
        ),
    ] = "heldout",
    suite_file: Annotated[
        Path | None,
        typer.Option(
            help="Read the suite from this file (Spec-Bench's question.jsonl for mt-bench and spec-bench) instead of "
            "the cache or the network.",
            rich_help_panel=DECODING,
            show_default=False,
        ),
    ] = None,
    max_prompts: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Prompts to decode, spread evenly over the categories.",
            rich_help_panel=DECODING,
            show_default=str(DEFAULT_PROMPTS),
        ),
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="Decode every prompt of the suite.", rich_help_panel=DECODING)
    ] = False,
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens per answer at most.", rich_help_panel=DECODING)
    ] = 96,
    turns: Annotated[
        Turns,
        typer.Option(
            help="Answer only the first turn of each prompt, or all of them, the model's own answers standing between.",
            rich_help_panel=DECODING,
        ),
    ] = Turns.first,
    tree: Annotated[
        list[str] | None,
        typer.Option(
            help="stored (the checkpoint's searched tree), chain, chain:DEPTH, widths such as 4,3,2,2, or a JSON file "
            "of rank paths. Repeat to compare trees.",
            rich_help_panel=DECODING,
            show_default="stored",
        ),
    ] = None,
    baseline: Annotated[
        bool,
        typer.Option(
            help="Decode every prompt plainly too, interleaved: speed and exactness need it.", rich_help_panel=DECODING
        ),
    ] = True,
    generate_arm: Annotated[
        bool,
        typer.Option(
            "--generate-arm",
            help="Time transformers' own greedy generate as well and compare its tokens.",
            rich_help_panel=DECODING,
        ),
    ] = False,
    mode: Annotated[
        list[AcceptanceMode] | None,
        typer.Option(
            help="greedy: exact, the tokens of plain greedy decoding. typical: a heuristic, tokens that are probable "
            "enough. sample: exact in law, the text has the distribution of plain sampling. Repeat to compare.",
            rich_help_panel=SAMPLING,
            show_default="greedy",
        ),
    ] = None,
    temperature: Annotated[float, typer.Option(help="Modes typical and sample.", rich_help_panel=SAMPLING)] = 1.0,
    top_k: Annotated[int | None, typer.Option(help="Mode sample.", rich_help_panel=SAMPLING)] = None,
    top_p: Annotated[float | None, typer.Option(help="Mode sample.", rich_help_panel=SAMPLING)] = None,
    typical_eps: Annotated[float, typer.Option(help="Mode typical: hard threshold.", rich_help_panel=SAMPLING)] = 0.09,
    typical_alpha: Annotated[
        float, typer.Option(help="Mode typical: entropy-dependent threshold.", rich_help_panel=SAMPLING)
    ] = 0.3,
    seed: Annotated[int, typer.Option(help="Of sampling and of the bootstrap.", rich_help_panel=SAMPLING)] = 0,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for report.json, report.txt, report.html and the journal that an interrupted run continues "
            "from.",
            rich_help_panel=OUTPUT,
            show_default="CHECKPOINT-report beside the first checkpoint",
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Also write one JSON line per round to this file.", rich_help_panel=OUTPUT, show_default=False
        ),
    ] = None,
    resamples: Annotated[
        int, typer.Option(min=100, help="Bootstrap resamples behind each interval.", rich_help_panel=OUTPUT)
    ] = 2000,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema of report.json and stop.", rich_help_panel=OUTPUT)
    ] = False,
    base: BaseOption = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = None,
    quantization: QuantizationOption = None,
    attn_implementation: Annotated[
        str | None, typer.Option(help="sdpa, eager or, on CUDA, flex_attention.", show_default=False)
    ] = None,
    trust_remote_code: TrustRemoteCodeOption = False,
) -> None:
    """Measure accepted length, speed and exactness of a checkpoint's heads: real tree decoding against plain decoding.

    Every prompt is decoded with each tree and plainly, one after the other in one run.

    The report is written as JSON, as text and as one self-contained HTML page.

    Running the same command again after an interruption continues it.

    Exit code 1 when an answer that must equal plain greedy decoding's does not.
    """
    if schema:
        from medusa_train.evaluation.schema import schema_text

        typer.echo(schema_text(), nl=False)
        return
    if not checkpoints:
        from medusa_train.config.catalog import newest_checkpoint
        from medusa_train.console import say

        checkpoints = [str(newest_checkpoint())]
        say(f"checkpoint: {checkpoints[0]}, the newest under runs/")
        if not tree and not (Path(checkpoints[0]) / "tree.json").exists():
            tree = ["chain"]
            say(f"no tree yet: measuring the chain (`medusa-train tree {checkpoints[0]}` searches one)")
    modes = tuple(dict.fromkeys(entry.value for entry in mode or [AcceptanceMode.greedy]))
    _check_options(modes, temperature, top_k, top_p, max_prompts, full)
    from medusa_train.evaluation.arms import STORED, ArmRequest, open_groups
    from medusa_train.evaluation.groups import RunOptions
    from medusa_train.evaluation.run import run_acceptance
    from medusa_train.evaluation.suites import load_suite
    from medusa_train.provenance import command_line

    whole = load_suite(suite, suite_file=suite_file)
    options = RunOptions(
        max_new_tokens=max_new_tokens,
        all_turns=turns is Turns.all,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        typical_eps=typical_eps,
        typical_alpha=typical_alpha,
        seed=seed,
        bootstrap_resamples=resamples,
        available_prompts=len(whole.prompts),
    )
    request = ArmRequest(
        checkpoints=tuple(checkpoints),
        trees=tuple(tree or [STORED]),
        modes=modes,
        base=base,
        dtype=dtype,
        device=device,
        quantization=quantization,
        attn_implementation=attn_implementation,
        trust_remote_code=trust_remote_code,
        baseline=baseline,
        generate=generate_arm,
    )
    first = Path(checkpoints[0])
    folder = out or first.with_name(f"{first.name}-report")
    taken = whole.take(None if full else max_prompts or DEFAULT_PROMPTS)
    report, measured = run_acceptance(open_groups(request, options), taken, options, folder, command=command_line())
    _hand_over(report, measured, folder, trace)


def _hand_over(report: Any, measured: Any, folder: Path, trace: Path | None) -> None:
    """Writes the files, prints the summary, and ends with exit code 1 where a promise was broken."""
    from medusa_train.console import out as results
    from medusa_train.console import say
    from medusa_train.evaluation.output import write_report, write_trace
    from medusa_train.evaluation.text import summary

    paths = write_report(report, folder)
    if trace is not None:
        say(f"{write_trace(trace, measured)} rounds written to {trace}")
    if results().is_terminal:
        results().print(summary(report))
    else:
        # Without a terminal there is no width to fit: the same lines as in report.txt.
        typer.echo(paths["txt"].read_text(encoding="utf-8"), nl=False)
    say(f"report: {paths['html']} (also {paths['json'].name} and {paths['txt'].name} there)")
    if not report.passed:
        say("an answer that must equal plain greedy decoding's does not: see exactness above")
        raise typer.Exit(1)


def _check_options(
    modes: tuple[str, ...],
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    max_prompts: int | None,
    full: bool,
) -> None:
    """An option that would do nothing is refused: whoever gave it expects something of it."""
    if (top_k is not None or top_p is not None) and "sample" not in modes:
        raise UserError(
            "--top-k and --top-p change nothing without mode sample", fix="add --mode sample, or leave them out"
        )
    if temperature != 1.0 and modes == ("greedy",):
        raise UserError(
            "--temperature changes nothing in mode greedy", fix="add --mode sample or --mode typical, or leave it out"
        )
    if full and max_prompts is not None:
        raise UserError("--full and --max-prompts contradict each other", fix="leave one of them out")
