"""Source and output on a real S3 server: the same bytes, whatever breaks on the way, and nothing half-made in sight."""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest
from forward_proxy import ForwardProxy

pytestmark = pytest.mark.objects

SOURCE, TARGET = "s3://models/tiny", "s3://out/tiny"
SHARDS = "^GET /models/tiny/.*safetensors"
DRIVER = """
import sys
from requant.convert import objects, stream, uploads
from requant.convert.cli import main

stream.WINDOW_MIN, uploads.SMALL_BYTES = 1, 1000
objects.PART_BYTES = 5 * 2**20
main(sys.argv[1:])
"""


@pytest.fixture
def ordinary(kit, s3):
    """The source, in the store too, and what a conversion from folder to folder makes of it."""
    source = kit.source()
    s3.put_folder("models", "tiny", source)
    assert kit.requant("run", kit.manifest(source, "ordinary"), "--quiet") == 0
    return kit.shas(kit.tmp / "ordinary")


def stored(s3, bucket="out", prefix="tiny"):
    """sha256 by name of the shards below a prefix."""
    return {
        name: hashlib.sha256(s3.content(bucket, f"{prefix}/{name}")).hexdigest()
        for name in sorted(s3.objects(bucket, prefix))
        if name.endswith(".safetensors")
    }


def test_forty_megabytes_from_bucket_to_bucket_through_ten_signed_off(s3, kit, disk_watch):
    source = kit.source("big", shards=2, layers=8, hidden=512, inter=1024)
    s3.put_folder("models", "big", source)
    assert kit.requant("run", kit.manifest(source, "ordinary", shard_size="1MB"), "--quiet") == 0
    whole = kit.shas(kit.tmp / "ordinary")
    limits = {"stream": True, "max_disk": 10_000_000}
    manifest = kit.manifest("s3://models/big", target=TARGET, shard_size="1MB", **limits)
    with disk_watch(kit.tmp / "out") as watch:
        assert kit.requant("convert", manifest, "--quiet") == 0
    assert watch.most <= 10_000_000
    assert stored(s3) == whole
    size = sum(n for name, n in s3.objects("models", "big").items() if name.endswith(".safetensors"))
    assert size > 40_000_000
    assert s3.sent("^GET /models/big/.*safetensors") <= 1.02 * size
    signoff = json.loads(s3.content("out", "tiny/requant.signoff.json"))
    assert signoff["signed_off"] is True
    assert {n: f["sha256"] for n, f in signoff["files"].items() if n in whole} == whole
    here = {path.name for path in (kit.tmp / "out").iterdir()} - {".requant-local"}
    assert s3.objects("out", "tiny").keys() == {*whole, *here}
    assert not here & whole.keys(), "nobody is to take hollow files for shards"
    order = [r.line.split("?")[0].removeprefix("PUT /out/tiny/") for r in s3.asked("^PUT /out/tiny/")]
    assert order[0] == ".requant/begun.json"
    before = order[: order.index("requant.lock.json")]
    assert before[-1] == "config.json"
    assert whole.keys() <= set(before)


def test_a_plan_reads_headers_only_by_ranges(s3, kit, ordinary):
    big = kit.source("big", shards=1, layers=2, hidden=512, inter=1024)
    s3.put_folder("large", "m", big)
    size = (big / "model-00001-of-00001.safetensors").stat().st_size
    assert size > 5_000_000
    assert kit.requant("plan", kit.manifest("s3://large/m")) == 0
    asked = s3.asked("^GET /large/m/.*safetensors$")
    assert [request.range for request in asked] == ["bytes=0-65535"]
    assert s3.sent("^GET /large/m/.*safetensors$") == 65_536


def test_every_byte_of_the_source_comes_once(s3, kit, ordinary):
    size = sum(n for name, n in s3.objects("models", "tiny").items() if name.endswith(".safetensors"))
    assert kit.requant("run", kit.manifest(SOURCE, stream=True), "--quiet") == 0
    assert kit.shas(kit.tmp / "out") == ordinary
    assert s3.sent(SHARDS) <= 1.02 * size + 2 * size  # headers: of shards this small the first read takes all, twice


def test_connections_cut_at_twenty_points_while_reading_give_the_same_bytes(s3, kit, ordinary, fault):
    rng = random.Random(5)
    s3.faults = [fault(SHARDS, cut_after=rng.randrange(8000), skip=rng.randrange(2)) for _ in range(20)]
    assert kit.requant("run", kit.manifest(SOURCE, stream=True), "--quiet") == 0
    assert sum(f.times for f in s3.faults) == 0
    assert kit.shas(kit.tmp / "out") == ordinary


@pytest.mark.parametrize(
    ("status", "code"),
    [(500, "InternalError"), (503, "SlowDown"), (503, "ServiceUnavailable"), (400, "RequestTimeout")],
)
@pytest.mark.parametrize("match", [SHARDS, "^PUT /out/tiny/model", "^GET /models.*list-type", "^PUT .*begun.json"])
def test_a_passing_refusal_is_waited_out(s3, kit, ordinary, fault, status, code, match):
    s3.faults = [fault(match, status=status, code=code, times=3)]
    assert kit.requant("run", kit.manifest(SOURCE, target=TARGET, stream=True), "--quiet") == 0
    assert s3.faults[0].times == 0
    assert stored(s3) == ordinary


def test_a_store_that_stays_down_is_one_error_and_the_next_run_goes_on(s3, kit, ordinary, fault, capsys):
    manifest = kit.manifest(SOURCE, target=TARGET, stream=True, max_disk=400_000)
    s3.faults = [fault("^PUT /out/tiny/model-00002", status=500, times=10**6)]
    assert kit.requant("convert", manifest, "--quiet") == 4
    lines = [line for line in capsys.readouterr().err.splitlines() if line]
    assert lines[-2].startswith(f"error: {TARGET}: writing model-00002-of-00002.safetensors failed 5 times: ")
    assert lines[-1] == "  -> run the same command again: it goes on where it stopped"
    assert "config.json" not in s3.objects("out", "tiny")
    s3.faults, done = [], len(s3.requests)
    assert kit.requant("convert", manifest, "--quiet") == 0
    assert stored(s3) == ordinary
    again = [request.line for request in s3.requests[done:]]
    assert not [line for line in again if line.startswith("PUT /out/tiny/model-00001")], "it was there already"
    assert json.loads(s3.content("out", "tiny/requant.signoff.json"))["signed_off"] is True


@pytest.mark.parametrize(
    ("faulty", "where", "code", "said"),
    [
        ("^GET /models", SOURCE, 3, "is refused"),
        ("^(PUT|GET|HEAD) /out", TARGET, 6, "is refused"),
    ],
)
def test_a_refusal_for_good_is_said_at_once(s3, kit, ordinary, fault, slept, capsys, faulty, where, code, said):
    s3.faults = [fault(faulty, status=403, code="AccessDenied", times=10**6)]
    assert kit.requant("run", kit.manifest(SOURCE, target=TARGET), "--quiet") == code
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[-2].startswith(f"error: {where}: ")
    assert said in lines[-2]
    assert slept == []


@pytest.mark.parametrize(
    ("source", "target", "where", "code"),
    [("s3://nowhere/m", TARGET, "s3://nowhere/m", 3), (SOURCE, "s3://nowhere/m", "s3://nowhere/m", 6)],
)
def test_a_missing_bucket_is_said_and_not_made(s3, kit, ordinary, capsys, source, target, where, code):
    assert kit.requant("run", kit.manifest(source, target=target), "--quiet") == code
    err = capsys.readouterr().err
    assert f"error: {where}: listing: the bucket is not there" in err
    assert {b["Name"] for b in s3.client.list_buckets()["Buckets"]} == {"models", "out"}


def test_without_credentials_that_is_what_is_said(s3, kit, ordinary, capsys, monkeypatch):
    from requant.convert import objects

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    objects._filesystem.cache_clear()
    assert kit.requant("plan", kit.manifest(SOURCE)) == 3
    assert f"error: {SOURCE}: no credentials for the store" in capsys.readouterr().err


def test_an_object_replaced_between_plan_and_run_is_found(s3, kit, ordinary):
    from requant.convert.pipeline import prepare, run_job
    from requant.manifests.errors import SourceError
    from requant.validate.streamed import Judge

    job = prepare(str(kit.manifest(SOURCE, stream=True)))
    name = "tiny/model-00003-of-00003.safetensors"
    data = bytearray(s3.content("models", name))
    data[-1] ^= 1
    s3.client.put_object(Bucket="models", Key=name, Body=bytes(data))
    with pytest.raises(SourceError, match=r"changed since it was planned with: model-00003-of-00003"):
        run_job(job, make_judge=lambda source, view, record: Judge(source, view, record, None))
    assert not (kit.tmp / "out").exists()


def test_no_secret_stands_in_errors_log_or_output(s3, kit, ordinary, fault, capsys):
    secret, access = os.environ["AWS_SECRET_ACCESS_KEY"], os.environ["AWS_ACCESS_KEY_ID"]
    manifest = kit.manifest(SOURCE, target=TARGET, stream=True)
    s3.faults = [fault("^PUT /out/tiny/model", status=403, code=f"Denied {access} {secret}", times=10**6)]
    log = kit.tmp / "log"
    assert kit.requant("run", manifest, "-v", "--log-file", log) != 0
    s3.faults = []
    assert kit.requant("convert", manifest, "-v", "--log-file", log) == 0
    said = capsys.readouterr()
    texts = [said.out.encode(), said.err.encode(), log.read_bytes()]
    texts += [path.read_bytes() for path in (kit.tmp / "out").rglob("*") if path.is_file()]
    assert not [text for text in texts if secret.encode() in text or access.encode() in text]


def begun(s3, kit, manifest, killed_at, *arguments):
    """Run the command line in a process of its own and kill it (-9) at the first request that matches."""
    environ = {**os.environ, "AWS_MAX_ATTEMPTS": "1"}
    command = [sys.executable, "-c", DRIVER, "convert", str(manifest), "--quiet", *arguments]
    process = subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        if s3.asked(killed_at):
            process.send_signal(signal.SIGKILL)
            break
        time.sleep(0.002)
    _, err = process.communicate()
    assert process.returncode == -signal.SIGKILL, err.decode()


def test_a_run_killed_in_the_middle_of_a_multipart_upload_leaves_nothing_to_be_seen_and_goes_on(s3, kit, fault):
    """A shard of 30 MB goes in parts of 5 MB; the run dies while one of them is on its way."""
    source = kit.source("big", shards=2, layers=6, hidden=1024, inter=2048)
    s3.put_folder("models", "big", source)
    sized = {"shard_size": "16MB", "stream": True}
    assert kit.requant("run", kit.manifest(source, "ordinary", shard_size="16MB"), "--quiet") == 0
    whole = kit.shas(kit.tmp / "ordinary")
    first = min(whole)
    assert (kit.tmp / "ordinary" / first).stat().st_size > 10 * 2**20
    manifest = kit.manifest("s3://models/big", target="s3://out/big", **sized)
    s3.faults = [fault("^PUT /out/big/model.*partNumber=2", then=lambda: time.sleep(2))]
    begun(s3, kit, manifest, "^PUT /out/big/model.*partNumber=1")
    time.sleep(2.5)
    assert s3.uploads("out") == [f"big/{first}"]
    assert set(s3.objects("out", "big")) == {".requant/begun.json"}
    assert kit.requant("convert", manifest, "--quiet") == 0
    assert s3.uploads("out") == [], "the killed upload is ended, nobody pays for it"
    assert stored(s3, prefix="big") == whole
    assert ".requant/begun.json" not in s3.objects("out", "big")


@pytest.mark.parametrize("killed_at", ["^PUT /out/tiny/model-00001", "^PUT /out/tiny/config.json", "^PUT .*lock.json"])
def test_a_run_killed_anywhere_goes_on_and_ends_with_the_same_objects(s3, kit, ordinary, killed_at):
    manifest = kit.manifest(SOURCE, target=TARGET, stream=True)
    begun(s3, kit, manifest, killed_at)
    code = kit.requant("convert", manifest, "--quiet")
    if code == 3:  # it had ended before the signal came
        assert "requant.lock.json" in s3.objects("out", "tiny")
    else:
        assert code == 0
        assert json.loads(s3.content("out", "tiny/requant.signoff.json"))["signed_off"] is True
    assert stored(s3) == ordinary
    assert ".requant/begun.json" not in s3.objects("out", "tiny")


def test_a_finished_output_is_validated_where_it_is(s3, kit, ordinary):
    limits = {"stream": True, "max_disk": 110_000}
    assert kit.requant("run", kit.manifest(kit.tmp / "src", "again", shard_size="15kB"), "--quiet") == 0
    ordinary = kit.shas(kit.tmp / "again")
    assert kit.requant("run", kit.manifest(SOURCE, target=TARGET, shard_size="15kB", **limits), "--quiet") == 0
    assert kit.requant("validate", kit.tmp / "out", "--quiet") == 3, "its shards are in the store"
    assert "requant.signoff.json" not in s3.objects("out", "tiny")
    sets = ("--set", f"source.path={kit.tmp / 'src'}")
    assert kit.requant("validate", TARGET, "--quiet", *sets) == 0
    signoff = json.loads(s3.content("out", "tiny/requant.signoff.json"))
    assert signoff["signed_off"] is True
    assert {n: f["sha256"] for n, f in signoff["files"].items() if n in ordinary} == ordinary


def test_the_store_is_reached_through_a_proxy_where_the_environment_names_one(s3, kit, ordinary, monkeypatch):
    from requant.convert import objects

    for name in ("NO_PROXY", "no_proxy", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    with ForwardProxy() as proxy:
        monkeypatch.setenv("HTTP_PROXY", proxy.url)
        objects._filesystem.cache_clear()
        before = len(s3.requests)
        assert kit.requant("run", kit.manifest(SOURCE, target=TARGET, stream=True), "--quiet") == 0
        assert stored(s3) == ordinary
        seen = [request.line for request in s3.requests[before:]]
        assert len(seen) > 10
        assert sorted(line.replace(s3.url, "") for line in proxy.lines) == sorted(seen)
