"""A source on the Hub: planned from its headers, pinned to a commit, fetched into the ordinary cache, told apart."""

import hashlib
import json
from pathlib import Path

import pytest
import yaml

SOURCE = "upstream/tiny"


@pytest.fixture
def upstream(hub, kit):
    """A source on the Hub; its commit."""
    return hub.put_folder(SOURCE, kit.source())


def shas(folder):
    names = sorted(p.name for p in folder.glob("*.safetensors"))
    return {n: hashlib.sha256((folder / n).read_bytes()).hexdigest() for n in names}


def test_a_plan_moves_headers_only(hub, kit, capsys):
    hub.put_folder("upstream/big", kit.source("big", shards=4, layers=4, hidden=512, inter=1024))
    weights = sum(e.size for name, e in hub.tree("upstream/big").items() if name.endswith(".safetensors"))
    manifest = kit.manifest("upstream/big", shard_size="1MB")
    assert kit.requant("plan", manifest, "--format", "json") == 0
    planned = json.loads(capsys.readouterr().out)
    assert sum(rule["tensors"] for rule in planned["rules"]) == 38
    moved = hub.sent("^GET ")
    assert weights > 20_000_000
    assert moved < 4 * 65_536 + 40_000
    assert not (kit.tmp / "out").exists()


def test_a_header_longer_than_the_first_read_is_read_to_its_end(hub, kit, capsys, monkeypatch):
    from requant.convert import remote

    monkeypatch.setattr(remote, "FIRST_READ", 50)
    hub.put_folder(SOURCE, kit.source())
    assert kit.requant("plan", kit.manifest(SOURCE), "--format", "json") == 0
    assert sum(rule["tensors"] for rule in json.loads(capsys.readouterr().out)["rules"]) == 20


def test_the_same_bytes_come_out_as_from_a_folder(hub, kit, upstream):
    assert kit.requant("convert", kit.manifest(kit.tmp / "src", "a"), "--quiet") == 0
    assert kit.requant("convert", kit.manifest(SOURCE, "b"), "--quiet") == 0
    assert shas(kit.tmp / "a") == shas(kit.tmp / "b")
    for name in ("config.json", "tokenizer.json", "LICENSE", "chat_template.jinja"):
        assert (kit.tmp / "a" / name).read_bytes() == (kit.tmp / "b" / name).read_bytes()


def test_the_lock_pins_the_commit_and_the_files(hub, kit, upstream):
    output = kit.signed(source=SOURCE)
    source = json.loads((output / "requant.lock.json").read_text())["source"]
    assert (source["repo"], source["commit"]) == (SOURCE, upstream)
    entry = hub.tree(SOURCE)["model-00001-of-00003.safetensors"]
    file = source["files"]["model-00001-of-00003.safetensors"]
    assert (file["size"], file["sha256"]) == (entry.size, entry.lfs)
    hub.put(SOURCE, {"config.json": b"{}"}, title="upstream moved on")
    assert kit.requant("validate", output, "--quiet") == 0


def test_init_reads_headers_only(hub, kit, upstream, capsys):
    assert kit.requant("init", SOURCE) == 0
    assert yaml.safe_load(capsys.readouterr().out)["source"]["repo"] == SOURCE
    assert hub.asked("^GET .*tokenizer.json") == []


def test_a_revision_deleted_between_plan_and_run_is_one_clear_error(hub, kit, upstream, capsys):
    from requant.convert.pipeline import prepare, run_job
    from requant.manifests.errors import SourceError

    job = prepare(str(kit.manifest(SOURCE)))
    repo = hub.repos[SOURCE]
    hub.put(SOURCE, {"config.json": b"{}"})
    del repo.commits[upstream]
    with pytest.raises(SourceError, match=f"has no revision {upstream}"):
        run_job(job)
    assert not (kit.tmp / "out").exists()


def test_a_cache_whose_files_are_not_the_commits_is_refused(hub, kit, upstream, client):
    from requant.convert.pipeline import prepare, run_job
    from requant.manifests.errors import SourceError

    job = prepare(str(kit.manifest(SOURCE)))
    shard = client.hf_hub_download(SOURCE, "model-00001-of-00003.safetensors", endpoint=hub.url, revision=upstream)
    Path(shard).write_bytes(Path(shard).read_bytes().replace(b'"pt"', b'"tf"', 1))
    with pytest.raises(SourceError, match="the files in the cache are not those that were planned with"):
        run_job(job)


def test_offline_takes_what_the_cache_holds_and_asks_nobody(hub, kit, upstream, client, monkeypatch, capsys):
    first = kit.signed(source=SOURCE)
    before = len(hub.requests)
    monkeypatch.setattr(client.constants, "HF_HUB_OFFLINE", True)
    assert kit.requant("convert", kit.manifest(SOURCE, "again"), "--quiet") == 0
    assert len(hub.requests) == before
    assert shas(kit.tmp / "again") == shas(first)
    capsys.readouterr()
    assert kit.requant("plan", kit.manifest("upstream/never-seen", "x")) == 6
    assert "the cache does not hold the checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize("storage", ["hub", "xet_hub"])
def test_both_storages_give_the_same(storage, request, kit, client):
    hub = request.getfixturevalue(storage)
    source = kit.source()
    api = client.HfApi(endpoint=hub.url)
    api.create_repo("tester/up")
    api.upload_folder(repo_id="tester/up", folder_path=source)
    assert kit.requant("convert", kit.manifest(source, "a"), "--quiet") == 0
    assert kit.requant("convert", kit.manifest("tester/up", "b"), "--quiet") == 0
    assert shas(kit.tmp / "a") == shas(kit.tmp / "b")
    xet = {name for name, entry in hub.tree("tester/up").items() if entry.xet}
    assert bool(xet) is (storage == "xet_hub")


@pytest.mark.parametrize(
    ("spoil", "code", "why"),
    [
        (lambda hub: setattr(hub.repos[SOURCE], "gated", True), 3, "is gated"),
        (lambda hub: hub.repos.pop(SOURCE), 3, "repository not found, or private and no valid token"),
        (lambda hub: hub.expired.add(hub.reader), 3, "the Hub does not accept the token"),
        (lambda hub: hub.repos[SOURCE].refs.pop("main"), 3, "has no revision main"),
    ],
    ids=["gated", "missing", "expired", "revision"],
)
def test_what_the_hub_refuses_is_told_apart(hub, kit, upstream, monkeypatch, capsys, spoil, code, why):
    monkeypatch.setenv("HF_TOKEN", hub.reader)
    spoil(hub)
    assert kit.requant("plan", kit.manifest(SOURCE)) == code
    error = capsys.readouterr().err
    assert why in error
    assert "  -> " in error
    assert hub.reader not in error


def test_a_private_repository_opens_to_its_token(hub, kit, upstream, monkeypatch):
    hub.repos[SOURCE].private = True
    assert kit.requant("plan", kit.manifest(SOURCE)) == 0
    monkeypatch.delenv("HF_TOKEN")
    assert kit.requant("plan", kit.manifest(SOURCE)) == 3


@pytest.mark.parametrize("name", ["../evil.json", "/etc/evil", "a/../../evil.safetensors", "a\\..\\evil", "x\0y"])
def test_a_name_from_the_server_cannot_leave_the_folder(hub, kit, upstream, capsys, name):
    repo = hub.repos[SOURCE]
    tree = repo.commits[upstream].tree
    tree[name] = tree["config.json"]
    before = sorted(p.name for p in kit.tmp.parent.rglob("*"))
    assert kit.requant("convert", kit.manifest(SOURCE), "--quiet") == 3
    assert "which leads out of the folder" in capsys.readouterr().err
    assert [n for n in sorted(p.name for p in kit.tmp.parent.rglob("*")) if n not in [*before, "out.yaml"]] == []


def test_an_index_from_the_server_cannot_leave_the_folder(hub, kit, upstream, capsys):
    index = json.loads(hub.content(SOURCE, "model.safetensors.index.json"))
    index["weight_map"]["model.norm.weight"] = "../../secret.safetensors"
    hub.put(SOURCE, {"model.safetensors.index.json": json.dumps(index).encode()})
    assert kit.requant("plan", kit.manifest(SOURCE)) == 3
    assert "leads out of the checkpoint's folder" in capsys.readouterr().err


def test_a_redirect_to_another_host_does_not_carry_the_token(hub, kit, upstream):
    hub.cdn = True
    assert kit.requant("convert", kit.manifest(SOURCE), "--quiet") == 0
    elsewhere = hub.asked("/cdn/")
    assert len(elsewhere) >= 6
    assert {r.host.partition(":")[0] for r in elsewhere} == {"localhost"}
    assert not any(r.authorized for r in elsewhere)
    assert all(r.authorized for r in hub.asked("/resolve/"))
