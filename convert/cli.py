"""The command line: `convert MANIFEST` does everything; `requant VERB` does one thing.

Results go to stdout, progress and messages to stderr. Errors of the user's world are one message and an exit code of
their own (manifests/errors.py); anything else is a bug and says so. Nothing heavy is imported before it is needed.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, NoReturn

import typer
from requant.convert.cli_stages import (
    ByteBar,
    Format,
    Via,
    add_signoff,
    bench_server,
    check_push,
    emit,
    folder_to_judge,
    judge_job,
    judge_output,
    publish_output,
    random_checkpoint,
    report_verdict,
    run_conversion,
    stage_bar,
    written,
)
from requant.manifests.errors import EnvironmentFault, ExitCode, NotSignedOffError, RequantError, UsageError

if TYPE_CHECKING:
    pass

__all__ = ["app", "main"]

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

log = logging.getLogger("requant")


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


def _log_to(verbose: bool, log_file: Path | None) -> None:
    log.setLevel(logging.DEBUG if verbose else logging.INFO)
    for handler in log.handlers:
        handler.close()
    log.handlers[:] = [logging.NullHandler()]
    if verbose:
        log.addHandler(logging.StreamHandler(sys.stderr))
    if log_file is not None:
        with written(log_file):
            handler = logging.FileHandler(log_file)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        log.addHandler(handler)
    log.propagate = False


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


@app.command()
def convert(
    manifests: ManifestsArg,
    sets: SetOption = None,
    force: ForceOption = False,
    max_disk: MaxDiskOption = None,
    push: Annotated[
        bool, typer.Option("--push", help="Publish what was signed off, as the manifest's publish section says.")
    ] = False,
    form: FormatOption = Format.HUMAN,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
    log_file: LogOption = None,
) -> None:
    """Plan, run, validate and report. The default verb: `convert MANIFEST` needs no `convert`.

    Several manifests, or a folder of them: one that fails does not stop the next; exit code of the worst.
    """
    from requant.convert.collection import carry_out, expand, summary_text, worst

    _log_to(verbose, log_file)
    sets = _with_stream(sets, max_disk)
    if len(manifests) == 1 and not Path(manifests[0]).is_dir():
        _convert(manifests[0], sets, force=force, push=push, form=form, quiet=quiet)
        return

    def one(ref: str) -> str:
        try:
            return _convert(ref, sets, force=force, push=push, form=None if form is Format.JSON else form, quiet=quiet)
        except (RequantError, KeyboardInterrupt):
            raise
        except Exception as error:
            log.exception("bug")
            raise RequantError(f"bug: {type(error).__name__}: {error}", where=ref, hint="please report it") from error

    rows = carry_out(expand(manifests), one, lambda error: typer.echo(f"error: {error.render()}", err=True))
    emit([row.to_json() for row in rows], form, lambda: summary_text(rows))
    raise typer.Exit(int(worst(rows)))


def _convert(
    manifest: str, sets: list[str] | None, *, force: bool, push: bool, form: Format | None, quiet: bool
) -> str:
    """One manifest from plan to sign-off, and upload if asked; where it went. form: None prints nothing."""
    from requant.convert.pipeline import prepare
    from requant.convert.show import plan_text

    if push:
        check_push(manifest, sets or [])
    job = prepare(manifest, sets or [], bar=lambda label: stage_bar(label, quiet))
    if form is Format.HUMAN:
        typer.echo(plan_text(job.plan, job.seconds))
    run_conversion(job, force, quiet, push=push)
    report_verdict(judge_job(job, quiet), form)
    return publish_output(job.plan.output, job.manifest, quiet=quiet, form=form) if push else str(job.plan.output)


@app.command()
def check(
    manifest: ManifestArg,
    sets: SetOption = None,
    form: FormatOption = Format.HUMAN,
    verbose: VerboseOption = False,
    log_file: LogOption = None,
) -> None:
    """Check a manifest alone: every error at once, with file, line and column."""
    from requant.manifests.load import load_manifest

    _log_to(verbose, log_file)
    loaded = load_manifest(manifest, sets or [])
    facts = {"manifest": str(loaded.path), "name": loaded.manifest.name, "sha256": loaded.sha256, "valid": True}
    emit(facts, form, lambda: f"{loaded.path}: valid\n\n{loaded.resolved_yaml}" if verbose else f"{loaded.path}: valid")


@app.command()
def plan(
    manifest: ManifestArg,
    sets: SetOption = None,
    scan: Annotated[
        bool, typer.Option("--scan", help="Also read the scale planes and forecast what will be lossless.")
    ] = False,
    nodes: Annotated[int | None, typer.Option(min=1, help="Also predict the time on so many nodes.")] = None,
    gbps: Annotated[float | None, typer.Option(help="With --nodes: network of a node, Gbit/s each way.")] = None,
    storage: Annotated[
        float | None, typer.Option(help="With --nodes: shared file system, GB/s of reads and writes together.")
    ] = None,
    per_node: Annotated[
        int | None, typer.Option("--workers-per-node", min=1, help="With --nodes; else as many as here.")
    ] = None,
    rate: Annotated[float | None, typer.Option(help="With --nodes: measured GB/s of source of one worker.")] = None,
    rate_from: Annotated[
        Path | None, typer.Option(help="With --nodes: take that rate from the run that made this output.")
    ] = None,
    form: FormatOption = Format.HUMAN,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
    log_file: LogOption = None,
) -> None:
    """Say what a conversion will do, from the headers alone. Writes nothing."""
    from requant.convert.pipeline import prepare
    from requant.convert.show import forecast_json, forecast_text, plan_json, plan_text

    _log_to(verbose, log_file)
    job = prepare(manifest, sets or [], bar=None)
    facts = plan_json(job.plan)
    text = plan_text(job.plan, job.seconds)
    if scan:
        from requant.convert.pipeline import fetch_source
        from requant.convert.scan import scan as read_scales

        job = fetch_source(job)
        total = sum(m.scales.nbytes for u in job.plan.groups for m in u.members if m.scales)
        with ByteBar(total, "scan", quiet) as progress:
            forecasts = read_scales(job.plan, progress)
        facts["scan"] = forecast_json(forecasts)
        text += "\n\n" + forecast_text(forecasts)
    if nodes is not None:
        from requant.convert.show import predicted

        facts["prediction"], more = predicted(
            job.plan, nodes, per_node, rate=rate, rate_from=rate_from, network=gbps, storage=storage
        )
        text += "\n" + more
    elif (gbps, storage, per_node, rate, rate_from) != (None,) * 5:
        raise UsageError("a cluster's figures mean something only with --nodes", hint="say how many, e.g. --nodes 4")
    emit(facts, form, lambda: text)


@app.command()
def run(
    manifest: ManifestArg,
    sets: SetOption = None,
    force: ForceOption = False,
    max_disk: MaxDiskOption = None,
    form: FormatOption = Format.HUMAN,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
    log_file: LogOption = None,
) -> None:
    """Convert only; run `validate` afterwards. An interrupted run goes on where it stopped."""
    from requant.convert.pipeline import prepare
    from requant.convert.show import result_json, result_text

    _log_to(verbose, log_file)
    sets = _with_stream(sets, max_disk)
    job = prepare(manifest, sets or [], bar=lambda label: stage_bar(label, quiet))
    result = run_conversion(job, force, quiet)
    emit(result_json(job.plan, result), form, lambda: result_text(job.plan, result))


@app.command()
def validate(
    output: Annotated[
        str, typer.Argument(metavar="OUTPUT", help="A finished output: a folder, or its address (s3://...).")
    ],
    manifest: Annotated[
        str | None, typer.Option("--manifest", help="Gates from this manifest instead of the one in the folder.")
    ] = None,
    sets: SetOption = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", help="Run only this stage (repeatable); the rest is `not run`.")
    ] = None,
    activations: Annotated[
        Path | None,
        typer.Option(help="For stage kernels: a safetensors file of captured inputs, [tokens, K] per module name."),
    ] = None,
    form: FormatOption = Format.HUMAN,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
    log_file: LogOption = None,
) -> None:
    """Judge a finished output: loader contracts, numbers against the source, and the manifest's gates; sign off."""
    from requant.convert.finished import open_finished

    _log_to(verbose, log_file)
    folder, address = folder_to_judge(output)
    done = open_finished(folder, manifest, sets or [])
    signed = judge_output(folder, done.source, done.manifest, only=only, activations=activations, quiet=quiet)
    if address is not None:
        add_signoff(address, folder)
    report_verdict(signed, form)


@app.command()
def bench(
    folder: FolderArg,
    tokens: Annotated[
        str, typer.Option(help="Numbers of tokens to time, comma-separated.", metavar="M,M,...")
    ] = "1,2,4,8,16,32,64",
    device: Annotated[str, typer.Option(help="cuda, cpu, or auto: a GPU if there is one.")] = "auto",
    path: Annotated[str, typer.Option(help="Kernel path by name (see `requant doctor`), or auto: by chip.")] = "auto",
    out: Annotated[
        Path | None,
        typer.Option(
            help="Also write bench.json, bench.md and (GPU) the roofline, SVG and PNG, here; of a server LABEL.json."
        ),
    ] = None,
    endpoint: Annotated[
        str | None, typer.Option(metavar="URL", help="Measure a server that runs, OpenAI-compatible, and no kernels.")
    ] = None,
    launch: Annotated[
        str | None,
        typer.Option(
            metavar="CMD", help="Start this server first, and stop it afterwards: {model} and {port} are filled in."
        ),
    ] = None,
    label: Annotated[str, typer.Option(help="Server: name of the run.")] = "",
    model: Annotated[str, typer.Option(help="Server: its name for the model, if it lists several or none.")] = "",
    concurrency: Annotated[str, typer.Option(metavar="C,C,...", help="Server: streams at a time.")] = "1,8,16",
    requests: Annotated[str, typer.Option(metavar="N,N,...", help="Server: requests at each of them.")] = "8,32,48",
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Server: tokens of a synthetic prompt.")] = 512,
    output_tokens: Annotated[int, typer.Option(min=2, help="Server: tokens to generate.")] = 128,
    prompts: Annotated[
        Path | None, typer.Option(help="Server: a file with a prompt per line, not synthetic ones.")
    ] = None,
    answer: Annotated[
        str | None, typer.Option(help="Server: word that the answer must hold; empty: ask nothing (random weights).")
    ] = None,
    question: Annotated[str | None, typer.Option(help="Server: what is asked before anything is timed.")] = None,
    server: Annotated[str, typer.Option("--server", help="Server: name and version, if it cannot say them.")] = "",
    flags: Annotated[str, typer.Option(help="Server: how one that runs was started, for comparisons.")] = "",
    card: Annotated[str, typer.Option(help="Server: what one that runs elsewhere computes on.")] = "",
    timeout: Annotated[
        float, typer.Option(min=1, help="Server: seconds to become healthy, and for a concurrency.")
    ] = 900.0,
    form: FormatOption = Format.HUMAN,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Time the FP4 kernels on a checkpoint's own shapes, or (--endpoint, --launch) a server that has it loaded."""
    _log_to(verbose, None)
    if endpoint is not None or launch is not None:
        from requant.validate.serving import ANSWER, QUESTION, Server, numbers_in
        from requant.validate.serving_load import Load

        asked = (QUESTION if question is None else question, ANSWER if answer is None else answer)
        one = Server(folder, endpoint, launch, label, model, timeout, *asked, server, flags, card)
        load = Load(folder, prompt_tokens, output_tokens, prompts)
        bench_server(one, load, numbers_in(concurrency), numbers_in(requests), out, form, quiet)
        return
    from requant.validate.speed_report import bench_text, run_bench, write_bench

    with stage_bar("bench, points", quiet) as progress:
        result = run_bench(folder, tokens, device, path, progress)
    emit(result.to_json(), form, lambda: bench_text(result))
    if out is not None:
        files, missing = write_bench(result, folder.resolve().name, out)
        typer.echo(f"wrote {', '.join(file.name for file in files)} to {out}", err=True)
        if missing:
            typer.echo(f"no plot: {missing}", err=True)
    if result.wrong:
        raise NotSignedOffError(f"{len(result.wrong)} timed outputs are beyond their bound", where=str(folder))


@app.command()
def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="A run that `bench --out` wrote, or a signed-off folder.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another one.")],
    allow: Annotated[
        list[str] | None, typer.Option(help="Let this differ: server, flags, prompts or card (repeatable).")
    ] = None,
    form: FormatOption = Format.HUMAN,
    verbose: VerboseOption = False,
) -> None:
    """Two runs of a server: B over A with confidence intervals. Refuses runs that are not comparable."""
    from requant.validate.compare import compare_runs, comparison_text, load_run

    _log_to(verbose, None)
    result = compare_runs(load_run(a), load_run(b), allow=allow or ())
    emit(result.to_json(), form, lambda: comparison_text(result))


@app.command()
def report(
    output: FolderArg,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Also write it to FILE as one HTML page.")
    ] = None,
    form: FormatOption = Format.HUMAN,
    verbose: VerboseOption = False,
) -> None:
    """Print the sign-off that stands in a folder."""
    from requant.validate.report import render_text
    from requant.validate.signoff import load_signoff, verify_signoff

    _log_to(verbose, None)
    signed = load_signoff(output)
    stale = verify_signoff(output)
    if html is not None:
        from requant.validate.report_html import render_html

        with written(html):
            html.write_text(render_html(signed), encoding="utf-8")
    facts = {**signed.to_json(), "files_changed_since": list(stale)}
    note = "".join(f"\nCHANGED SINCE THE SIGN-OFF: {entry}" for entry in stale)
    emit(facts, form, lambda: render_text(signed) + note)
    if stale or not signed.signed_off:
        raise NotSignedOffError(
            "the files are not those that were judged" if stale else "the sign-off did not pass",
            where=str(output),
            hint=f"run `requant validate {output}`" if stale else "the table above names the gates",
        )


@app.command()
def publish(
    output: FolderArg,
    repo: Annotated[str | None, typer.Option("--repo", metavar="OWNER/NAME", help="Instead of publish.repo.")] = None,
    via: Annotated[Via | None, typer.Option("--via", help="Instead of publish.via.")] = None,
    private: Annotated[
        bool | None, typer.Option("--private/--public", help="Of a repository that has to be made.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be sent and deleted; send nothing.")
    ] = False,
    force_unsigned: Annotated[
        bool, typer.Option("--force-unsigned", help="Without a valid sign-off, too; the model card says so.")
    ] = False,
    form: FormatOption = Format.HUMAN,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
    log_file: LogOption = None,
) -> None:
    """Send a signed-off folder to the Hub, into one pull request. An interrupted upload goes on where it stopped."""
    from requant.convert.finished import manifest_of

    _log_to(verbose, log_file)
    publish_output(
        output,
        manifest_of(output),
        repo=repo,
        via=via,
        private=private,
        dry_run=dry_run,
        force_unsigned=force_unsigned,
        quiet=quiet,
        form=form,
    )


@app.command()
def inspect(folder: FolderArg, form: FormatOption = Format.HUMAN, verbose: VerboseOption = False) -> None:
    """What is in this checkpoint: layout, formats, modules, bytes. Reads headers only."""
    from requant.convert.checkpoint import open_checkpoint
    from requant.convert.inspect import census, census_text

    _log_to(verbose, None)
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

    _log_to(verbose, None)
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
    _log_to(verbose, None)
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

    _log_to(verbose, None)
    facts = diagnose()
    emit(facts, form, lambda: doctor_text(facts))


def _with_stream(sets: list[str] | None, max_disk: str | None) -> list[str]:
    """The settings that --max-disk stands for, before those of the user."""
    streaming = [] if max_disk is None else ["execute.stream=true", f"execute.max_disk={max_disk}"]
    return [*streaming, *(sets or [])]


# --- the program ------------------------------------------------------------------------------------------------------

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
