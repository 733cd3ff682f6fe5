"""The program that the verbs of cli_*.py register with, and the options that they share."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Annotated

import typer
from requant.convert.cli_stages import Format, written

__all__ = [
    "FolderArg",
    "ForceOption",
    "FormatOption",
    "LogOption",
    "ManifestArg",
    "ManifestsArg",
    "MaxDiskOption",
    "QuietOption",
    "SetOption",
    "VerboseOption",
    "app",
    "log_to",
    "with_stream",
]

app = typer.Typer(
    name="requant",
    help=(
        "Turn a published LLM checkpoint into another number format and prove the result.\n\n"
        "`convert MANIFEST` (or `requant MANIFEST`) plans, converts, validates and reports; MANIFEST is a YAML file or "
        "the name of a built-in one. The verbs below do one stage each."
    ),
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

ManifestArg = Annotated[str, typer.Argument(metavar="MANIFEST", help="A manifest file, or the name of a built-in one.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key, e.g. source.path=/models/x (repeatable)."),
]
FormatOption = Annotated[Format, typer.Option("--format", help="Form of the result on stdout.")]
VerboseOption = Annotated[bool, typer.Option("-v", "--verbose", help="Say more on stderr; tracebacks for bugs.")]
LogOption = Annotated[Path | None, typer.Option("--log-file", help="Write the log to this file too.")]
QuietOption = Annotated[bool, typer.Option("--quiet", help="No progress bar.")]
ForceOption = Annotated[
    bool, typer.Option("--force", help="Replace a finished output of ours, or discard an unfinished one.")
]
FolderArg = Annotated[Path, typer.Argument(metavar="FOLDER", help="A checkpoint folder.")]
MaxDiskOption = Annotated[
    str | None,
    typer.Option(
        "--max-disk",
        metavar="SIZE",
        help="Stream the source from the Hub through this much disk, e.g. 40GB (sets execute.stream and max_disk).",
    ),
]
ManifestsArg = Annotated[
    list[str],
    typer.Argument(metavar="MANIFEST...", help="Manifest files, names of built-in ones, or folders of manifests."),
]

_log = logging.getLogger("requant")


def log_to(verbose: bool, log_file: Path | None) -> None:
    """Messages of this call to stderr (--verbose) and into a file (--log-file)."""
    _log.setLevel(logging.DEBUG if verbose else logging.INFO)
    for handler in _log.handlers:
        handler.close()
    _log.handlers[:] = [logging.NullHandler()]
    if verbose:
        _log.addHandler(logging.StreamHandler(sys.stderr))
    if log_file is not None:
        with written(log_file):
            handler = logging.FileHandler(log_file)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        _log.addHandler(handler)
    _log.propagate = False


def with_stream(sets: list[str] | None, max_disk: str | None) -> list[str]:
    """The settings that --max-disk stands for, before those of the user."""
    streaming = [] if max_disk is None else ["execute.stream=true", f"execute.max_disk={max_disk}"]
    return [*streaming, *(sets or [])]
