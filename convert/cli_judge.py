"""The verbs that judge and hand on what was converted: validate, bench, compare, report, publish."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from requant.convert.cli_options import (
    FolderArg,
    FormatOption,
    LogOption,
    QuietOption,
    SetOption,
    VerboseOption,
    app,
    log_to,
)
from requant.convert.cli_stages import (
    Format,
    Via,
    add_signoff,
    bench_server,
    emit,
    folder_to_judge,
    judge_output,
    publish_output,
    report_verdict,
    stage_bar,
    written,
)
from requant.manifests.errors import NotSignedOffError

__all__ = ["bench", "compare", "publish", "report", "validate"]


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

    log_to(verbose, log_file)
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
    log_to(verbose, None)
    if endpoint is not None or launch is not None:
        from requant.validate.serving import numbers_in
        from requant.validate.serving_load import Load
        from requant.validate.serving_run import ANSWER, QUESTION, Server

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
        raise NotSignedOffError(
            f"{len(result.wrong)} timed outputs are beyond their bound",
            where=str(folder),
            hint=f"those with `of bound` above 1; `requant validate {folder} --only kernels` judges each path",
        )


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

    log_to(verbose, None)
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

    log_to(verbose, None)
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

    log_to(verbose, log_file)
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
