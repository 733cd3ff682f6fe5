"""The world around a run: full and read-only disks, links, other runs, finished and foreign outputs."""

import errno
import fcntl
import hashlib
import json
import os
import resource
import shutil
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
from requant.convert import execute as execute_module
from requant.convert import files
from requant.convert.execute import partial_of
from requant.convert.pipeline import prepare, run_job
from requant.manifests.errors import EnvironmentFault, IncompleteError, LockError, ManifestError, SourceError

CLI = [sys.executable, "-m", "requant.convert.cli"]


def sha256s(folder):
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir()) if p.is_file()}


def stamps(folder):
    return {p: (p.lstat().st_mtime_ns, p.lstat().st_size) for p in sorted(folder.rglob("*"))}


# --- disks ------------------------------------------------------------------------------------------------------------


def test_a_disk_too_small_is_said_before_anything_is_written(kit, monkeypatch):
    """C115."""
    job = kit.job(kit.dsv4())
    usage = shutil.disk_usage(kit.tmp)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10_000))
    with pytest.raises(EnvironmentFault, match=r"needs [\d,]+ bytes more, the disk has 10,000 free\n  -> ") as caught:
        run_job(job)
    assert caught.value.exit_code == 6
    assert not job.plan.output.exists()
    assert not list(partial_of(job.plan.output).glob("model*"))


def test_the_space_asked_for_covers_shards_and_sidecars(kit, monkeypatch):
    source = kit.dsv4()
    (source / "tokenizer.json").write_bytes(b"x" * 50_000)
    job = kit.job(source)
    usage = shutil.disk_usage(kit.tmp)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=0))
    with pytest.raises(EnvironmentFault, match=f"needs {job.plan.bytes_out + 50_000:,} bytes more"):
        run_job(job)


SMALL_DISK = """
mount -t tmpfs -o size=200k none "$1" || exit 77
cp "$2" "$1/m.yaml"
dd if=/dev/zero of="$1/ballast" bs=1k count=150 status=none
"$3" -m requant.convert.cli run "$1/m.yaml" --quiet; echo "full $?"
ls -A "$1"
rm "$1/ballast"
"$3" -m requant.convert.cli run "$1/m.yaml" --quiet; echo "free $?"
cp -r "$1/out" "$4"
"""


def small_disk(kit, tmp):
    """The commands above in a mount namespace of their own; None where the system gives none to this user."""
    (kit.tmp / "disk").mkdir()
    (kit.tmp / "m.yaml").write_text(kit.manifest_text(kit.tmp / "src", kit.tmp / "disk" / "out", kit.EXPERTS))
    command = ["unshare", "-m", *(["-r"] if os.geteuid() else []), "sh", "-c", SMALL_DISK, "sh"]
    command += [str(kit.tmp / "disk"), str(kit.tmp / "m.yaml"), sys.executable, str(tmp)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return None if "full" not in done.stdout else done


def limited_disk(kit, tmp):
    """The same by a limit on file sizes, which any user may set: it also ends as an error in the middle of a write."""
    (kit.tmp / "m.yaml").write_text(kit.manifest_text(kit.tmp / "src", kit.tmp / "out", kit.EXPERTS))

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))

    command = [*CLI, "run", str(kit.tmp / "m.yaml"), "--quiet"]
    full = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=limit)
    assert not (kit.tmp / "out").exists()
    free = subprocess.run(command, capture_output=True, text=True, check=False)
    shutil.copytree(kit.tmp / "out", tmp)
    return full, free


def test_a_full_disk_is_one_message_and_the_run_goes_on_when_there_is_space(kit):
    """C115."""
    source = kit.dsv4()
    whole, _ = kit.convert(source, output="whole")
    full, free = limited_disk(kit, kit.tmp / "copy")
    assert full.returncode == 4
    assert full.stdout == ""
    assert full.stderr.startswith(f"error: {kit.tmp}/out.partial: the disk is full (File too large)\n  -> free some")
    assert full.stderr.count("\n") == 2
    assert free.returncode == 0, free.stderr
    assert weights(kit.tmp / "copy") == weights(whole)


def weights(folder):
    return {name: digest for name, digest in sha256s(folder).items() if name.endswith(".safetensors")}


def test_a_full_tmpfs_is_one_message_and_the_run_goes_on_when_there_is_space(kit):
    """C115; on a real full disk where the system lets this user mount one, else by the same errors from the calls."""
    source = kit.dsv4()
    whole, _ = kit.convert(source, output="whole")
    done = small_disk(kit, kit.tmp / "copy")
    if done is None:
        assert_full_by_errors(kit, source, weights(whole))
        return
    assert "the disk has" in done.stderr
    assert done.stderr.count("error: ") == 1
    assert done.stdout.startswith("full 6\nballast\nm.yaml\nout.partial\n")  # no `out`
    assert done.stdout.endswith("free 0\n")
    assert weights(kit.tmp / "copy") == weights(whole)


def assert_full_by_errors(kit, source, expected):
    job = kit.job(source, output="copy")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(execute_module, "preallocate", full)
        with pytest.raises(IncompleteError, match="the disk is full"):
            run_job(job)
    run_job(job)
    assert weights(job.plan.output) == expected


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("place", ["preallocate", "unit", "journal", "seal", "metadata", "sidecar", "rename"])
def test_a_disk_that_fails_at_any_stage_is_exit_4_and_the_run_can_go_on(kit, monkeypatch, place, number):
    source = kit.dsv4()
    (source / "tokenizer.json").write_text("{}")
    whole, _ = kit.convert(source, output="whole")
    job = kit.job(source, output="out")

    def fail(*_, **__):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        if place == "preallocate":
            patch.setattr(execute_module, "preallocate", fail)
        elif place == "unit":
            patch.setattr("requant.convert.compute.write_all", fail)
        elif place == "journal":
            patch.setattr("requant.convert.journal.Journal._append", fail)
        elif place == "seal":
            patch.setattr("requant.convert.execute._Run._seal", fail)
        elif place == "metadata":
            patch.setattr(Path, "write_text", fail)
        elif place == "sidecar":
            patch.setattr("shutil.copyfile", fail)
        else:
            patch.setattr(execute_module, "_sync_files", fail)
        with pytest.raises(IncompleteError, match=r"\n  -> "):
            run_job(job)
    assert not job.plan.output.exists()
    run_job(job)
    assert weights(job.plan.output) == weights(whole)


def test_an_output_that_cannot_be_written_is_named_before_the_work(kit, monkeypatch):
    job = kit.job(kit.dsv4())

    def read_only(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", read_only)
    with pytest.raises(EnvironmentFault, match=r"out.partial: cannot be written: Read-only file system") as caught:
        run_job(job)
    assert caught.value.exit_code == 6


WITHOUT_PRIVILEGE = """
import ctypes, os, sys
if os.geteuid() == 0:  # root reads and writes everything unless it gives up the right to
    class Header(ctypes.Structure):
        _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]
    libc = ctypes.CDLL(None, use_errno=True)
    none = (ctypes.c_uint32 * 6)()
    if libc.capset(ctypes.byref(Header(0x20080522, 0)), none):
        sys.exit(77)
from requant.convert.cli import main
main(sys.argv[1:])
"""


def test_a_read_only_folder_is_exit_6(kit):
    source = kit.dsv4()
    locked = kit.tmp / "locked"
    locked.mkdir(mode=0o555)
    (kit.tmp / "m.yaml").write_text(kit.manifest_text(source, locked / "out", kit.EXPERTS))
    command = [sys.executable, "-c", WITHOUT_PRIVILEGE, "run", str(kit.tmp / "m.yaml"), "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    locked.chmod(0o755)
    assert done.returncode == 6, done.stderr
    assert done.stderr.startswith(f"error: {locked}/out.partial: cannot be written: Permission denied\n  -> choose")
    assert not list(locked.iterdir())


def test_an_unreadable_shard_is_exit_3(kit):
    source = kit.dsv4()
    shard = source / "model-00002-of-00002.safetensors"
    shard.chmod(0)
    (kit.tmp / "m.yaml").write_text(kit.manifest_text(source, kit.tmp / "out", kit.EXPERTS))
    command = [sys.executable, "-c", WITHOUT_PRIVILEGE, "run", str(kit.tmp / "m.yaml"), "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert done.stderr.startswith(f"error: {shard.name}: cannot be read: Permission denied\n  -> ")


def test_a_file_in_place_of_a_parent_folder_is_exit_6(kit):
    source = kit.dsv4()
    (kit.tmp / "file").write_text("x")
    with pytest.raises(EnvironmentFault, match="cannot be written: Not a directory"):
        kit.convert(source, output="file/out")


@pytest.mark.parametrize("lacking", ["copy_file_range", "posix_fallocate"])
def test_a_system_without_a_call_takes_the_plain_path_to_the_same_bytes(kit, monkeypatch, lacking):
    source = kit.dsv4()
    whole, _ = kit.convert(source, output="whole")
    monkeypatch.delattr(os, lacking)
    plain, _ = kit.convert(source, output="plain")
    assert weights(plain) == weights(whole)


@pytest.mark.parametrize("number", sorted(files._NO_COPY_RANGE))
def test_a_file_system_without_a_call_takes_the_plain_path_to_the_same_bytes(kit, monkeypatch, number):
    source = kit.dsv4()
    whole, _ = kit.convert(source, output="whole")

    def refused(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "copy_file_range", refused)
    if number in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
        monkeypatch.setattr(os, "posix_fallocate", refused)
    plain, _ = kit.convert(source, output="plain")
    assert weights(plain) == weights(whole)


# --- source and output ------------------------------------------------------------------------------------------------


def test_the_source_folder_itself_is_no_output(kit):
    """C97."""
    source = kit.dsv4()
    before = stamps(source)
    with pytest.raises(ManifestError, match="the output folder is the source folder"):
        kit.convert(source, output="src")
    assert stamps(source) == before


@pytest.mark.parametrize("where", ["src/out", "src/a/b", "."])
def test_source_and_output_never_overlap(kit, where):
    """C97."""
    source = kit.dsv4()
    before = stamps(source)
    with pytest.raises(SourceError, match="source and output folders overlap") as caught:
        kit.convert(source, output=where)
    assert caught.value.exit_code == 3
    assert stamps(source) == before


def test_an_output_that_links_into_the_source_overlaps_too(kit):
    """C97."""
    source = kit.dsv4()
    (kit.tmp / "out").symlink_to(source)
    before = stamps(source)
    with pytest.raises(SourceError, match="overlap"):
        kit.convert(source)
    assert stamps(source) == before


def test_a_source_that_is_an_unfinished_output_of_that_name_is_not_written_into(kit):
    source = kit.dsv4(name="out.partial")
    before = stamps(source)
    with pytest.raises(SourceError, match="overlap"):
        kit.convert(source)
    assert stamps(source) == before


@pytest.mark.parametrize("target", ["there", "dangling"])
def test_an_output_that_is_a_link_is_written_where_it_leads(kit, target):
    source = kit.dsv4()
    if target == "there":
        (kit.tmp / "there").mkdir()
    (kit.tmp / "out").symlink_to(kit.tmp / target)
    kit.convert(source)
    assert (kit.tmp / "out").is_symlink()
    assert (kit.tmp / target / "requant.lock.json").exists()


def hub_cache(kit):
    """A checkpoint as huggingface_hub keeps it: a snapshot of links into blobs named by their hash."""
    plain = kit.dsv4(name="plain")
    (plain / "tokenizer.json").write_text("{}")
    repo = kit.tmp / "hub" / "models--acme--tiny"
    snapshot = repo / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repo / "blobs").mkdir()
    for path in plain.iterdir():
        blob = hashlib.sha256(path.read_bytes()).hexdigest()
        path.rename(repo / "blobs" / blob)
        (snapshot / path.name).symlink_to(Path("../../blobs") / blob)
    return snapshot


def test_a_hub_cache_is_read_through_its_links_and_left_as_it_was(kit):
    """C117."""
    snapshot = hub_cache(kit)
    before = stamps(snapshot.parent.parent)
    output, _ = kit.convert(snapshot)
    assert not any(path.is_symlink() for path in output.iterdir())
    assert (output / "tokenizer.json").read_text() == "{}"
    assert kit.load(output)["layers.0.ffn.experts.0.w1.weight_scale"][0] == "F8_E4M3"
    assert stamps(snapshot.parent.parent) == before
    for blob in (snapshot.parent.parent / "blobs").iterdir():
        assert hashlib.sha256(blob.read_bytes()).hexdigest() == blob.name


def test_a_link_from_a_snapshot_to_elsewhere_is_refused(kit):
    snapshot = hub_cache(kit)
    (kit.tmp / "hub" / "secret").write_text("x")
    (snapshot / "notes.txt").symlink_to(kit.tmp / "hub" / "secret")
    with pytest.raises(SourceError, match=r"notes.txt: is a link that leads out"):
        kit.convert(snapshot)


def test_no_source_file_is_ever_opened_for_writing(kit, monkeypatch):
    """C117."""
    source = kit.dsv4()
    opened = []
    real = os.open

    def spy(path, flags, *args, **kwargs):
        opened.append((str(path), flags))
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", spy)
    kit.convert(source)
    of_source = [flags for path, flags in opened if path.startswith(str(source))]
    assert len(of_source) >= 2
    assert all(flags & os.O_ACCMODE == os.O_RDONLY for flags in of_source)


# --- outputs that are there already -----------------------------------------------------------------------------------


def test_a_finished_output_is_kept_unless_forced(kit):
    """C93."""
    source = kit.dsv4()
    output, _ = kit.convert(source)
    before = stamps(output)
    with pytest.raises(LockError, match=r"is finished already\n  -> .*--force") as caught:
        kit.convert(source)
    assert caught.value.exit_code == 3
    assert stamps(output) == before
    kit.convert(source, force=True)
    assert stamps(output) != before
    assert sorted(p.name for p in kit.tmp.iterdir()) == ["out", "out.yaml", "src"]


def test_force_leaves_no_stale_shard_behind(kit):
    """C93."""
    source = kit.dsv4()
    output, _ = kit.convert(source, shard_size="20KB")
    assert len(list(output.glob("*.safetensors"))) > 2
    kit.convert(source, force=True)
    assert [p.name for p in output.glob("*.safetensors*")] == ["model.safetensors"]


def test_force_keeps_the_old_output_until_the_new_one_is_there(kit):
    source = kit.dsv4()
    output, _ = kit.convert(source)
    before = sha256s(output)

    def die(nbytes):
        if nbytes:
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        run_job(kit.job(source), force=True, progress=die)
    assert sha256s(output) == before


@pytest.mark.parametrize("force", [False, True])
def test_files_of_others_are_never_overwritten(kit, force):
    source = kit.dsv4()
    (kit.tmp / "out").mkdir()
    (kit.tmp / "out" / "thesis.tex").write_text("years of work")
    with pytest.raises(LockError, match="is not empty and was not written by requant"):
        kit.convert(source, force=force)
    assert [p.name for p in (kit.tmp / "out").iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("force", [False, True])
def test_a_foreign_folder_under_the_working_name_is_neither_published_nor_emptied(kit, force):
    source = kit.dsv4()
    (kit.tmp / "out.partial").mkdir()
    (kit.tmp / "out.partial" / "thesis.tex").write_text("years of work")
    with pytest.raises(LockError, match="is not empty and was not begun by requant"):
        kit.convert(source, force=force)
    assert [p.name for p in (kit.tmp / "out.partial").iterdir()] == ["thesis.tex"]


def test_a_file_in_place_of_the_output_is_refused(kit):
    source = kit.dsv4()
    (kit.tmp / "out").write_text("x")
    with pytest.raises(LockError, match="is in the way: not a folder"):
        kit.convert(source)
    assert (kit.tmp / "out").read_text() == "x"


def test_an_empty_folder_is_no_obstacle(kit):
    source = kit.dsv4()
    (kit.tmp / "out").mkdir()
    output, _ = kit.convert(source)
    assert (output / "requant.lock.json").exists()


def test_an_output_that_appears_during_the_run_is_not_overwritten_and_nothing_is_lost(kit):
    source = kit.dsv4()
    job = kit.job(source)

    def someone_else(nbytes):
        if nbytes and not job.plan.output.exists():
            job.plan.output.mkdir()
            (job.plan.output / "thesis.tex").write_text("x")

    with pytest.raises(LockError, match="appeared while the conversion ran"):
        run_job(job, progress=someone_else)
    shutil.rmtree(job.plan.output)
    assert run_job(job).resumed == len(job.plan.units)


def test_an_output_has_its_final_name_only_when_everything_is_in_it(kit):
    """C112."""
    job = kit.job(kit.dsv4())
    seen = []
    real = execute_module._publish

    def spy(partial, output, force):
        seen.append((output.exists(), sorted(p.name for p in partial.iterdir())))
        real(partial, output, force)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(execute_module, "_publish", spy)
        run_job(job)
    ((existed, inside),) = seen
    assert not existed
    assert {"requant.lock.json", "requant.manifest.yaml", "config.json", "model.safetensors"} < set(inside)
    assert json.loads((job.plan.output / "requant.lock.json").read_text())["complete"] is True
    assert not (job.plan.output / ".requant").exists()


# --- two runs ---------------------------------------------------------------------------------------------------------


def test_a_second_run_at_the_same_time_is_refused_with_the_firsts_process(kit):
    source = kit.dsv4()
    job = kit.job(source)
    (kit.tmp / "m.yaml").write_text(kit.manifest_text(source, kit.tmp / "out", kit.EXPERTS))
    second = []

    def during(nbytes):
        if nbytes and not second:
            command = [*CLI, "run", str(kit.tmp / "m.yaml"), "--quiet"]
            second.append(subprocess.run(command, capture_output=True, text=True, check=False))

    run_job(job, progress=during)
    assert second[0].returncode == 3
    assert f"another run is writing it: process {os.getpid()} on {os.uname().nodename}" in second[0].stderr
    assert second[0].stderr.count("\n") == 2
    assert json.loads((job.plan.output / "requant.lock.json").read_text())["complete"] is True


def test_a_dead_runs_claim_does_not_block_the_next(kit):
    job = kit.job(kit.dsv4())
    records = partial_of(job.plan.output) / ".requant"
    records.mkdir(parents=True)
    (records / "owner.json").write_text('{"pid": 1, "host": "elsewhere"}')
    run_job(job)
    assert (job.plan.output / "requant.lock.json").exists()


def test_a_run_that_waited_for_a_claim_on_a_folder_now_gone_stops(kit, monkeypatch):
    """The first run finishes between the second's open and its lock: the lock is then on a file without a name."""
    job = kit.job(kit.dsv4())
    real = fcntl.flock

    def too_late(fd, how):
        real(fd, how)
        (partial_of(job.plan.output) / ".requant" / "owner.json").unlink()

    monkeypatch.setattr(execute_module.fcntl, "flock", too_late)
    with pytest.raises(LockError, match="another run finished it this moment"):
        run_job(job)


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("span", [10, 25], ids=["by the table", "half by half"])
def test_memory_is_bounded_by_tiles_not_by_the_weight(kit, span):
    """C114."""
    name = "layers.0.ffn.experts.0.w2"
    codes, scales = kit.mx(kit.rng, 8192, 8192, low=120 - span, high=120)
    source = kit.write_checkpoint(
        kit.tmp / "src", [{f"{name}.weight": codes, f"{name}.scale": scales}], kit.DSV4_CONFIG
    )
    del codes, scales
    manifest = kit.tmp / "m.yaml"
    rules = [{"match": "*.w2", "to": "nvfp4"}]
    manifest.write_text(kit.manifest_text(source, kit.tmp / "out", rules) + "execute: {workers: 1}\n")
    job = prepare(str(manifest))
    kit.convert(kit.dsv4(name="warm", low=100, high=130), output="warmed")  # the compiler's memory is not the run's
    tracemalloc.start()
    run_job(job)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert job.plan.bytes_in > 34 * 2**20
    assert peak < 20 * 2**20
