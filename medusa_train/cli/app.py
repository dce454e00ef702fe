"""The command line: one typer app, one module per command, and the one place where errors become text and exit codes.

Exit codes: 0 done; 2 the input cannot work (a `UserError`, or a usage error); 130 interrupted; 1 a defect of ours,
with its traceback. No command module imports torch before it runs, so `--help` answers at once.
"""

from __future__ import annotations

import errno
import importlib
import logging
import os
import sys
from typing import Annotated

import typer

from medusa_train import __version__
from medusa_train.console import say
from medusa_train.errors import UserError

# name -> module with `command`; in the order of the way from prompts to a report, which is the order --help shows.
COMMANDS = {
    "distill": "medusa_train.cli.distill",
    "show": "medusa_train.cli.show",
    "plan": "medusa_train.cli.plan",
    "fit": "medusa_train.cli.fit",
    "tree": "medusa_train.cli.tree",
    "eval-acceptance": "medusa_train.cli.eval_acceptance",
    "generate": "medusa_train.cli.generate",
    "export": "medusa_train.cli.export",
    "import": "medusa_train.cli.import_",
    "doctor": "medusa_train.cli.doctor",
}
TAKES_OVERRIDES = {"fit", "plan"}  # `section.key=value` words after the options


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"medusa-train {__version__}")
        raise typer.Exit


def build_app() -> typer.Typer:
    """The app with every command registered."""
    app = typer.Typer(
        name="medusa-train",
        help="Makes a chat LLM generate faster by training Medusa heads on it: distill, fit, tree, eval-acceptance.",
        no_args_is_help=True,
        # Locals hold tokens and prompts; they do not belong in a log.
        pretty_exceptions_enable=False,
        pretty_exceptions_show_locals=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback()
    def root(
        version: Annotated[
            bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
        ] = False,
    ) -> None:
        pass

    for name, module in COMMANDS.items():
        extra = {"allow_extra_args": True} if name in TAKES_OVERRIDES else {}
        settings = {"help_option_names": ["-h", "--help"], **extra}
        app.command(name, context_settings=settings)(importlib.import_module(module).command)
    return app


def main() -> None:
    """Entry point of `medusa-train` and `python -m medusa_train`."""
    # Library chatter that a user cannot act on; whoever sets these variables keeps their own values.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # says at import that an optional kernel is not there
    try:
        build_app()(prog_name="medusa-train")
    except UserError as error:
        _fail(f"error: {error}", 2)
    except OSError as error:
        text = _storage_error(error)
        if text is None:
            _leave_traceback()
            raise
        _fail(f"error: {text}", 2)
    except SystemExit as stop:
        if stop.code == 130:
            say("interrupted; what was finished is kept, and the same command continues from there")
        raise
    except Exception:
        _leave_traceback()
        raise


def _fail(text: str, code: int) -> None:
    """Says it, or leaves it to the process that launched this rank, and ends."""
    from medusa_train.training.launch import leave_word

    if not leave_word(text, code):
        say(text)
    sys.exit(code)


def _leave_traceback() -> None:
    """Inside `except`: ends a launched rank, its traceback left to the process that launched it."""
    import traceback

    from medusa_train.training.launch import leave_word

    if leave_word(traceback.format_exc().rstrip(), 1):
        sys.exit(1)


def _storage_error(error: OSError) -> str | None:
    place = "" if error.filename is None else f" ({error.filename})"
    if error.errno == errno.ENOSPC:
        return f"the disk is full{place}\n  to mend it: free some space and run the same command again; it continues"
    if error.errno == errno.EDQUOT:
        return f"the disk quota is used up{place}\n  to mend it: free some space and run the same command again"
    if error.errno == errno.EFBIG:
        return f"the file would be larger than may be here{place}\n  to mend it: see `ulimit -f`, or write elsewhere"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"no permission to read or write there{place}"
    return None
