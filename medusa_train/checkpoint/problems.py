"""Everything that is wrong with a checkpoint, in one error.

A person who mends one fault and meets the next loses an afternoon; so every check adds to one list, and the list is
raised as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from medusa_train.errors import UserError


@dataclass(frozen=True)
class Problem:
    """One fault.

    Attributes:
        kind: a fixed word for programs: "missing", "unexpected", "shape", "dtype", "empty", "aliased", "non-finite",
            "hash", "size", "count", "config", "backbone", "tokenizer", "template", "abi", "manifest", "unsafe",
            "policy", "tree".
        where: file, or file and tensor name.
        what: one sentence.
        fix: what to do about it.
    """

    kind: str
    where: str
    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


class CheckpointError(UserError):
    """A checkpoint that cannot be used; `.problems` holds every fault that was found."""

    def __init__(self, what: str, *, problems: list[Problem], where: str | None = None) -> None:
        self.problems = list(problems)
        super().__init__(what, where=where)

    def __reduce__(self) -> tuple:
        return _rebuild, (self.what, self.problems, self.where)


def _rebuild(what: str, problems: list[Problem], where: str | None) -> CheckpointError:
    return CheckpointError(what, problems=problems, where=where)


class Problems:
    """A list that checks append to and that raises itself at the end."""

    SHOWN = 40

    def __init__(self) -> None:
        self.found: list[Problem] = []

    def add(self, kind: str, where: str, what: str, fix: str) -> None:
        """Notes one fault; the checks go on."""
        self.found.append(Problem(kind, where, what, fix))

    def __bool__(self) -> bool:
        return bool(self.found)

    def raise_if_any(self, headline: str, where: str | Path) -> None:
        """Raises `CheckpointError` naming every fault, equal advice once, or returns where there is none."""
        if not self.found:
            return
        number = len(self.found)
        lines = [f"{headline} ({number} problem{'s' if number > 1 else ''}):"]
        lines += [f"  {index}. {problem}" for index, problem in enumerate(self.found[: self.SHOWN], start=1)]
        if number > self.SHOWN:
            lines.append(f"  ... and {number - self.SHOWN} more")
        for fix in dict.fromkeys(problem.fix for problem in self.found):
            lines.append(f"  to mend it: {fix}")
        raise CheckpointError("\n".join(lines), problems=self.found, where=str(where))
