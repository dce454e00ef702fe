"""`medusa-train doctor`: is this machine, and is this checkpoint, all right?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from medusa_train.console import human_bytes, out, say, table

if TYPE_CHECKING:
    from medusa_train.checkpoint.doctor import Diagnosis


def command(
    checkpoint: Annotated[
        str | None,
        typer.Argument(help="Checkpoint folder or hub id; none looks at the machine alone.", show_default=False),
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(help="Compare with this base, in place of the one the checkpoint names.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as one JSON object.")] = False,
) -> None:
    """Recompute every hash of a checkpoint, compare it with its base, say what its heads have learnt and what would
    stop the other commands. Exit code 0: healthy; 1: not; 2: nothing there to examine.
    """
    from medusa_train.checkpoint.doctor import Diagnosis, examine_checkpoint, examine_environment
    from medusa_train.checkpoint.load import find_checkpoint

    folder = None if checkpoint is None else find_checkpoint(checkpoint)
    diagnosis = Diagnosis(checkpoint=None if folder is None else str(folder))
    examine_environment(diagnosis)
    if folder is not None:
        examine_checkpoint(folder, diagnosis, base)
    if as_json:
        import json

        typer.echo(json.dumps(diagnosis.to_dict(), indent=2, ensure_ascii=False))
    else:
        _print(diagnosis)
    if not diagnosis.healthy:
        raise typer.Exit(1)


def _print(diagnosis: Diagnosis) -> None:
    _print_machine(diagnosis)
    if diagnosis.checkpoint is None:
        return
    table(
        f"checkpoint {diagnosis.checkpoint}",
        ["", ""],
        [(k, "-" if v is None else v) for k, v in diagnosis.summary.items()],
    )
    if diagnosis.tensors:
        rows = [
            (t["name"], t["dtype"], "x".join(map(str, t["shape"])), human_bytes(t["bytes"]), _number(t["norm"]))
            for t in diagnosis.tensors
        ]
        table("tensors", ["name", "dtype", "shape", "size", "norm"], rows)
        _print_heads(diagnosis)
    for note in diagnosis.notes:
        say(f"note: {note}")
    for warning in diagnosis.warnings:
        say(f"warning: {warning}")
    _print_verdict(diagnosis)


def _print_machine(diagnosis: Diagnosis) -> None:
    facts = diagnosis.environment
    rows = [
        ("processor", f"{facts['processor']}, {facts['cores']} cores, {human_bytes(facts['memory_bytes'])}"),
        *((f"device {d['name'].split()[0]}", _device(d)) for d in diagnosis.devices),
        ("versions", ", ".join(f"{name} {version}" for name, version in facts["versions"].items())),
        *(
            (f"optional {module}", "present" if entry["present"] else f"absent ({entry['for']}): {entry['get']}")
            for module, entry in diagnosis.extras.items()
        ),
    ]
    table("machine", ["", ""], rows)


def _device(device: dict) -> str:
    words = [device["name"].partition(" ")[2], f"bf16 {device['bf16']}"]
    if "threads" in device:
        words.append(f"{device['threads']} threads")
    if "memory_bytes" in device:
        words.append(human_bytes(device["memory_bytes"]))
    return ", ".join(word for word in words if word)


def _print_heads(diagnosis: Diagnosis) -> None:
    rows = []
    for head in diagnosis.heads:
        distance = "-" if head.projection_distance is None else f"{100 * head.projection_distance:.2f} %"
        rows.append(
            (
                head.head,
                head.predicts,
                " ".join(_number(norm) for norm in head.block_weight_norms) or "-",
                " ".join(_number(norm) for norm in head.block_bias_norms) or "-",
                _number(head.projection_norm),
                distance,
                head.state,
            )
        )
    columns = ["head", "predicts", "block weights", "block biases", "projection", "away from lm_head", "state"]
    table("heads (norms)", columns, rows)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _print_verdict(diagnosis: Diagnosis) -> None:
    said: set[str] = set()
    for number, problem in enumerate(diagnosis.problems, start=1):
        say(f"problem {number}: {problem}")
        if problem.fix not in said:
            say(f"  to mend it: {problem.fix}")
        said.add(problem.fix)
    if diagnosis.problems:
        say("every other command would stop on these")
    else:
        for name, reasons in diagnosis.stops.items():
            say(f"`{name}` would stop: {'; '.join(reasons)}")
    verdict = "healthy" if diagnosis.healthy else f"not healthy: {len(diagnosis.problems)} problem(s)"
    base = {"same": ", base matches", "different": ", another base", "not found": ", base not compared"}
    out().print(verdict + base.get(diagnosis.base, ""), markup=False)
