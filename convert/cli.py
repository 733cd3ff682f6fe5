"""The command line: `convert MANIFEST` does everything; `requant VERB` does one thing.

Results go to stdout, progress and messages to stderr. Errors of the user's world are one message and an exit code of
their own (manifests/errors.py); anything else is a bug and says so. Nothing heavy is imported before it is needed.
The verbs: cli_convert.py, cli_judge.py, cli_look.py, in the order of the help.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from typing import Final, NoReturn

import typer
from requant.convert import cli_convert, cli_judge, cli_look
from requant.convert.cli_options import app
from requant.manifests.errors import EnvironmentFault, ExitCode, RequantError

__all__ = ["app", "main"]

_VERBS: Final = (cli_convert, cli_judge, cli_look)
"""Imported for what they register with `app`."""
log = logging.getLogger("requant")

_DEFAULT_VERB: Final = "convert"


def _with_verb(arguments: Sequence[str]) -> list[str]:
    """`convert MANIFEST ...` without a verb means the whole pipeline."""
    verbs = {command.name or getattr(command.callback, "__name__", "") for command in app.registered_commands}
    first = arguments[0] if arguments else "--help"
    if first in verbs or first in ("-h", "--help", "--version"):
        return list(arguments)
    return [_DEFAULT_VERB, *arguments]


def _fail(error: RequantError) -> NoReturn:
    log.error("%s", error)
    typer.echo(f"error: {error.render()}", err=True)
    sys.exit(int(error.exit_code))


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Entry point of `convert` and `requant`."""
    argv = _with_verb(sys.argv[1:] if arguments is None else arguments)
    code = 0
    try:
        if argv and argv[0] == "--version":
            from importlib.metadata import version

            typer.echo(f"requant {version('requant')}")
        else:
            code = int(app(argv, standalone_mode=False) or 0)
        if code == ExitCode.INTERRUPTED:  # what typer makes of Ctrl-C
            raise KeyboardInterrupt
    except RequantError as error:
        _fail(error)
    except KeyboardInterrupt:
        typer.echo("interrupted: run the same command again to go on where it stopped", err=True)
        sys.exit(int(ExitCode.INTERRUPTED))
    except typer.Abort:
        sys.exit(int(ExitCode.INTERRUPTED))
    except (BrokenPipeError, SystemExit):  # the latter is what typer makes of a reader of stdout that has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno())  # pyright: ignore[reportOptionalMemberAccess]
        sys.exit(0)
    except ModuleNotFoundError as error:
        _fail(EnvironmentFault(f"the package {error.name} is missing", hint="install the extra that README.md names"))
    except Exception as error:
        shown = getattr(error, "show", None)
        if callable(shown):  # a usage error of the command line library
            shown()
            sys.exit(int(ExitCode.USAGE))
        if log.isEnabledFor(logging.DEBUG):
            raise
        log.exception("bug")
        typer.echo(
            f"bug: {type(error).__name__}: {error}\n  -> please report it, with `-v` for the traceback", err=True
        )
        sys.exit(int(ExitCode.BUG))
    sys.exit(code)


if __name__ == "__main__":
    main()
