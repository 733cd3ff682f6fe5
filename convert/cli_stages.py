"""What the command line does between parsing and exit: progress bars, the stages of a job, and their printing.

Beside cli.py and the publishing files this is the only place that sees both the writer and its judge.
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from requant.manifests.errors import EnvironmentFault, NotSignedOffError, SourceError, UsageError
from requant.manifests.urls import is_url

if TYPE_CHECKING:
    from requant.convert.execute import RunResult
    from requant.convert.pipeline import Job
    from requant.convert.stream import MakeJudge
    from requant.convert.uploads import Uploader
    from requant.manifests.schema import Manifest
    from requant.validate.serving_load import Load
    from requant.validate.serving_run import Run, Server
    from requant.validate.verdict import SignOff

__all__ = [
    "ByteBar",
    "Format",
    "Via",
    "add_signoff",
    "bench_server",
    "check_push",
    "emit",
    "folder_to_judge",
    "judge_job",
    "judge_output",
    "publish_output",
    "random_checkpoint",
    "report_verdict",
    "run_conversion",
    "stage_bar",
    "written",
]

log = logging.getLogger("requant")


class Format(StrEnum):
    """How results are printed."""

    HUMAN = "human"
    JSON = "json"


def emit(value: dict[str, Any] | list[Any], form: Format, human: Callable[[], str]) -> None:
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False) if form is Format.JSON else human())


@contextmanager
def written(path: Path) -> Generator[None]:
    """A file that the user named and that cannot be written is no bug."""
    try:
        yield
    except OSError as error:
        raise EnvironmentFault(
            f"cannot be written: {error.strerror}",
            where=str(path),
            hint="name a file in a folder that you may write to",
        ) from error


class Via(StrEnum):
    """What an upload lands in."""

    PULL_REQUEST = "pull_request"
    BRANCH = "branch"
    MAIN = "main"


class ByteBar:
    """A tqdm bar on stderr over bytes, or over what stands behind the comma of its label ("kernels, matrices").

    Silent when asked or when stderr is no terminal and the log is elsewhere.
    """

    def __init__(self, total: int, label: str, quiet: bool) -> None:
        self._total, self._label, self._quiet = total, label, quiet
        self._tqdm: Any = None

    def __enter__(self) -> Callable[[int], None]:
        from tqdm import tqdm

        name, _, counted = self._label.partition(", ")
        self._tqdm = tqdm(
            total=self._total,
            desc=name,
            unit=f" {counted}" if counted else "B",
            unit_scale=counted in ("", "tokens"),
            file=sys.stderr,
            disable=self._quiet,
            mininterval=0.2,
            dynamic_ncols=True,
        )
        return self._tqdm.update

    def __exit__(self, *_: object) -> None:
        self._tqdm.close()

    @property
    def total(self) -> int:
        """Bytes in all."""
        return self._total

    @total.setter
    def total(self, total: int) -> None:
        self._total = self._tqdm.total = total


@contextmanager
def stage_bar(label: str, quiet: bool) -> Generator[Callable[[int, int], None]]:
    """A bar for a stage that counts (done, in all) by itself."""
    bar = ByteBar(0, label, quiet)
    with bar as update:
        last = 0

        def progress(done: int, total: int) -> None:
            nonlocal last
            bar.total = total
            update(done - last)
            last = done

        yield progress


def run_conversion(job: Job, force: bool, quiet: bool, *, push: bool = False) -> RunResult:
    from requant.convert.pipeline import run_job

    with ByteBar(job.plan.bytes_in, "convert", quiet) as progress:
        judge = _judge_maker(job.manifest)
        with _uploading(job, push) as uploader:
            result = run_job(job, force=force, progress=progress, make_judge=judge, uploader=uploader)
    log.info("wrote %s (%d units, %d done by an earlier run)", job.plan.output, len(job.plan.units), result.resumed)
    return result


def judge_output(
    output: Path,
    source: Path,
    manifest: Manifest,
    *,
    only: Sequence[str] | None,
    activations: Path | None = None,
    quiet: bool,
) -> SignOff:
    from requant.validate.stages import validate_output

    def bar(label: str) -> AbstractContextManager[Callable[[int, int], None]]:
        return stage_bar(label, quiet)

    return validate_output(output, source, manifest, only=only, activations=activations, bar=bar)


def _uploading(job: Job, push: bool) -> AbstractContextManager[Uploader | None]:
    """Uploads finished shards to the Hub while the next are made, where they do not stay here."""
    if not push or not job.manifest.execute.stream:
        return nullcontext()
    from requant.convert.publish import publish_settings
    from requant.convert.repository import upload_target
    from requant.convert.uploads import Uploader, frees

    if not frees(job.plan):
        return nullcontext()
    return Uploader(job.plan, upload_target(publish_settings(job.manifest), job.manifest.name), free=True)


def _judge_maker(manifest: Manifest) -> MakeJudge | None:
    """What judges a streamed conversion while it runs."""
    if not manifest.execute.stream:
        return None
    from requant.validate.streamed import Judge

    return lambda source, view, record: Judge(source, view, record, manifest.validation.numerics)


def judge_job(job: Job, quiet: bool) -> SignOff:
    """Sign off what was just converted; of a streamed source nothing is left to read again."""
    signed = _judged(job, quiet)
    if job.address is not None:
        from requant.convert.uploads import read_freed

        add_signoff(job.address, job.plan.output)
        for name in read_freed(job.plan.output):  # hollow: nobody is to take it for a shard
            (job.plan.output / name).unlink(missing_ok=True)
    return signed


def add_signoff(address: str, output: Path) -> None:
    """Send the sign-off of the folder `output` to the finished output in an object store."""
    from requant.convert.destination import Destination

    Destination(address, "").add_signoff(output)


def _judged(job: Job, quiet: bool) -> SignOff:
    if not job.manifest.execute.stream:
        return judge_output(job.plan.output, job.plan.catalogue.root, job.manifest, only=None, quiet=quiet)
    from requant.convert.stream import source_with_holes, stream_folder
    from requant.convert.uploads import read_freed
    from requant.validate.hashing import FileHash
    from requant.validate.streamed import sign_off_streamed

    output = job.plan.output
    freed = {name: FileHash(name, shard.size, shard.sha256) for name, shard in read_freed(output).items()}
    signed = sign_off_streamed(
        output, source_with_holes(output), job.manifest, lambda label: stage_bar(label, quiet), freed
    )
    shutil.rmtree(stream_folder(output))
    return signed


def folder_to_judge(output: str) -> tuple[Path, str | None]:
    """(folder, address in an object store or None) of what `requant validate` is asked about.

    An address is fetched whole. SourceError if the shards of a folder are elsewhere.
    """
    from requant.convert.finished import fetch_output, manifest_of
    from requant.convert.uploads import read_freed

    if is_url(output):
        return fetch_output(output), output.rstrip("/")
    folder = Path(output)
    target = manifest_of(folder).target.output
    address = target if is_url(target) else None
    if freed := read_freed(folder):
        raise SourceError(
            f"{len(freed)} shards were sent away while converting and are not here",
            where=output,
            hint=f"validate where they are: requant validate {address or 'a copy of the repository'}",
        )
    return folder, address


def report_verdict(signed: SignOff, form: Format | None) -> None:
    from requant.validate.report import render_text

    if form is not None:
        emit(signed.to_json(), form, lambda: render_text(signed))
    if not signed.signed_off:
        raise NotSignedOffError("converted, but not signed off", hint="the gates above say what failed or did not run")


def bench_server(
    server: Server,
    load: Load,
    concurrency: Sequence[int],
    requests: Sequence[int],
    out: Path | None,
    form: Format,
    quiet: bool,
) -> None:
    """Measure, print, keep what there is, and end with the run's fault if it has one."""
    from requant.validate.serving import measure_server, run_text, write_run

    def keep(run: Run) -> None:
        if out is not None:
            with written(out):
                write_run(run, out)

    with stage_bar("bench, concurrencies", quiet) as progress:
        run = measure_server(server, load, concurrency, requests, keep=keep, progress=progress)
    emit(run.to_json(), form, lambda: run_text(run))
    fault = run.fault()
    if fault is not None:
        raise fault


def check_push(manifest: str, sets: Sequence[str]) -> None:
    """What --push needs, asked before hours of work."""
    from requant.convert.publish import check_ready, publish_settings
    from requant.manifests.load import load_manifest

    publish_settings(load_manifest(manifest, sets).manifest)
    check_ready()


def publish_output(
    output: Path,
    manifest: Manifest,
    *,
    repo: str | None = None,
    via: Via | None = None,
    private: bool | None = None,
    dry_run: bool = False,
    force_unsigned: bool = False,
    quiet: bool,
    form: Format | None,
) -> str:
    from huggingface_hub.utils import disable_progress_bars
    from requant.convert.publish import publish as send
    from requant.convert.publish import publish_settings

    if quiet:
        disable_progress_bars()
    settings = publish_settings(manifest, repo=repo, via=via.value if via else None, private=private)
    say: Callable[[str], None] = (lambda _: None) if quiet else (lambda line: typer.echo(line, err=True))
    done = send(output, settings, dry_run=dry_run, force_unsigned=force_unsigned, say=say)
    if form is not None:
        emit(done.to_json(), form, done.text)
    return done.url


def random_checkpoint(
    source: str, folder: Path, layers: int | None, form: str | None, seed: int, shard_size: str, quiet: bool
) -> None:
    """`requant init --random`: the options as they were typed."""
    from requant.convert.synthetic import config_of
    from requant.convert.synthetic_write import synthetic_bytes, write_synthetic
    from requant.manifests.sizes import parse_size

    try:
        largest = parse_size(shard_size)
    except ValueError as error:
        raise UsageError(str(error), where="--shard-size") from error
    config, chosen = config_of(source, layers, form)
    total = synthetic_bytes(config, chosen)
    with ByteBar(total, "random weights", quiet) as progress:
        names = write_synthetic(folder, config, chosen, seed=seed, shard_size=largest, progress=progress)
    typer.echo(
        f"wrote {folder}: {total / 1e9:.2f} GB in {len(names)} shards, {chosen}, random; next: requant init {folder}"
    )
