"""Sources and outputs in an object store, on the one that fsspec brings along: in memory, in this process."""

import hashlib
import json
import re
from pathlib import Path

import pytest
from requant.manifests.errors import ManifestError

TARGET = "memory://results/tiny"


def stored(memory, url=TARGET):
    """sha256 by name of the objects below an address."""
    root = "/" + url.partition("://")[2]
    return {
        path.removeprefix(root + "/"): hashlib.sha256(memory.fs.cat_file(path)).hexdigest()
        for path in memory.fs.find(root)
    }


def local_files(folder):
    return {
        p.relative_to(folder).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in folder.rglob("*")
        if p.is_file() and ".requant-local" not in p.parts
    }


@pytest.fixture
def ordinary(kit):
    """The source, and what a conversion from folder to folder makes of it."""
    source = kit.source()
    assert kit.requant("convert", kit.manifest(source, "ordinary"), "--quiet") == 0
    return source, kit.shas(kit.tmp / "ordinary")


@pytest.mark.parametrize("stream", [False, True])
def test_from_a_store_to_a_folder_the_bytes_are_the_same(memory, kit, ordinary, stream):
    url = memory.put(ordinary[0])
    assert kit.requant("convert", kit.manifest(url, stream=stream), "--quiet") == 0
    assert kit.shas(kit.tmp / "out") == ordinary[1]
    assert kit.signoff(kit.tmp / "out")["signed_off"] is True
    lock = json.loads((kit.tmp / "out" / "requant.lock.json").read_text())
    assert lock["source"]["folder"] == "model"
    facts = lock["source"]["files"]["model-00001-of-00003.safetensors"]
    assert set(facts) == {"size", "header_sha256", "version"}
    assert kit.requant("validate", kit.tmp / "out", "--quiet") == 0  # fetched anew, or from the cache


@pytest.mark.parametrize("limits", [{}, {"stream": True}, {"stream": True, "max_disk": 100_000}])
def test_to_a_store_every_file_arrives_and_the_lock_comes_last(memory, kit, ordinary, limits, monkeypatch):
    from requant.convert.objects import Store

    puts, real = [], Store.put
    monkeypatch.setattr(Store, "put", lambda self, name, content: puts.append(name) or real(self, name, content))
    url = memory.put(ordinary[0])
    shard_size = "15kB" if limits.get("max_disk") else "40kB"
    assert kit.requant("run", kit.manifest(ordinary[0], "again", shard_size=shard_size), "--quiet") == 0
    manifest = kit.manifest(url, target=TARGET, shard_size=shard_size, **limits)
    assert kit.requant("convert", manifest, "--quiet") == 0
    found, work = stored(memory), kit.tmp / "out"
    shards = kit.shas(kit.tmp / "again")
    assert {name: sha for name, sha in found.items() if name.endswith(".safetensors")} == shards
    expected = {name: sha for name, sha in local_files(work).items() if not name.endswith(".safetensors")}
    assert {name: sha for name, sha in found.items() if not name.endswith(".safetensors")} == expected
    signoff = kit.signoff(work)
    assert signoff["signed_off"] is True
    assert {name: facts["sha256"] for name, facts in signoff["files"].items() if name in shards} == shards
    assert puts[0] == ".requant/begun.json"
    order = [name for name in puts if not name.startswith("requant.signoff")]
    assert order[-2:] == ["config.json", "requant.lock.json"]
    assert sorted(order[1 : 1 + len(shards)]) == sorted(shards)
    hollow = kit.shas(work) != shards
    assert hollow is ("max_disk" in limits)


def test_plan_and_run_name_the_address(memory, kit, ordinary, capsys):
    manifest = kit.manifest(memory.put(ordinary[0]), target=TARGET)
    capsys.readouterr()
    assert kit.requant("plan", manifest) == 0
    assert f"  output  {TARGET} by way of {kit.tmp / 'out'}\n" in capsys.readouterr().out
    assert kit.requant("run", manifest, "--quiet") == 0
    out = capsys.readouterr().out
    assert f"wrote {TARGET}: 2 shards" in out
    assert f"next: requant validate {kit.tmp / 'out'}\n" in out, "the shards are there, too"
    assert kit.requant("validate", kit.tmp / "out", "--quiet") == 0
    assert "requant.signoff.json" in stored(memory)


def test_a_finished_output_is_not_written_over_without_force(memory, kit, ordinary, capsys):
    manifest = kit.manifest(ordinary[0], target=TARGET)
    assert kit.requant("convert", manifest, "--quiet") == 0
    (kit.tmp / "out").rename(kit.tmp / "away")
    before = stored(memory)
    assert kit.requant("run", manifest, "--quiet") == 3
    assert f"{TARGET}: is finished already" in capsys.readouterr().err
    assert stored(memory) == before
    other = kit.manifest(ordinary[0], target=TARGET, shard_size="1MB")
    assert kit.requant("run", other, "--quiet", "--force") == 0
    found = stored(memory)
    assert [name for name in found if name.endswith(".safetensors")] == ["model.safetensors"]
    assert "model.safetensors.index.json" not in found
    assert not [name for name in found if name.startswith("requant.signoff")], "it judged other bytes"


def test_what_is_finished_is_said_before_anything_is_fetched(memory, kit, ordinary, capsys, monkeypatch):
    from requant.convert import pipeline

    manifest = kit.manifest(memory.put(ordinary[0]))
    assert kit.requant("convert", manifest, "--quiet") == 0
    monkeypatch.setattr(pipeline, "fetch_source", lambda _: pytest.fail("fetched"))
    assert kit.requant("run", manifest, "--quiet") == 3
    assert f"{kit.tmp / 'out'}: is finished already" in capsys.readouterr().err


def test_a_sign_off_is_not_put_beside_another_output(memory, kit, ordinary, capsys):
    manifest = kit.manifest(ordinary[0], target=TARGET)
    assert kit.requant("run", manifest, "--quiet") == 0
    (kit.tmp / "out").rename(kit.tmp / "old")
    other = kit.manifest(ordinary[0], target=TARGET, shard_size="1MB")
    assert kit.requant("convert", other, "--quiet", "--force") == 0
    before = stored(memory)
    assert kit.requant("validate", kit.tmp / "old", "--quiet") == 3
    assert f"{TARGET}: holds another output than {kit.tmp / 'old'}" in capsys.readouterr().err
    assert stored(memory) == before
    assert kit.requant("validate", kit.tmp / "out", "--quiet") == 0


def test_a_piece_that_fails_leaves_no_other_piece_writing(memory, kit, monkeypatch):
    """A closed descriptor's number may be another file's by then."""
    import threading

    from requant.convert import object_remote
    from requant.convert.object_remote import ObjectRemote
    from requant.convert.remote import RemoteFile
    from requant.manifests.errors import SourceError

    failed, wrong = threading.Event(), []

    def read(self, name, begin, end, write):
        if begin == 0:
            failed.set()
            raise SourceError("ends at byte 0")
        failed.wait()
        threading.Event().wait(0.05)
        try:
            write(bytes(end - begin), begin)
        except OSError as error:
            wrong.append(error)

    monkeypatch.setattr(object_remote, "_PIECE", 10)
    monkeypatch.setattr(ObjectRemote, "read", read)
    remote = ObjectRemote("memory://source/model", {"a.bin": RemoteFile("a.bin", 60, None, "1")})
    with pytest.raises(SourceError, match="ends at byte 0"):
        remote.fetch(["a.bin"])
    assert wrong == []
    assert list(remote.folder.iterdir()) == []


def test_a_record_is_on_the_disk_before_its_shard_is_made_hollow(memory, kit, ordinary, monkeypatch):
    import os

    from requant.convert import uploads

    synced, hollowed, fsync, hollow = [], [], os.fsync, uploads.hollow

    def watched(fd):
        synced.append(str(Path(f"/proc/self/fd/{fd}").readlink()))
        fsync(fd)

    def making(path, *more):
        hollowed.append([name for name in synced if "stored" in name or name.endswith(".requant-local")][-2:])
        hollow(path, *more)

    monkeypatch.setattr(os, "fsync", watched)
    monkeypatch.setattr(uploads, "hollow", making)
    url = memory.put(ordinary[0])
    manifest = kit.manifest(url, target=TARGET, stream=True, max_disk=100_000, shard_size="15kB")
    assert kit.requant("convert", manifest, "--quiet") == 0
    assert len(hollowed) > 2
    for names in hollowed:
        assert [name.rpartition("/")[2] for name in names] == ["stored.new", ".requant-local"]


def test_objects_of_others_are_never_in_the_way_of_force(memory, kit, ordinary, capsys):
    memory.fs.pipe_file("/results/tiny/thesis.txt", b"mine")
    manifest = kit.manifest(ordinary[0], target=TARGET)
    assert kit.requant("run", manifest, "--quiet", "--force") == 3
    assert "holds objects that requant did not write" in capsys.readouterr().err
    assert list(stored(memory)) == ["thesis.txt"]


def test_an_unfinished_output_of_another_plan_is_refused(memory, kit, ordinary, capsys, monkeypatch):
    from requant.convert.objects import Store

    real = Store.put

    def failing(self, name, content):
        if name == "config.json":
            raise KeyboardInterrupt
        real(self, name, content)

    with monkeypatch.context() as patched:
        patched.setattr(Store, "put", failing)
        assert kit.requant("run", kit.manifest(ordinary[0], target=TARGET), "--quiet") == 130
    assert "requant.lock.json" not in stored(memory)
    assert "config.json" not in stored(memory), "no loader opens it"
    other = kit.manifest(ordinary[0], "other", target=TARGET, shard_size="1MB")
    assert kit.requant("run", other, "--quiet") == 3
    assert "begun with another plan" in capsys.readouterr().err
    with monkeypatch.context() as patched:
        patched.setattr(Store, "put", failing)
        assert kit.requant("run", other, "--quiet", "--force") == 130
    assert len([name for name in stored(memory) if name.endswith(".safetensors")]) == 3, "of both plans"
    assert kit.requant("run", kit.manifest(ordinary[0], target=TARGET), "--quiet", "--force") == 0
    found = stored(memory)
    assert {name: sha for name, sha in found.items() if name.endswith(".safetensors")} == ordinary[1]
    assert ".requant/begun.json" not in found


def test_a_shard_that_was_changed_in_the_store_meanwhile_is_sent_again(memory, kit, ordinary, monkeypatch):
    from requant.convert.destination import Destination

    def stop(*_):
        raise KeyboardInterrupt

    manifest = kit.manifest(memory.put(ordinary[0]), target=TARGET, stream=True)
    with monkeypatch.context() as patched:
        patched.setattr(Destination, "finish", stop)
        assert kit.requant("run", manifest, "--quiet") == 130
    memory.fs.pipe_file("/results/tiny/model-00001-of-00002.safetensors", b"x")
    memory.fs.rm_file("/results/tiny/model-00002-of-00002.safetensors")
    assert kit.requant("run", manifest, "--quiet") == 0
    assert {n: s for n, s in stored(memory).items() if n.endswith(".safetensors")} == ordinary[1]


@pytest.mark.parametrize("stream", [False, True])
def test_a_source_that_changes_on_the_way_is_one_error_and_counts_for_nothing(
    memory, kit, ordinary, stream, capsys, monkeypatch
):
    from requant.convert.objects import Store

    url = memory.put(ordinary[0])
    name = "model-00002-of-00003.safetensors"
    real, reads = Store.read, []

    def changing(self, file, begin, end, write):
        real(self, file, begin, end, write)
        reads.append(file)
        if reads.count(name) == (3 if stream else 2):  # after the headers
            memory.fs.pipe_file(f"/bucket/model/{name}", memory.fs.cat_file(f"/bucket/model/{name}"))

    with monkeypatch.context() as patched:
        patched.setattr(Store, "read", changing)
        assert kit.requant("run", kit.manifest(url, stream=stream), "--quiet") == 3
    assert f"changed since it was planned with: {name}" in capsys.readouterr().err
    assert not (kit.tmp / "out").exists()
    if stream:
        assert kit.requant("run", kit.manifest(url, stream=stream), "--quiet") == 3
        assert "source changed since the unfinished run began" in capsys.readouterr().err
    assert kit.requant("run", kit.manifest(url, stream=stream), "--quiet", "--force") == 0
    assert kit.shas(kit.tmp / "out") == ordinary[1]


def test_what_a_conversion_does_not_read_may_change(memory, kit, ordinary, monkeypatch):
    from requant.convert.objects import Store

    url = memory.put(ordinary[0])
    memory.fs.pipe_file("/bucket/model/old.bin", b"a pickle of old")
    real = Store.read

    def changing(self, file, begin, end, write):
        real(self, file, begin, end, write)
        memory.fs.pipe_file("/bucket/model/old.bin", b"another")

    monkeypatch.setattr(Store, "read", changing)
    assert kit.requant("run", kit.manifest(url, stream=True), "--quiet") == 0
    assert kit.shas(kit.tmp / "out") == ordinary[1]


def test_a_name_that_leads_out_is_refused(memory, kit, ordinary, capsys, monkeypatch):
    from requant.convert import objects

    fs = objects._filesystem("memory")
    monkeypatch.setattr(fs, "find", lambda *_, **__: {"/bucket/model/../../evil": {"size": 1}}, raising=False)
    assert kit.requant("plan", kit.manifest("memory://bucket/model")) == 3
    assert "leads out of the folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("s3://AKIAIOSFODNN7EXAMPLE:secretsecret@bucket/m", "an address holds no credentials"),
        ("s3://bucket/m?token=secretsecret", "an address holds no credentials"),
        ("s3://bucket", "is not s3://BUCKET/PREFIX"),
        ("s3://bucket/a/../b", "is not s3://BUCKET/PREFIX"),
        ("hf://owner/name", "the Hub has keys of its own"),
        ("https://host/model", "https:// has no listing"),
    ],
)
def test_an_address_that_cannot_be_is_refused_without_its_secrets(kit, address, said, capsys):
    assert kit.requant("check", kit.manifest(address)) == 2
    err = capsys.readouterr().err
    assert said in err
    assert "secretsecret" not in err


def test_a_missing_package_is_one_clear_line(kit, capsys, monkeypatch):
    import fsspec
    from requant.convert import objects

    def without(scheme, **_):
        raise ImportError("Install s3fs to access S3")

    objects._filesystem.cache_clear()
    monkeypatch.setattr(fsspec, "filesystem", without)
    assert kit.requant("plan", kit.manifest("s3://bucket/model")) == 6
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[0] == "error: s3://: cannot be reached: Install s3fs to access S3"
    assert lines[1].startswith("  -> pip install 'requant[objects]'")
    assert len(lines) == 2


def test_work_belongs_to_an_output_in_a_store(kit):
    from requant.manifests.load import load_manifest

    with pytest.raises(ManifestError, match="work is for outputs in an object store"):
        load_manifest(kit.manifest(kit.tmp / "src"), ["execute.work=w"])


def test_a_published_manifest_and_lock_name_no_bucket(memory, kit, ordinary):
    manifest = kit.manifest(memory.put(ordinary[0], "memory://secret-bucket/model"), target=TARGET, stream=True)
    assert kit.requant("convert", manifest, "--quiet") == 0
    for path in (kit.tmp / "out").rglob("*"):
        if path.is_file() and ".requant-local" not in path.parts:
            assert b"secret-bucket" not in path.read_bytes(), path.name
            assert not re.search(rb"memory://", path.read_bytes()), path.name


def test_init_writes_a_manifest_for_an_address(memory, kit, ordinary, capsys):
    url = memory.put(ordinary[0])
    assert kit.requant("init", url) == 0
    text = capsys.readouterr().out
    assert f'path: "{url}"\n' in text
    (kit.tmp / "made.yaml").write_text(text)
    assert kit.requant("plan", kit.tmp / "made.yaml") == 0


@pytest.mark.parametrize(
    ("source", "target"), [("s3://b/m", "s3://b/m"), ("s3://b/m", "s3://b/m/out"), ("s3://b/m/src", "s3://b/m/")]
)
def test_source_and_output_do_not_lie_in_one_another(kit, source, target):
    from requant.manifests.load import load_manifest

    with pytest.raises(ManifestError, match="source and output lie in one another"):
        load_manifest(kit.manifest(source, target=target))
    load_manifest(kit.manifest("s3://b/m", target="s3://b/m-nvfp4"))
