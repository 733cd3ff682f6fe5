"""Through a small disk: the same bytes, everything judged, nothing fetched twice, the disk never fuller than said."""

import hashlib
import json
import os
import threading
from pathlib import Path

import pytest

SOURCE = "upstream/tiny"


def shas(folder):
    names = sorted(p.name for p in folder.glob("*.safetensors"))
    return {n: hashlib.sha256((folder / n).read_bytes()).hexdigest() for n in names}


def source_bytes(hub, repo=SOURCE):
    return sum(e.size for n, e in hub.tree(repo).items() if n.endswith(".safetensors"))


class DiskWatch:
    """The most that the folders of one output occupied, in bytes really allocated."""

    def __init__(self, output):
        self.output = output
        self.most = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def _watch(self):
        while not self._stop.wait(0.002):
            self.most = max(self.most, self.used())

    def used(self):
        total = 0
        for suffix in ("", ".partial", ".stream"):
            for folder, _, names in os.walk(f"{self.output}{suffix}"):
                for name in names:
                    try:
                        total += (Path(folder) / name).lstat().st_blocks * 512
                    except FileNotFoundError:
                        continue
        return total

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()


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


def test_a_connection_cut_in_a_window_is_taken_up(hub, kit, ordinary, small_windows, hub_module):
    hub.faults = [hub_module.Fault("^GET .*/resolve/[0-9a-f]{40}/.*safetensors$", cut_after=500, skip=8, times=3)]
    assert kit.requant("convert", kit.manifest(SOURCE, "streamed", stream=True), "--quiet") == 0
    assert hub.faults[0].times == 0
    assert shas(kit.tmp / "streamed") == shas(ordinary)


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


def test_forty_megabytes_through_less_disk(hub, kit, small_windows):
    hub.put_folder("upstream/big", kit.source("big", shards=2, layers=8, hidden=512, inter=1024))
    size = source_bytes(hub, "upstream/big")
    assert size > 40_000_000
    output = kit.tmp / "streamed"
    manifest = kit.manifest("upstream/big", "streamed", shard_size="2MB", stream=True, max_disk=22_000_000)
    with DiskWatch(output) as watch:
        assert kit.requant("run", manifest, "--quiet") == 0
    written = sum(p.stat().st_size for p in output.glob("*.safetensors"))
    assert written < watch.most <= 22_000_000
    assert hub.sent("upstream/big.*safetensors") <= 1.02 * size


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
