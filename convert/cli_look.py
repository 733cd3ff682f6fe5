"""The verbs that look and prepare: inspect, diff, init, schema, doctor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from requant.convert.cli_options import FolderArg, FormatOption, QuietOption, VerboseOption, app, log_to
from requant.convert.cli_stages import ByteBar, Format, emit, random_checkpoint, written
from requant.manifests.errors import UsageError

__all__ = ["diff", "doctor", "init", "inspect", "schema"]


@app.command()
def inspect(folder: FolderArg, form: FormatOption = Format.HUMAN, verbose: VerboseOption = False) -> None:
    """What is in this checkpoint: layout, formats, modules, bytes. Reads headers only."""
    from requant.convert.checkpoint import open_checkpoint
    from requant.convert.inspect import census, census_text

    log_to(verbose, None)
    facts = census(open_checkpoint(folder))
    emit(facts, form, lambda: census_text(facts, verbose))


@app.command()
def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help="A checkpoint folder.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another one.")],
    form: FormatOption = Format.HUMAN,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Compare two checkpoints tensor by tensor. Exit code 0 whatever it finds; the result says it."""
    from requant.convert.checkpoint import open_checkpoint
    from requant.convert.diff import compare, diff_text

    log_to(verbose, None)
    left, right = open_checkpoint(a), open_checkpoint(b)
    with ByteBar(left.total_bytes, "diff", quiet) as progress:
        result = compare(left, right, progress)
    emit(result.to_json(), form, lambda: diff_text(result, verbose))


@app.command()
def init(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="A checkpoint folder, or owner/name on the Hub; see --random.")
    ],
    folder: Annotated[Path | None, typer.Argument(metavar="[OUT]", help="With --random: the folder to write.")] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the manifest here.")] = None,
    random: Annotated[
        bool,
        typer.Option(
            "--random", help="Write a checkpoint of random weights: SOURCE is a config.json or a built-in name."
        ),
    ] = False,
    layers: Annotated[
        int | None, typer.Option("--layers", help="With --random: only the first so many layers.")
    ] = None,
    form: Annotated[
        str | None,
        typer.Option("--as", help="With --random: bf16 or mxfp4. Default: as the family's producer ships it."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="With --random: the same seed gives the same bytes.")] = 0,
    shard_size: Annotated[str, typer.Option("--shard-size", help="With --random: largest shard.")] = "5GB",
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Write a manifest for a checkpoint, from its headers; or, with --random, a checkpoint of random weights."""
    log_to(verbose, None)
    if random:
        if folder is None:
            raise UsageError("--random needs the folder to write", hint=f"requant init --random {source} OUT")
        return random_checkpoint(source, folder, layers, form, seed, shard_size, quiet)
    if folder is not None:
        raise UsageError("OUT goes with --random", where=str(folder), hint="the manifest goes to -o FILE")
    from requant.convert.initial import initial_manifest

    text = initial_manifest(source)
    if output is None:
        typer.echo(text, nl=False)
        return None
    if output.exists():
        raise UsageError("exists already", where=str(output), hint="choose another name for the manifest")
    with written(output):
        output.write_text(text)
    typer.echo(f"wrote {output}; next: requant plan {output}")
    return None


@app.command()
def schema() -> None:
    """Print the JSON Schema of manifests (for editors)."""
    from requant.manifests.schema import json_schema

    typer.echo(json.dumps(json_schema(), indent=2))


@app.command()
def doctor(form: FormatOption = Format.HUMAN, verbose: VerboseOption = False) -> None:
    """What this machine offers: Python, packages, GPU, and which kernel paths run, compile, or are unavailable."""
    from requant.convert.doctor import diagnose, doctor_text

    log_to(verbose, None)
    facts = diagnose()
    emit(facts, form, lambda: doctor_text(facts))
