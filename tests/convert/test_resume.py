"""Interrupted runs: killed anywhere, resumed with any number of workers, they end in the same bytes."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from requant.convert import journal as journal_module
from requant.convert import plan as plan_module
from requant.convert.execute import execute, partial_of
from requant.convert.pipeline import prepare, run_job
from requant.manifests.errors import LockError, SourceError

KILLED = """
import json, os, random, signal, sys
from requant.convert import compute, execute, journal, plan
from requant.convert.pipeline import prepare, run_job

plan.COPY_BATCH_PIECES = 4
calls = 0
deadly = None

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def deadly_at_its_turn(module, name):
    real = getattr(module, name)
    def wrapper(*args, **kwargs):
        global calls
        calls += 1
        if calls == deadly:
            if name == "write_all":  # half of it gets there
                real(args[0], bytes(args[1])[: len(bytes(args[1])) // 2], args[2])
            die()
        return real(*args, **kwargs)
    setattr(module, name, wrapper)

deadly_at_its_turn(compute, "write_all")
deadly_at_its_turn(compute, "copy_range")
deadly_at_its_turn(execute, "preallocate")
deadly_at_its_turn(execute, "write_all")
deadly_at_its_turn(execute, "_write_text")
deadly_at_its_turn(execute._Run, "_seal")
deadly_at_its_turn(journal.Journal, "_append")
deadly_at_its_turn(execute, "_sync_files")
deadly_at_its_turn(os, "fsync")

def child(manifest, at):
    # One run in a process of its own; how it ended.
    global calls, deadly
    pid = os.fork()
    if pid == 0:
        calls, deadly = 0, at
        run_job(prepare(manifest))
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

counted, folder, count = sys.argv[1:]
run_job(prepare(counted))  # also compiles the kernels, once for all children
points = sorted(random.Random(0).sample(range(1, calls + 1), int(count)))
print(json.dumps({str(at): child(folder + f"/out{number}.yaml", at) for number, at in enumerate(points)}))
"""


def sha256s(folder):
    """File -> sha256, of a finished output."""
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir()) if p.is_file()}


def weights_of(folder):
    return {name: digest for name, digest in sha256s(folder).items() if name != "requant.lock.json"}


class Stop(Exception):  # noqa: N818 - not an error
    """What a test raises to end a run in the middle."""


def stopping_after(units):
    """A progress callback that ends the run after so many units."""
    left = [units]

    def progress(nbytes):
        left[0] -= nbytes > 0
        if left[0] < 0:
            raise Stop

    return progress


@pytest.fixture
def small_batches(monkeypatch):
    """Many units also from a tiny checkpoint."""
    monkeypatch.setattr(plan_module, "COPY_BATCH_PIECES", 4)


@pytest.fixture
def job(kit, small_batches):
    """A checkpoint of three shards, wide scale spans included, to be written in three others; some forty units."""
    source = kit.dsv4(shards=3, experts=4, layers=3, low=96, high=116)
    manifest = kit.tmp / "job.yaml"
    manifest.write_text(kit.manifest_text(source, kit.tmp / "out", kit.EXPERTS, shard_size="36KB"))
    return prepare(str(manifest))


@pytest.fixture
def uninterrupted(kit, job):
    """sha256 of every file of an output made in one go."""
    run_job(job)
    found = sha256s(job.plan.output)
    shutil.move(job.plan.output, kit.tmp / "reference")
    return found


def test_the_checkpoint_of_these_tests_has_enough_units_and_shards(job):
    assert len(job.plan.units) >= 30
    assert len(job.plan.shards) >= 3


def test_sigkill_at_twenty_random_points_leads_to_the_same_bytes(kit, job, uninterrupted):
    """C110. The points lie before and within writes, copies, preallocation, fsync, journal lines and renames."""
    text = (kit.tmp / "job.yaml").read_text()

    for name in ["counted", *(f"out{number}" for number in range(20))]:
        (kit.tmp / f"{name}.yaml").write_text(text.replace(str(job.plan.output), str(kit.tmp / name)))
    script = kit.tmp / "killed.py"
    script.write_text(KILLED)
    command = [sys.executable, str(script), str(kit.tmp / "counted.yaml"), str(kit.tmp), "20"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    ends = json.loads(done.stdout)
    assert list(ends.values()) == [-signal.SIGKILL] * 20
    assert max(map(int, ends)) > 100
    resumed = []
    for number in range(20):
        assert not (kit.tmp / f"out{number}").exists()
        resumed.append(run_job(prepare(str(kit.tmp / f"out{number}.yaml"))).resumed)
        assert shards_only(sha256s(kit.tmp / f"out{number}")) == shards_only(uninterrupted)
    assert resumed[0] < len(job.plan.units) // 4
    assert resumed[-1] > len(job.plan.units) // 2


def shards_only(found):
    """Everything but what names the output's own path."""
    return {name: digest for name, digest in found.items() if not name.startswith("requant.")}


@pytest.mark.parametrize("workers", [1, 2, 7])
def test_any_number_of_workers_gives_the_same_bytes(kit, job, uninterrupted, workers):
    execute(job.plan, lambda folder, result: None, workers=workers)
    assert sha256s(job.plan.output) == {n: d for n, d in uninterrupted.items() if n.endswith(".safetensors")}


def test_a_resumed_run_does_not_do_the_finished_units_again(job, uninterrupted):
    with pytest.raises(Stop):
        execute(job.plan, lambda *_: None, workers=1, progress=stopping_after(20))
    before = {p: p.stat().st_mtime_ns for p in partial_of(job.plan.output).glob("*.safetensors")}
    seen = []
    result = run_job(job, progress=seen.append)
    assert result.resumed >= 20
    assert seen[0] == sum(job.plan.units[i].nbytes for i in range(len(job.plan.units)) if i < result.resumed)
    assert sum(seen) == job.plan.bytes_in
    assert len(before) >= 1
    assert all((job.plan.output / path.name).stat().st_mtime_ns == stamp for path, stamp in before.items())
    assert sha256s(job.plan.output) == uninterrupted


def test_counts_in_the_lock_cover_the_units_of_the_earlier_run_too(kit, job, uninterrupted):
    with pytest.raises(Stop):
        execute(job.plan, lambda *_: None, workers=2, progress=stopping_after(17))
    run_job(job)
    groups = [
        json.loads((f / "requant.lock.json").read_text())["groups"] for f in (job.plan.output, kit.tmp / "reference")
    ]
    assert groups[0] == groups[1]
    assert groups[0]["groups"] == 3 * 4 * 2
    assert groups[0]["exact"] + groups[0]["shifted"] + groups[0]["lossy"] == 3 * 4 * 3 * 64 * 32 // 16


# --- what may happen to the records between two runs ------------------------------------------------------------------


@pytest.fixture
def stopped(job, uninterrupted):
    """The working folder of a run that ended in the middle, with at least one shard sealed."""
    with pytest.raises(Stop):
        run_job(job, progress=stopping_after(25))
    partial = partial_of(job.plan.output)
    assert list(partial.glob("*.safetensors"))
    assert list(partial.glob("*.part"))
    return partial


def cut_last_line(partial):
    path = partial / ".requant" / "journal.jsonl"
    os.truncate(path, path.stat().st_size - 5)


def half_a_head(partial):
    os.truncate(partial / ".requant" / "journal.jsonl", 20)


def zeros_at_the_end(partial):
    """What a crashed file system may leave."""
    with (partial / ".requant" / "journal.jsonl").open("ab") as handle:
        handle.write(b"\0" * 100 + b"\n")


def no_object_in_a_line(partial):
    with (partial / ".requant" / "journal.jsonl").open("ab") as handle:
        handle.write(b"7\n")


def journal_gone(partial):
    (partial / ".requant" / "journal.jsonl").unlink()


def journal_empty(partial):
    os.truncate(partial / ".requant" / "journal.jsonl", 0)


def part_gone(partial):
    next(iter(sorted(partial.glob("*.part")))).unlink()


def part_truncated(partial):
    path = next(iter(sorted(partial.glob("*.part"))))
    os.truncate(path, path.stat().st_size - 1)


def sealed_gone(partial):
    next(iter(sorted(partial.glob("*.safetensors")))).unlink()


def sealed_truncated(partial):
    path = next(iter(sorted(partial.glob("*.safetensors"))))
    os.truncate(path, path.stat().st_size // 2)


def all_parts_gone(partial):
    for path in partial.glob("*.part"):
        path.unlink()


def everything_but_the_records_gone(partial):
    for path in partial.glob("model*"):
        path.unlink()


@pytest.mark.parametrize(
    "disturb",
    [
        cut_last_line,
        half_a_head,
        zeros_at_the_end,
        no_object_in_a_line,
        journal_gone,
        journal_empty,
        part_gone,
        part_truncated,
        sealed_gone,
        sealed_truncated,
        all_parts_gone,
        everything_but_the_records_gone,
    ],
    ids=lambda disturb: disturb.__name__,
)
def test_what_happens_between_runs_does_not_change_the_bytes(job, uninterrupted, stopped, disturb):
    disturb(stopped)
    run_job(job)
    assert sha256s(job.plan.output) == uninterrupted


def test_a_disturbed_run_may_be_killed_again(job, uninterrupted, stopped):
    part_gone(stopped)
    with pytest.raises(Stop):
        execute(job.plan, lambda *_: None, workers=1, progress=stopping_after(3))
    sealed_truncated(stopped)
    cut_last_line(stopped)
    run_job(job)
    assert sha256s(job.plan.output) == uninterrupted


def test_half_copies_of_workers_that_were_killed_are_not_published(job, uninterrupted, stopped):
    half = partial_of(job.plan.output) / "model-00001-of-00003.safetensors.part.node-4026531836-17"
    half.write_bytes(b"half")
    run_job(job)
    assert not list(job.plan.output.glob("*.part*"))


def test_shards_without_a_journal_are_not_taken_for_this_plans(job, uninterrupted, stopped):
    """Sealed shards of the right name and size, but of who knows which plan."""
    sealed = next(iter(sorted(stopped.glob("*.safetensors"))))
    sealed.write_bytes(b"\xee" * sealed.stat().st_size)
    journal_gone(stopped)
    run_job(job)
    assert sha256s(job.plan.output) == uninterrupted


def test_after_a_reboot_only_sealed_shards_count(monkeypatch, job, uninterrupted, stopped):
    """What the page cache held when the machine died is gone, whatever the journal says."""
    for part in stopped.glob("*.part"):
        part.write_bytes(b"\0" * part.stat().st_size)  # blocks that never reached the disk
    monkeypatch.setattr(journal_module, "boot_id", lambda: "another boot")
    sealed = {p.name: p.stat().st_ino for p in stopped.glob("*.safetensors")}
    assert 0 < run_job(job).resumed < 25  # units that lie in sealed shards alone, of those that were done
    assert sha256s(job.plan.output) == uninterrupted  # the lock with its counts included
    assert {name: (job.plan.output / name).stat().st_ino for name in sealed} == sealed


def test_after_a_reboot_and_another_kill_the_second_boots_units_count(monkeypatch, job, uninterrupted, stopped):
    for part in stopped.glob("*.part"):
        part.write_bytes(b"\0" * part.stat().st_size)
    monkeypatch.setattr(journal_module, "boot_id", lambda: "another boot")
    with pytest.raises(Stop):
        execute(job.plan, lambda *_: None, workers=1, progress=stopping_after(4))
    result = run_job(job)
    assert result.resumed >= 4
    assert sha256s(job.plan.output) == uninterrupted


def test_another_plan_is_refused_and_force_starts_over(kit, job, stopped):
    """C111."""
    rules = [{"match": "layers.0.ffn.experts.*", "to": "nvfp4"}, {"match": "*", "to": "keep"}]
    other = kit.job(kit.tmp / "src", rules, shard_size="36KB")
    before = weights_of(stopped)
    with pytest.raises(LockError, match=r"begun with another plan.*\n  -> .*--force") as caught:
        run_job(other)
    assert caught.value.exit_code == 3
    assert weights_of(stopped) == before
    run_job(other, force=True)
    tensors = kit.load(other.plan.output)
    assert tensors["layers.0.ffn.experts.0.w1.weight_scale"][0] == "F8_E4M3"
    assert tensors["layers.1.ffn.experts.0.w1.scale"][0] == "F8_E8M0"


def test_another_version_of_the_tool_is_another_plan(monkeypatch, job, stopped):
    """C111."""
    monkeypatch.setattr("importlib.metadata.version", lambda _: "99.0")
    job.plan.__dict__.pop("sha256", None)
    with pytest.raises(LockError, match="begun with another plan"):
        execute(job.plan, lambda *_: None, workers=1)


def test_other_workers_or_gates_are_no_other_plan(kit, job, uninterrupted, stopped):
    text = (kit.tmp / "job.yaml").read_text() + "execute: {workers: 3}\nvalidate: {numerics: {min_sqnr_db: 20}}\n"
    (kit.tmp / "job.yaml").write_text(text)
    result = run_job(prepare(str(kit.tmp / "job.yaml")))
    assert result.resumed >= 25
    assert shards_only(sha256s(job.plan.output)) == shards_only(uninterrupted)


def touch(path):
    os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns + 10**9))


def flip_last_byte(path):
    raw = path.read_bytes()
    path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    touch(path)


@pytest.mark.parametrize("change", [touch, flip_last_byte])
def test_a_source_changed_between_runs_is_refused_by_name(kit, job, stopped, change):
    change(kit.tmp / "src" / "model-00002-of-00003.safetensors")
    before = weights_of(stopped)
    with pytest.raises(LockError, match=r"source changed .*: model-00002-of-00003.safetensors\n  -> ") as caught:
        run_job(prepare(str(kit.tmp / "job.yaml")))
    assert caught.value.exit_code == 3
    assert weights_of(stopped) == before
    assert not job.plan.output.exists()


def test_a_source_changed_during_the_run_is_refused_and_nothing_of_it_is_believed(kit, job, uninterrupted):
    path = kit.tmp / "src" / "model-00003-of-00003.safetensors"
    stamp = path.stat().st_mtime_ns
    raw = path.read_bytes()
    calls = []

    def progress(nbytes):
        if nbytes and not calls:
            flip_last_byte(path)
            calls.append(nbytes)

    with pytest.raises(SourceError, match=r"model-00003-of-00003.safetensors: changed while it was converted"):
        run_job(job, progress=progress)
    assert not job.plan.output.exists()
    path.write_bytes(raw)  # a careful user restores it, time and all
    os.utime(path, ns=(stamp, stamp))
    run_job(job)
    assert sha256s(job.plan.output) == uninterrupted


def test_a_source_truncated_during_the_run_is_a_source_error_not_zeros(kit, job):
    """C90, C97: nothing is mapped, so a file that shrinks is neither zeros nor a signal."""
    path = kit.tmp / "src" / "model-00003-of-00003.safetensors"
    calls = []

    def progress(nbytes):
        if nbytes and not calls:
            os.truncate(path, 5000)
            calls.append(nbytes)

    with pytest.raises(SourceError, match=r"model-00003-of-00003.safetensors"):
        execute(job.plan, lambda *_: None, workers=1, progress=progress)
    assert not job.plan.output.exists()


# --- random checkpoints -----------------------------------------------------------------------------------------------


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**32 - 1),
    shards=st.integers(1, 4),
    experts=st.integers(1, 3),
    low=st.integers(0, 254),
    span=st.integers(0, 30),
    shard_kb=st.integers(3, 60),
    kill=st.lists(st.integers(0, 20), min_size=1, max_size=3),
    workers=st.integers(1, 4),
)
def test_random_checkpoints_killed_anywhere_end_in_the_same_bytes(
    kit, small_batches, seed, shards, experts, low, span, shard_kb, kill, workers
):
    for folder in ("src", "whole", "pieces", "pieces.partial"):
        shutil.rmtree(kit.tmp / folder, ignore_errors=True)
    kit.rng = np.random.default_rng(seed)
    source = kit.dsv4(shards=shards, experts=experts, low=low, high=min(low + span, 254))
    whole, _ = kit.convert(source, output="whole", shard_size=f"{shard_kb}KB")
    job = kit.job(source, output="pieces", shard_size=f"{shard_kb}KB")
    for units in kill:
        try:
            execute(job.plan, lambda *_: None, workers=workers, progress=stopping_after(units))
        except Stop:
            continue
        break
    else:
        execute(job.plan, lambda *_: None, workers=workers)
    assert sha256s(job.plan.output) == {n: d for n, d in sha256s(whole).items() if n.endswith(".safetensors")}
