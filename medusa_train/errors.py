"""What a user did that cannot work, said so that it can be mended.

Every error that a person can cause is a `UserError`: what was wrong, where, what is allowed, how to mend it. The
command line prints it as one block and exits with code 2; library callers catch one class.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """An error in the input (files, names, recipes, checkpoints), not in the program.

    Args:
        what: what is wrong, one sentence.
        where: file:line, row, tensor name or recipe key.
        allowed: the values or shapes that would have been right.
        fix: what the user can do next.
    """

    def __init__(
        self, what: str, *, where: str | None = None, allowed: str | None = None, fix: str | None = None
    ) -> None:
        self.what, self.where, self.allowed, self.fix = what, where, allowed, fix
        super().__init__(str(self))

    def __str__(self) -> str:
        lines = [self.what if self.where is None else f"{self.where}: {self.what}"]
        if self.allowed is not None:
            lines.append(f"  allowed: {self.allowed}")
        if self.fix is not None:
            lines.append(f"  to mend it: {self.fix}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple:
        # Exceptions cross process borders (data workers, launched ranks); keyword arguments need this.
        return _rebuild, (self.what, self.where, self.allowed, self.fix)


def _rebuild(what: str, where: str | None, allowed: str | None, fix: str | None) -> UserError:
    return UserError(what, where=where, allowed=allowed, fix=fix)


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """The choice closest in spelling to `word`, or None where nothing comes near."""
    found = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.6)
    return found[0] if found else None


def unknown_name(kind: str, word: str, choices: Iterable[str], where: str | None = None) -> UserError:
    """A `UserError` for a name that is not one of `choices`, with the nearest spelling."""
    choices = sorted(choices)
    guess = nearest(word, choices)
    return UserError(
        f"unknown {kind} {word!r}",
        where=where,
        allowed=", ".join(choices),
        fix=None if guess is None else f"did you mean {guess!r}?",
    )
