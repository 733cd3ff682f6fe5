"""The stages behind the verbs: manifest -> catalogue -> plan -> output folder with everything that belongs in it."""

from __future__ import annotations

import gc
import hashlib
import json
import shutil
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from requant.convert.checkpoint import PICKLE_SUFFIXES, open_checkpoint
from requant.convert.engine import Engine, LocalEngine, worker_bytes
from requant.convert.execute import Progress, RunResult, default_workers, execute, partial_of, refuse_finished
from requant.convert.hub import fetch, is_offline
from requant.convert.hub_remote import resolve
from requant.convert.input_scales import UNMEASURED
from requant.convert.layouts.reading import recognise
from requant.convert.metadata import metadata_files
from requant.convert.plan import CopyUnit, Plan, make_plan, refuse_overlap, source_files
from requant.convert.private import LOCAL_FOLDER, LOCAL_MANIFEST, local_manifest, public_manifest
from requant.convert.remote import Remote, refuse_changed, remote_catalogue
from requant.convert.runrecord import RECORD_FILE
from requant.manifests.errors import EnvironmentFault, LockError, UsageError
from requant.manifests.load import LoadedManifest, load_manifest
from requant.manifests.schema import Manifest
from requant.manifests.urls import is_url, last_part

__all__ = ["LOCK_FILE", "MANIFEST_FILE", "Job", "fetch_source", "prepare", "run_job"]

if TYPE_CHECKING:
    from requant.convert.calibrate import Calibration, OpenBar
    from requant.convert.destination import Destination
    from requant.convert.device import GpuCompute
    from requant.convert.engine_ray import RayEngine
    from requant.convert.stream import MakeJudge
    from requant.convert.uploads import Uploader

LOCK_FILE: Final = "requant.lock.json"
MANIFEST_FILE: Final = "requant.manifest.yaml"


@dataclass(frozen=True, slots=True)
class Job:
    """A manifest with its plan. commit: of the source on the Hub, or None for a folder.

    remote: the source's files elsewhere, where the plan was made from their headers and they are still to be fetched.
    """

    loaded: LoadedManifest
    plan: Plan
    commit: str | None
    seconds: float
    remote: Remote | None = None

    @property
    def address(self) -> str | None:
        """Of the output in an object store, or None if it is a folder."""
        return self.manifest.target.output if is_url(self.manifest.target.output) else None

    @property
    def manifest(self) -> Manifest:
        """The manifest's model."""
        return self.loaded.manifest


@contextmanager
def _no_bar(_: str) -> Generator[Callable[[int, int], None]]:
    yield lambda _done, _all: None


def prepare(ref: str, sets: Sequence[str] = (), *, bar: OpenBar | None = _no_bar) -> Job:
    """Load a manifest, read the source's headers, plan. Nothing is written; of a Hub source only headers are read.

    Where the manifest asks for a calibration that no earlier run kept, it is measured, under a progress bar; with bar
    None it is not, and the plan is for looking at only.
    """
    begin = time.perf_counter()
    with _without_gc():
        return _prepare(ref, sets, begin, bar)


@contextmanager
def _without_gc() -> Generator[None]:
    """A plan makes millions of small objects and no cycles: the collector would walk them all, again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
            gc.freeze()


def _prepare(ref: str, sets: Sequence[str], begin: float, bar: OpenBar | None) -> Job:
    loaded = load_manifest(ref, sets)
    manifest = loaded.manifest
    _refuse_unbuilt(manifest)
    output = _output_folder(manifest)
    if output.is_symlink() or output.name in ("", ".."):  # a folder is renamed at the end, and a link is none
        output = output.resolve()
    commit: str | None = None
    remote: Remote | None = None
    calibrated = manifest.activations.calibrate is not None  # which reads the weights before the plan is made
    if manifest.source.path is not None and is_url(manifest.source.path):
        remote, root = _objects(manifest.source.path, whole=calibrated)
    elif manifest.source.path is not None:
        root = Path(manifest.source.path).expanduser()
    elif is_offline() or calibrated:
        root, commit = fetch(str(manifest.source.repo), manifest.source.revision)
    else:
        remote = resolve(str(manifest.source.repo), manifest.source.revision)
        root, commit = remote.folder, remote.commit
    refuse_overlap(root, output)
    catalogue = open_checkpoint(root) if remote is None else remote_catalogue(remote)
    layout, reason = recognise(catalogue, manifest.source.layout)
    calibration: Calibration | None = None
    if manifest.activations.calibrate is not None:
        from requant.convert.calibrate import obtain

        calibration = obtain(manifest, root, catalogue, layout, bar)
    plan = make_plan(manifest, catalogue, layout, reason, output, calibration)
    return Job(loaded, plan, commit, time.perf_counter() - begin, remote)


def _objects(url: str, *, whole: bool) -> tuple[Remote | None, Path]:
    """(the source as it is listed, where it would be fetched to); whole: fetched at once, and then a folder."""
    from requant.convert.object_remote import resolve_objects

    remote = resolve_objects(url)
    if not whole:
        return remote, remote.folder
    return None, remote.fetch([name for name in remote.files if not name.endswith(PICKLE_SUFFIXES)])


def _output_folder(manifest: Manifest) -> Path:
    """Where the output takes shape on this machine."""
    if is_url(manifest.target.output):
        return Path(manifest.execute.work or last_part(manifest.target.output)).expanduser()
    return Path(manifest.target.output).expanduser()


def _refuse_unbuilt(manifest: Manifest) -> None:
    """What the schema can say and this version cannot do is refused, never ignored."""
    faults = {
        "activations.calibrate": manifest.activations.calibrate is not None and manifest.execute.stream,
        "execute.device: cuda with engine: ray": manifest.execute.device == "cuda" and manifest.execute.engine == "ray",
    }
    for where, unbuilt in faults.items():
        if unbuilt:
            raise UsageError("is not part of this version", where=where, hint="see CHANGELOG.md; remove the key")


def lock_of(job: Job) -> dict[str, Any]:
    """What ties an output to its source, manifest and tool."""
    plan, manifest = job.plan, job.manifest
    return {
        "version": 1,
        "tool": f"requant {version('requant')}",
        "manifest_sha256": hashlib.sha256(public_manifest(manifest).encode()).hexdigest(),
        "plan_sha256": plan.sha256,
        "source": {
            "folder": last_part(manifest.source.path) if manifest.source.path else None,
            "repo": manifest.source.repo,
            "commit": job.commit,
            "layout": plan.layout,
            "files": _source_record(job),
        },
        "target": {
            "format": manifest.target.format,
            "layout": manifest.target.layout,
            "runtimes": list(manifest.target.runtimes),
        },
        "input_scale": plan.input_scale_note,
        "dropped": list(plan.dropped),
        "ignored_files": [list(entry) for entry in plan.catalogue.ignored],
    }


def _source_record(job: Job) -> dict[str, dict[str, Any]]:
    """What the lock says of each source shard: on the Hub its content's hash, in a store its version, on disk the time
    of its last change."""
    record = {file: dict(facts) for file, facts in source_files(job.plan.catalogue).items()}
    if job.commit is not None or job.remote is not None:
        for facts in record.values():
            facts.pop("mtime_ns", None)
    if job.remote is not None:
        for file, facts in record.items():
            known = job.remote.files[file]
            facts.update({"version": known.version} if known.version else {"sha256": known.sha256})
    return record


def fetch_source(job: Job) -> Job:
    """The job with its source in a cache on this machine, as planned. SourceError if it is not what was planned."""
    if job.remote is None:
        return job
    fetched = open_checkpoint(job.remote.fetch(_read_files(job.plan, job.remote)))
    refuse_changed(job.plan.catalogue, fetched, job.remote.name)
    return replace(job, plan=replace(job.plan, catalogue=fetched))


def _read_files(plan: Plan, remote: Remote) -> list[str]:
    """The files of a remote source that a conversion reads; what else lies there may change as it likes."""
    named = [*(shard.file for shard in plan.catalogue.shards), *plan.catalogue.sidecars]
    return [*named, *(name for name in remote.files if name.endswith(".json") and "/" not in name)]


def _refuse_hollow(output: Path, uploader: Uploader | None, force: bool) -> None:
    """LockError if shards of an unfinished output were uploaded and freed, and this run would take them for whole."""
    if force or (uploader is not None and uploader.free):
        return
    from requant.convert.uploads import read_freed, read_uploaded

    partial = partial_of(output)
    if read_freed(partial):
        how, where = ("--push", "on the Hub") if read_uploaded(partial) else ("execute.stream", "in the object store")
        raise LockError(
            f"was begun with {how}: finished shards are {where} and not here any more",
            where=str(partial),
            hint=f"go on with {how}, or start over with --force",
        )


def _streamed(
    job: Job, inner: LocalEngine | RayEngine, make_judge: MakeJudge | None, uploader: Uploader | None
) -> tuple[Job, Engine]:
    """The job over a source with holes, and the engine that fills them window by window, here or on a cluster."""
    from requant.convert.stream import StreamEngine, streamed_source, window_budget
    from requant.convert.windows import shard_by_shard

    if job.remote is None:
        raise EnvironmentFault(
            "a streamed source is fetched while it is converted, and offline mode is on",
            where="execute.stream",
            hint="unset HF_HUB_OFFLINE, or set execute.stream: false if the cache holds the source",
        )
    if make_judge is None:
        raise UsageError("nothing compares a streamed conversion later", where="make_judge", hint="pass one")
    if not isinstance(inner, LocalEngine):
        from requant.convert.engine_shards import ShardEngine

        engine = ShardEngine(job.remote, inner, make_judge, uploader.sink if uploader else None)
    elif uploader is None:
        engine = StreamEngine(job.remote, inner, window_budget(shard_by_shard(job.plan)), make_judge)
    else:
        bounded = uploader.free and job.manifest.execute.max_disk is not None
        budget = uploader.budget if bounded else window_budget(shard_by_shard(job.plan))
        engine = StreamEngine(job.remote, inner, budget, make_judge, uploader.after)
    return replace(job, plan=streamed_source(job.plan, job.remote)), engine


def check_source_unchanged(job: Job) -> None:
    """LockError if an unfinished output was begun from other source files (size, time or header)."""
    path = partial_of(job.plan.output) / ".requant" / "lock.json"
    if not path.exists():
        return
    try:
        before: dict[str, Any] = json.loads(path.read_text())["source"]["files"]
    except (ValueError, KeyError, TypeError):
        return  # the journal's plan hash still guards the run
    now = _source_record(job)
    changed = sorted(file for file in {*before, *now} if before.get(file) != now.get(file))
    if changed:
        raise LockError(
            f"source changed since the unfinished run began: {', '.join(changed[:5])}",
            where=str(job.plan.catalogue.root),
            hint="restore the source, or start over with --force, which discards the unfinished output",
        )


def run_job(
    job: Job,
    *,
    force: bool = False,
    progress: Progress = lambda _: None,
    make_judge: MakeJudge | None = None,
    uploader: Uploader | None = None,
) -> RunResult:
    """Convert: all shards, then metadata, sidecars, manifest and lock; the folder gets its name last.

    make_judge: what compares a streamed conversion with its source; needed for one. uploader: takes finished shards.
    """
    if job.plan.input_scale_note.startswith(UNMEASURED):
        raise UsageError("the calibration was not measured", where="activations.calibrate", hint="pass prepare a bar")
    plan_sha256 = job.plan.sha256  # of the plan as anyone makes it, whatever the order of its units here
    if job.address is None:
        return _run_job(job, plan_sha256, force, progress, make_judge, uploader, None)
    from requant.convert.destination import Destination
    from requant.convert.uploads import Uploader, frees

    if uploader is not None:
        raise UsageError(
            "the shards go to target.output as they are made, and are not here to be published",
            where="--push",
            hint="publish afterwards, from a copy of the output; or leave execute.stream out",
        )
    destination = Destination(job.address, plan_sha256)
    with Uploader(job.plan, destination.sink, free=frees(job.plan)) as sending:
        return _run_job(job, plan_sha256, force, progress, make_judge, sending, destination)


def _run_job(
    job: Job,
    plan_sha256: str,
    force: bool,
    progress: Progress,
    make_judge: MakeJudge | None,
    uploader: Uploader | None,
    destination: Destination | None,
) -> RunResult:
    """run_job, once it is known where the shards go."""
    refuse_finished(job.plan.output, force)  # before anything is fetched
    _refuse_hollow(job.plan.output, uploader, force)
    if destination is not None:
        destination.check(force)
    if not force:
        check_source_unchanged(job)
    engine = engine_of(job.plan)
    compute, why = on_device(job.plan, engine)
    if compute is not None:
        engine = LocalEngine(compute.workers, compute)
    streamed = job.manifest.execute.stream
    if streamed:
        job, engine = _streamed(job, engine, make_judge, uploader)
    else:
        job = fetch_source(job)
    lock = {**lock_of(job), "plan_sha256": plan_sha256}

    def begin(folder: Path) -> None:
        if destination is not None:
            destination.begin(job.plan, folder, force)

    def finish(folder: Path, result: RunResult) -> None:
        if streamed and job.remote is not None:
            changed = job.remote.only(_read_files(job.plan, job.remote)).changed()
            if changed:
                from requant.convert.object_remote import changed_fault

                raise changed_fault(job.remote, changed)
        if uploader is not None:
            uploader.finish(folder)
        metadata = metadata_files(job.plan)
        for name, content in metadata.items():
            (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
        copy_sidecars(job.plan, folder)
        (folder / MANIFEST_FILE).write_text(public_manifest(job.manifest))
        (folder / LOCAL_FOLDER).mkdir(mode=0o700, exist_ok=True)
        (folder / LOCAL_MANIFEST).write_text(local_manifest(job.manifest))
        result.record["device"] = {"name": "cpu", "reason": why} if compute is None else compute.record(job.plan)
        (folder / RECORD_FILE).write_text(json.dumps(result.record, indent=1) + "\n")
        lock["groups"] = summarize(job.plan, result)
        shards = [shard.file for shard in job.plan.shards]
        lock["outputs"] = sorted({*shards, *metadata, *job.plan.catalogue.sidecars, MANIFEST_FILE, LOCK_FILE})
        lock["complete"] = True
        (folder / LOCK_FILE).write_text(json.dumps(lock, indent=1, ensure_ascii=False) + "\n")
        if destination is not None:
            destination.finish(folder, lock["outputs"])

    return execute(
        job.plan,
        finish,
        engine=engine,
        force=force,
        progress=progress,
        lock=lock,
        reserve=uploader is None or not uploader.free,
        begin=begin,
        order=" shard by shard" if streamed else "",
    )


def engine_of(plan: Plan) -> LocalEngine | RayEngine:
    """The engine that the manifest names. EnvironmentFault if its extra is not installed."""
    settings = plan.manifest.execute
    workers = None if settings.workers == "auto" else settings.workers
    if settings.engine == "local":
        return LocalEngine(workers or default_workers())
    from requant.convert.engine_ray import PROCESS_BYTES, RayEngine, require_ray

    require_ray()
    return RayEngine(settings.ray_address, workers, PROCESS_BYTES + worker_bytes(plan))


def on_device(plan: Plan, engine: Engine) -> tuple[GpuCompute | None, str]:
    """What computes the units of a local engine (None: the processor), and why. EnvironmentFault as choose_device."""
    if not isinstance(engine, LocalEngine):
        return None, f"engine: {engine.name}"
    from requant.convert.device import choose_device

    return choose_device(plan, engine.workers)


def copy_sidecars(plan: Plan, folder: Path) -> None:
    """Byte copies of tokenizer, code, templates and whatever else stands beside the weights. OSError as it comes."""
    for file in plan.catalogue.sidecars:
        target = folder / file
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(plan.catalogue.root / file, target)


def summarize(plan: Plan, result: RunResult) -> dict[str, Any]:
    """Totals over all groups, and the groups that are not exact or that Marlin would flush, by name."""
    totals = {"groups": 0, "exact": 0, "shifted": 0, "lossy": 0, "below_marlin": 0, "weights_quantized": 0}
    notable: list[dict[str, Any]] = []
    for index, unit in enumerate(plan.units):
        if isinstance(unit, CopyUnit):
            continue
        counts = result.counts.get(index, {})
        totals["groups"] += 1
        totals["weights_quantized"] += counts.get("weights", 0)
        for key in ("exact", "shifted", "lossy", "below_marlin"):
            totals[key] += counts.get(key, 0)
        if counts.get("lossy") or counts.get("shifted") or counts.get("below_marlin"):
            notable.append({key: value for key, value in counts.items() if key not in ("unit", "synced")})
    return {**totals, "notable": notable[:1000], "notable_total": len(notable)}
