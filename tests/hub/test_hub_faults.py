"""What goes wrong on the way: connections cut anywhere, limits, refusals. It resumes, or says one clear thing.

And never: a second pull request, a half commit, a token in a message.
"""

import hashlib
import random

import pytest

SOURCE = "upstream/tiny"
REPO = "tester/tiny-mxfp4"
PR = "refs/pr/1"
COMMIT = "^POST .*/commit/"


@pytest.fixture
def output(hub, kit):
    """A signed-off folder whose manifest says where it goes."""
    return kit.signed(publish={"repo": REPO})


@pytest.fixture
def publish(output, hub, kit, capsys):
    """Run `requant publish`; (exit code, stderr)."""

    def run(*arguments):
        capsys.readouterr()
        code = kit.requant("publish", output, "--quiet", *arguments)
        return code, capsys.readouterr().err

    return run


def whole(hub, output):
    """The pull request holds every file with its bytes, and is the only one."""
    shards = sorted(output.glob("*.safetensors"))
    good = all(hub.content(REPO, p.name, PR) == p.read_bytes() for p in shards)
    return bool(shards) and good and len(hub.repos[REPO].pulls) == 1


# --- download ---------------------------------------------------------------------------------------------------------


def test_a_download_cut_at_twenty_random_points_gives_the_same_bytes(hub, kit, hub_module, client):
    hub.put_folder(SOURCE, kit.source())
    expected = {n: e.lfs for n, e in hub.tree(SOURCE).items() if n.endswith(".safetensors")}
    rng = random.Random(1)
    for attempt in range(20):
        client.constants.HF_HUB_CACHE = str(kit.tmp / f"cache-{attempt}")
        name = rng.choice(sorted(expected))
        cut = rng.randrange(hub.tree(SOURCE)[name].size)
        hub.faults = [hub_module.Fault(f"^GET .*/resolve/.*{name}", cut_after=cut, skip=rng.randrange(2))]
        assert kit.requant("run", kit.manifest(SOURCE, f"out-{attempt}"), "--quiet") == 0
        assert hub.faults[0].times == 0
    outputs = {
        hashlib.sha256(b"".join(p.read_bytes() for p in sorted((kit.tmp / f"out-{i}").glob("*.safetensors")))).digest()
        for i in range(20)
    }
    assert len(outputs) == 1


def test_a_header_read_resumes_at_the_byte_where_it_broke(hub, kit, hub_module):
    hub.put_folder(SOURCE, kit.source())
    hub.faults = [hub_module.Fault("^GET .*/resolve/.*00002-of-00003", cut_after=1000)]
    assert kit.requant("plan", kit.manifest(SOURCE)) == 0
    ranges = [r.range for r in hub.asked("^GET .*/resolve/.*00002-of-00003")]
    last = hub.tree(SOURCE)["model-00002-of-00003.safetensors"].size - 1
    assert ranges == [f"bytes=0-{last}", f"bytes=1000-{last}"]


@pytest.mark.parametrize(
    ("status", "headers"), [(429, {"Retry-After": "7"}), (500, {}), (502, {}), (503, {}), (504, {})]
)
def test_a_passing_refusal_is_waited_out(hub, kit, hub_module, client, status, headers):
    hub.put_folder(SOURCE, kit.source())
    hub.faults = [hub_module.Fault("^GET .*/resolve/.*safetensors$", status=status, headers=headers, times=2)]
    assert kit.requant("convert", kit.manifest(SOURCE), "--quiet") == 0
    assert (8.0 in client.slept) is (status == 429)


def test_a_server_that_stays_down_is_one_error_and_the_next_run_goes_on(hub, kit, hub_module, capsys):
    hub.put_folder(SOURCE, kit.source())
    hub.faults = [hub_module.Fault("^GET .*/resolve/.*00003-of-00003", status=503, times=10**6, skip=1)]
    assert kit.requant("convert", kit.manifest(SOURCE), "--quiet") == 6
    error = capsys.readouterr().err.strip().splitlines()[-2:]
    assert error[0] == f"error: {SOURCE}: the Hub answers with status 503: injected"
    assert error[1].startswith("  -> run the same command again")
    hub.faults = []
    before = hub.sent("00001-of-00003")
    assert kit.requant("convert", kit.manifest(SOURCE), "--quiet") == 0
    assert hub.sent("00001-of-00003") <= before + 65_536  # its header, for the plan; not its weights


def test_a_token_that_expires_between_plan_and_fetch_is_named(hub, kit):
    from requant.convert.pipeline import prepare, run_job
    from requant.manifests.errors import SourceError

    hub.put_folder(SOURCE, kit.source())
    job = prepare(str(kit.manifest(SOURCE)))
    hub.expired.add(hub.token)
    with pytest.raises(SourceError, match="wrong, expired or revoked"):
        run_job(job)


# --- upload -----------------------------------------------------------------------------------------------------------


def test_an_upload_cut_at_twenty_random_points_arrives_whole(output, publish, hub, hub_module):
    rng = random.Random(2)
    sizes = {p.name: p.stat().st_size for p in output.glob("*.safetensors")}
    for _ in range(20):
        hub.repos.clear()
        for path in (hub.root / "lfs").iterdir():
            path.unlink()
        cut = rng.randrange(max(sizes.values()))
        hub.faults = [hub_module.Fault("^PUT /lfs/put/", cut_after=cut, skip=rng.randrange(len(sizes)))]
        assert publish()[0] == 0
        assert whole(hub, output)
        assert len(hub.repos[REPO].commits) == 2


@pytest.mark.parametrize("cut", ["lfs/batch", "lfs/put", "lfs/verify", "preupload", "commit", "discussions", "tree"])
def test_an_upload_that_breaks_for_good_goes_on_into_the_same_pull_request(publish, output, hub, hub_module, cut):
    pattern = "objects/batch" if cut == "lfs/batch" else f"/{cut}"
    hub.faults = [hub_module.Fault(f"^[A-Z]+ .*{pattern}", cut_after=0, times=10**6, skip=cut != "commit")]
    code, error = publish()
    assert code == 7
    assert error.count("error: ") == 1
    hub.faults = []
    sent = hub.received("^PUT ")
    assert publish()[0] == 0
    assert whole(hub, output)
    total = sum(e.size for e in hub.tree(REPO, PR).values() if e.lfs)
    assert hub.received("^PUT ") <= max(total, sent)  # what was up is not sent again


def test_a_commit_whose_answer_is_lost_is_not_made_twice(publish, output, hub, hub_module):
    hub.faults = [hub_module.Fault(COMMIT, after_applying=True)]
    assert publish()[0] == 0
    assert whole(hub, output)
    assert len(hub.repos[REPO].commits) == 2


@pytest.mark.parametrize(("status", "headers"), [(429, {"Retry-After": "1"}), (500, {}), (503, {})])
def test_a_commit_refused_for_a_while_is_sent_again(publish, output, hub, hub_module, status, headers, client):
    hub.faults = [hub_module.Fault(COMMIT, status=status, headers=headers, times=2)]
    assert publish()[0] == 0
    assert whole(hub, output)
    assert client.slept == ([1.0, 1.0] if status == 429 else [1, 2])


def test_a_head_that_moved_is_compared_with_again(publish, output, hub, hub_module):
    theirs = b"---\nlicense: mit\n---\n# Theirs\n"
    hub.faults = [hub_module.Fault(COMMIT, status=None, then=lambda: hub.put(REPO, {"README.md": theirs}, PR))]
    assert publish()[0] == 0
    assert whole(hub, output)
    assert "# Theirs" in hub.content(REPO, "README.md", PR).decode()


def test_a_head_that_moves_every_time_is_one_error(publish, hub, hub_module):
    count = iter(range(100))
    moved = lambda: hub.put(REPO, {"x.txt": str(next(count)).encode()}, PR)  # noqa: E731
    hub.faults = [hub_module.Fault(COMMIT, times=100, then=moved)]
    code, error = publish()
    assert code == 7
    assert "someone else changed the revision at the same time" in error


def test_a_full_quota_is_named_and_nothing_is_committed(publish, output, hub):
    hub.quota = 1000
    code, error = publish()
    assert code == 7
    assert "Storage quota exceeded" in error
    assert len(hub.repos[REPO].commits) == 1
    hub.quota = None
    assert publish()[0] == 0
    assert whole(hub, output)


def test_a_token_that_expires_on_the_way_is_named(publish, output, hub, hub_module):
    hub.faults = [hub_module.Fault("objects/batch", then=lambda: hub.expired.add(hub.token))]
    code, error = publish()
    assert code == 7
    assert "the Hub does not accept the token: it is wrong, expired or revoked" in error
    hub.expired.clear()
    assert publish()[0] == 0
    assert whole(hub, output)


def test_a_token_that_may_only_read_is_named(publish, hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", hub.reader)
    code, error = publish()
    assert code == 7
    assert "the Hub refuses: Forbidden: you must use a write token" in error


def test_a_multipart_upload_cut_in_its_middle_is_taken_up(publish, output, hub, hub_module):
    hub.multipart = 10_000
    hub.faults = [hub_module.Fault("^PUT /lfs/part/", cut_after=5_000, skip=2)]
    assert publish()[0] == 0
    assert whole(hub, output)


# --- secrets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault",
    [
        {"match": "^PUT /lfs/put/", "status": 503, "times": 10**6},
        {"match": "^PUT /lfs/put/", "cut_after": 0, "times": 10**6},
        {"match": COMMIT, "status": 400},
        {"match": "^GET /api/models", "status": 500, "times": 10**6},
        {"match": ".", "status": 401, "times": 10**6},
    ],
    ids=["upload-503", "upload-cut", "commit-400", "api-500", "all-401"],
)
def test_no_token_and_no_signature_in_what_is_said_or_written(publish, output, hub, hub_module, kit, fault, caplog):
    hub.faults = [hub_module.Fault(**fault, message=f"bad thing with {hub.token}")]
    log = kit.tmp / "requant.log"
    code, error = publish("-v", "--log-file", log)
    assert code == 7
    written = "".join(p.read_text(errors="replace") for p in [log, *output.glob("*.json"), *output.glob("*.md")])
    for said in (error, written, caplog.text):
        assert hub.token not in said
        assert "SECRETSIGNATURE" not in said


def test_what_is_published_holds_no_token(publish, output, hub):
    assert publish()[0] == 0
    for name in hub.tree(REPO, PR):
        assert hub.token.encode() not in hub.content(REPO, name, PR)
