"""Through a small disk: the same bytes, everything judged, nothing fetched twice, the disk never fuller than said."""

import hashlib
import json
import os
import random

import pytest

SOURCE = "upstream/tiny"


def shas(folder):
    names = sorted(p.name for p in folder.glob("*.safetensors"))
    return {n: hashlib.sha256((folder / n).read_bytes()).hexdigest() for n in names}


def source_bytes(hub, repo=SOURCE):
    return sum(e.size for n, e in hub.tree(repo).items() if n.endswith(".safetensors"))


@pytest.fixture
def small_windows(monkeypatch):
    """Windows of a size that a tiny checkpoint needs several of."""
    from requant.convert import stream

    monkeypatch.setattr(stream, "WINDOW_MIN", 1)


@pytest.fixture
def ordinary(hub, kit):
    """The same source converted from a folder."""
    source = kit.source()
    hub.put_folder(SOURCE, source)
    assert kit.requant("convert", kit.manifest(source, "ordinary"), "--quiet") == 0
    return kit.tmp / "ordinary"


def signoff(folder):
    return json.loads((folder / "requant.signoff.json").read_text())


def test_a_streamed_checkpoint_is_the_ordinary_one_and_signed_off(hub, kit, ordinary, small_windows):
    assert kit.requant("convert", kit.manifest(SOURCE, "streamed", stream=True), "--quiet") == 0
    streamed = kit.tmp / "streamed"
    assert shas(streamed) == shas(ordinary)
    for name in ("config.json", "tokenizer.json", "LICENSE", "model.safetensors.index.json"):
        assert (streamed / name).read_bytes() == (ordinary / name).read_bytes()
    ours, theirs = signoff(streamed), signoff(ordinary)
    assert ours["signed_off"] is theirs["signed_off"] is True
    judged = {s["stage"]: s for s in ours["stages"]}
    expected = {s["stage"]: s for s in theirs["stages"]}
    for stage in ("contract", "numerics"):
        assert judged[stage]["data"] == expected[stage]["data"]
        assert judged[stage]["reason"] == expected[stage]["reason"]
    assert sorted(p.name for p in kit.tmp.glob("streamed*")) == ["streamed", "streamed.yaml"]
    locks = [json.loads((folder / "requant.lock.json").read_text()) for folder in (streamed, ordinary)]
    assert locks[0]["plan_sha256"] == locks[1]["plan_sha256"]


def test_every_byte_comes_once(hub, kit, ordinary, small_windows):
    before = hub.sent("safetensors")
    assert kit.requant("run", kit.manifest(SOURCE, "streamed", stream=True), "--quiet") == 0
    headers = 2 * source_bytes(hub)  # of shards this small the first read takes all, for the plan and for the run
    assert hub.sent("safetensors") - before - headers <= 1.02 * source_bytes(hub)
    ranges = [r.range for r in hub.asked("^GET .*/resolve/[0-9a-f]{40}/.*safetensors$") if r.range]
    assert len(ranges) > 10


def test_a_run_killed_between_windows_goes_on(hub, kit, ordinary, small_windows, monkeypatch):
    from requant.convert import stream

    original, pieces = stream.StreamEngine._fetch, []

    def failing(self, plan, window, place):
        pieces.append(place.name)
        if len(pieces) == 5:
            raise KeyboardInterrupt
        return original(self, plan, window, place)

    manifest = kit.manifest(SOURCE, "streamed", stream=True)
    with monkeypatch.context() as patched:
        patched.setattr(stream.StreamEngine, "_fetch", failing)
        assert kit.requant("convert", manifest, "--quiet") == 130
    assert (kit.tmp / "streamed.partial").exists()
    before = hub.sent("safetensors")
    assert kit.requant("convert", manifest, "--quiet") == 0
    assert hub.sent("safetensors") - before < 3 * source_bytes(hub)
    assert shas(kit.tmp / "streamed") == shas(ordinary)
    assert signoff(kit.tmp / "streamed")["signed_off"] is True
    assert signoff(kit.tmp / "streamed")["stages"][1]["data"] == signoff(ordinary)["stages"][1]["data"]


def test_connections_cut_at_twenty_random_points_are_taken_up_at_the_byte(
    hub, kit, ordinary, small_windows, hub_module
):
    rng, shards = random.Random(3), "^GET .*/resolve/[0-9a-f]{40}/.*safetensors$"
    before = hub.sent(shards)
    hub.faults = [hub_module.Fault(shards, cut_after=rng.randrange(1, 8000), skip=rng.randrange(2)) for _ in range(20)]
    assert kit.requant("convert", kit.manifest(SOURCE, "streamed", stream=True), "--quiet") == 0
    assert sum(fault.times for fault in hub.faults) == 0
    assert shas(kit.tmp / "streamed") == shas(ordinary)
    headers = 2 * source_bytes(hub)  # of shards this small the first read takes all, for the plan and for the run
    assert hub.sent(shards) - before <= 1.02 * source_bytes(hub) + headers


def test_a_window_of_wrong_bytes_is_not_signed_off(hub, kit, ordinary, small_windows, monkeypatch):
    """The comparison reads the source again from the window, so what the converter did to it shows."""
    from requant.validate.streamed import Judge

    original = Judge.piece

    def spoiled(self, source, output, tensors):
        if "model.norm.weight" in tensors:
            shard = next(p for p in output.glob("*.safetensors") if b'"model.norm.weight"' in p.read_bytes())
            data = bytearray(shard.read_bytes())
            header = 8 + int.from_bytes(data[:8], "little")
            begin = json.loads(data[8:header])["model.norm.weight"]["data_offsets"][0]
            data[header + begin] ^= 1
            shard.resolve().write_bytes(data)
        return original(self, source, output, tensors)

    monkeypatch.setattr(Judge, "piece", spoiled)
    assert kit.requant("convert", kit.manifest(SOURCE, "streamed", stream=True), "--quiet") == 5
    numerics = signoff(kit.tmp / "streamed")["stages"][1]
    assert [(f["rule"], f["where"]) for f in numerics["findings"]] == [("copy-differs", "model.norm.weight")]


def test_what_is_kept_and_two_windows_fit_the_disk(hub, kit, small_windows, disk_watch):
    hub.put_folder("upstream/big", kit.source("big", shards=2, layers=8, hidden=256, inter=512))
    size = source_bytes(hub, "upstream/big")
    assert size > 10_000_000
    output = kit.tmp / "streamed"
    manifest = kit.manifest("upstream/big", "streamed", shard_size="1MB", stream=True, max_disk=6_000_000)
    with disk_watch(output) as watch:
        assert kit.requant("run", manifest, "--quiet") == 0
    written = sum(p.stat().st_size for p in output.glob("*.safetensors"))
    assert written < watch.most <= 6_000_000
    headers = 2 * 2 * 65_536  # of two shards, for the plan and for the run
    assert hub.sent("upstream/big.*safetensors") <= 1.02 * size + headers


def test_a_disk_too_small_is_refused_before_anything_is_fetched(hub, kit, ordinary, capsys):
    assert kit.requant("run", kit.manifest(SOURCE, "streamed", stream=True, max_disk=10_000), "--quiet") == 2
    assert "the output alone is 60,0" in capsys.readouterr().err
    assert kit.requant("run", kit.manifest(SOURCE, "streamed", stream=True, max_disk=66_000), "--quiet") == 2
    assert "must be on disk together" in capsys.readouterr().err


def test_a_full_disk_while_streaming_is_one_error_and_resumes(hub, kit, ordinary, small_windows, monkeypatch, capsys):
    real, calls = os.pwrite, []

    def full(descriptor, data, at):
        calls.append(at)
        if len(calls) > 40:
            raise OSError(28, "No space left on device")
        return real(descriptor, data, at)

    manifest = kit.manifest(SOURCE, "streamed", stream=True)
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        assert kit.requant("convert", manifest, "--quiet") in (4, 6)
    assert capsys.readouterr().err.count("disk is full") == 1
    assert kit.requant("convert", manifest, "--quiet") == 0
    assert shas(kit.tmp / "streamed") == shas(ordinary)


def test_gates_that_need_the_whole_model_are_not_run(hub, kit, ordinary, small_windows):
    manifest = kit.manifest(SOURCE, "streamed", stream=True)
    sets = ("--set", "validate.kernels.modules=1")
    assert kit.requant("convert", manifest, "--quiet", *sets) == 5
    gate = next(g for g in signoff(kit.tmp / "streamed")["gates"] if g["gate"] == "kernels")
    assert (gate["status"], gate["reason"][:27]) == ("not run", "the conversion was streamed")
    sets += ("--set", "validate.kernels.required=false", "--force")
    assert kit.requant("convert", manifest, "--quiet", *sets) == 0


# --- uploading on the way ---------------------------------------------------------------------------------------------

REPO = "tester/big-mxfp4"
PR = "refs/pr/1"


def pushed(hub, kit, max_disk, shard_size, **size):
    """A source on the Hub, the manifest that takes it through `max_disk` into a pull request, and what comes of it."""
    hub.put_folder("upstream/big", kit.source("big", shards=2, layers=8, **size))
    limits = {"stream": True, "max_disk": max_disk}
    manifest = kit.manifest("upstream/big", "pushed", shard_size=shard_size, publish={"repo": REPO}, **limits)
    assert kit.requant("run", kit.manifest(kit.tmp / "big", "ordinary", shard_size=shard_size), "--quiet") == 0
    return manifest, shas(kit.tmp / "ordinary")


@pytest.fixture
def small(hub, kit, small_windows, monkeypatch):
    """4 MB through 1.2 MB: the manifest, and the sha256s of the ordinary way."""
    from requant.convert import uploads

    monkeypatch.setattr(uploads, "SMALL_BYTES", 1000)
    return pushed(hub, kit, 1_200_000, "100kB", hidden=128, inter=384)


def published(hub):
    return {n: e.lfs for n, e in hub.tree(REPO, PR).items() if n.endswith(".safetensors")}


def test_forty_megabytes_through_ten_arrive_signed_off(hub, kit, disk_watch):
    manifest, whole = pushed(hub, kit, 10_000_000, "1MB", hidden=512, inter=1024)
    size = source_bytes(hub, "upstream/big")
    assert size > 40_000_000
    before = hub.sent("upstream/big.*safetensors")
    with disk_watch(kit.tmp / "pushed") as watch:
        assert kit.requant("convert", manifest, "--push", "--quiet") == 0
    assert published(hub) == whole
    assert watch.most <= 10_000_000
    assert hub.sent("upstream/big.*safetensors") - before <= 1.02 * size
    assert hub.received("^PUT ") <= 1.02 * sum(e.size for e in hub.tree(REPO, PR).values() if e.lfs)
    report = json.loads(hub.content(REPO, "requant.signoff.json", PR))
    assert report["signed_off"] is True
    assert {n: f["sha256"] for n, f in report["files"].items() if n in whole} == whole
    assert len(hub.asked("^POST .*/commit/")) == 1
    assert list((kit.tmp / "pushed").glob("*.safetensors")) == []  # nobody is to take hollow files for shards


def test_nothing_is_visible_before_the_sign_off(hub, kit, small, monkeypatch):
    from requant.validate.streamed import Judge

    monkeypatch.setattr(Judge, "piece", lambda *_: None)
    assert kit.requant("convert", small[0], "--push", "--quiet") == 5
    assert hub.received("^PUT ") > 900_000
    assert published(hub) == {}
    assert hub.asked("^POST .*/commit/") == []


def test_an_upload_that_breaks_while_converting_goes_on(hub, kit, small, hub_module, capsys):
    manifest, whole = small
    hub.faults = [hub_module.Fault("^PUT ", cut_after=0, times=10**6, skip=4)]
    assert kit.requant("convert", manifest, "--push", "--quiet") == 7
    assert "the upload broke off" in capsys.readouterr().err
    hub.faults = []
    assert kit.requant("convert", manifest, "--quiet") == 3
    assert "was begun with --push" in capsys.readouterr().err
    assert kit.requant("convert", manifest, "--push", "--quiet") == 0
    assert published(hub) == whole
    assert len(hub.repos[REPO].pulls) == 1
    assert hub.received("^PUT ") <= 1.02 * sum(e.size for e in hub.tree(REPO, PR).values() if e.lfs)


def test_a_commit_that_is_refused_is_sent_again_without_the_shards(hub, kit, small, hub_module):
    manifest, whole = small
    hub.faults = [hub_module.Fault("^POST .*/commit/", status=400, times=1)]
    assert kit.requant("convert", manifest, "--push", "--quiet") == 7
    sent = hub.received("^PUT ")
    assert kit.requant("publish", kit.tmp / "pushed", "--quiet") == 0
    assert published(hub) == whole
    assert hub.received("^PUT ") - sent < 1000


def test_a_disk_that_cannot_hold_the_scales_is_refused(hub, kit, small, capsys):
    assert kit.requant("convert", small[0], "--push", "--quiet", "--set", "execute.max_disk=250kB") == 2
    assert "leave nothing of max_disk" in capsys.readouterr().err


def test_the_option_streams_through_that_much_disk(hub, kit, ordinary, small_windows):
    manifest = kit.manifest(SOURCE, "streamed", shard_size="10kB")
    ranges = len([r for r in hub.requests if r.range])
    assert kit.requant("run", manifest, "--quiet", "--max-disk", "200kB") == 0
    assert len([r for r in hub.requests if r.range]) > ranges + 10
    assert kit.requant("run", manifest, "--quiet", "--force", "--max-disk", "1") == 2


def test_from_xet_through_a_small_disk_to_xet(xet_hub, client, kit, small_windows):
    source = kit.source("big", shards=2, layers=4, hidden=128, inter=384)
    api = client.HfApi(endpoint=xet_hub.url)
    api.create_repo("tester/up")
    api.upload_folder(repo_id="tester/up", folder_path=source)
    assert all(e.xet for n, e in xet_hub.tree("tester/up").items() if n.endswith(".safetensors"))
    limits = {"stream": True, "max_disk": 1_000_000}
    manifest = kit.manifest("tester/up", "pushed", shard_size="50kB", publish={"repo": REPO}, **limits)
    assert kit.requant("convert", manifest, "--push", "--quiet") == 0
    assert kit.requant("run", kit.manifest(source, "ordinary", shard_size="50kB"), "--quiet") == 0
    assert published(xet_hub) == shas(kit.tmp / "ordinary")
    assert all(e.xet for n, e in xet_hub.tree(REPO, PR).items() if n.endswith(".safetensors"))
