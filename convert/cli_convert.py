"""The verbs that work on manifests: convert, check, plan, run."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer
from requant.convert.cli_options import (
    ForceOption,
    FormatOption,
    LogOption,
    ManifestArg,
    ManifestsArg,
    MaxDiskOption,
    QuietOption,
    SetOption,
    VerboseOption,
    app,
    log_to,
    with_stream,
)
from requant.convert.cli_stages import (
    ByteBar,
    Format,
    check_push,
    emit,
    judge_job,
    publish_output,
    report_verdict,
    run_conversion,
    stage_bar,
)
from requant.manifests.errors import RequantError, UsageError

__all__ = ["check", "convert", "plan", "run"]


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

    log_to(verbose, log_file)
    sets = with_stream(sets, max_disk)
    if len(manifests) == 1 and not Path(manifests[0]).is_dir():
        _convert(manifests[0], sets, force=force, push=push, form=form, quiet=quiet)
        return

    def one(ref: str) -> str:
        try:
            return _convert(ref, sets, force=force, push=push, form=None if form is Format.JSON else form, quiet=quiet)
        except (RequantError, KeyboardInterrupt):
            raise
        except Exception as error:
            logging.getLogger("requant").exception("bug")
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

    log_to(verbose, log_file)
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

    log_to(verbose, log_file)
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

    log_to(verbose, log_file)
    sets = with_stream(sets, max_disk)
    job = prepare(manifest, sets or [], bar=lambda label: stage_bar(label, quiet))
    result = run_conversion(job, force, quiet)
    emit(result_json(job.plan, result), form, lambda: result_text(job.plan, result))
