"""Publishing: only what was judged, into one pull request, nothing twice, nothing of others deleted."""

import json

import pytest

REPO = "tester/tiny-mxfp4"
PUBLISH = {"repo": REPO, "private": True, "via": "pull_request"}
PR = "refs/pr/1"


@pytest.fixture
def output(hub, kit):
    """A signed-off folder whose manifest says where it goes."""
    return kit.signed(publish=PUBLISH)


def published_names(output):
    names = {p.relative_to(output).as_posix() for p in output.rglob("*") if p.is_file()}
    return {n for n in names if not n.startswith(".requant-local/")} | {".gitattributes", "README.md"}


def test_everything_judged_arrives_in_one_pull_request_and_nothing_on_main(output, hub, kit):
    assert kit.requant("publish", output, "--quiet") == 0
    repo = hub.repos[REPO]
    assert repo.private
    assert set(hub.tree(REPO, PR)) == published_names(output)
    for name in published_names(output) - {"README.md", ".gitattributes"}:
        assert hub.content(REPO, name, PR) == (output / name).read_bytes()
    assert set(hub.tree(REPO)) == {".gitattributes"}
    assert [(p.title, p.status) for p in repo.pulls.values()] == [("requant: tiny-mxfp4", "open")]
    assert len(hub.asked("^POST .*/commit/")) == 1


def test_an_edited_byte_after_the_sign_off_is_refused(output, hub, kit, capsys):
    shard = next(output.glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert kit.requant("publish", output, "--quiet") == 7
    error = capsys.readouterr().err
    assert f"{shard.name}: has changed since it was judged" in error
    assert "requant validate" in error
    assert REPO not in hub.repos


def test_a_file_added_after_the_sign_off_is_refused(output, hub, kit, capsys):
    (output / "extra.py").write_text("print()")
    assert kit.requant("publish", output, "--quiet") == 7
    assert "extra.py: is not covered by the sign-off" in capsys.readouterr().err


def test_a_failed_gate_is_refused_and_force_says_so_in_the_card(output, hub, kit, capsys):
    assert kit.requant("validate", output, "--only", "contract", "--quiet") == 5
    assert kit.requant("publish", output, "--quiet") == 7
    assert "numerics not run" in capsys.readouterr().err
    assert kit.requant("publish", output, "--quiet", "--force-unsigned") == 0
    card = hub.content(REPO, "README.md", PR).decode()
    assert "> **Not signed off.** Published all the same, with `--force-unsigned`" in card
    assert "numerics not run" in card


def test_a_dry_run_says_what_would_happen_and_writes_nothing(output, hub, kit, capsys):
    capsys.readouterr()
    assert kit.requant("publish", output, "--quiet", "--dry-run", "--format", "json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["dry_run"] is True
    assert set(facts["sent"]) == published_names(output) - {".gitattributes"}
    assert hub.repos == {}
    assert hub.asked("^(POST|PUT|DELETE) ") == []


def test_a_second_time_sends_nothing_and_opens_nothing(output, hub, kit, capsys):
    assert kit.requant("publish", output, "--quiet") == 0
    capsys.readouterr()
    before = hub.received("^PUT ")
    assert kit.requant("publish", output, "--quiet", "--format", "json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["sent"], facts["deleted"]) == ({}, [])
    assert hub.received("^PUT ") == before
    assert len(hub.repos[REPO].pulls) == 1
    assert len(hub.asked("^POST .*/commit/")) == 1


def test_without_the_state_file_the_pull_request_is_found_by_its_title(output, hub, kit):
    assert kit.requant("publish", output, "--quiet") == 0
    (output / ".requant-local" / "publish.json").unlink()
    assert kit.requant("publish", output, "--quiet") == 0
    assert len(hub.repos[REPO].pulls) == 1


def test_after_a_merge_a_change_opens_a_new_pull_request_with_the_change_alone(output, hub, kit, client, capsys):
    assert kit.requant("publish", output, "--quiet") == 0
    client.HfApi(endpoint=hub.url).merge_pull_request(REPO, 1)
    (output / "chat_template.jinja").write_text("changed")
    (kit.tmp / "src" / "chat_template.jinja").write_text("changed")
    assert kit.requant("validate", output, "--quiet") == 0
    capsys.readouterr()
    assert kit.requant("publish", output, "--quiet", "--format", "json") == 0
    facts = json.loads(capsys.readouterr().out)
    signoff = {f"requant.signoff.{kind}" for kind in ("html", "json", "md")}
    assert set(facts["sent"]) == {"chat_template.jinja", *signoff}
    assert facts["revision"] == "refs/pr/2"


def test_only_what_the_last_lock_lists_is_deleted(output, hub, kit, capsys):
    old = {"outputs": ["model-00001-of-00099.safetensors", "old.json", "README.md", "never-was-here"]}
    hub.put(
        REPO,
        {
            "requant.lock.json": json.dumps(old).encode(),
            "model-00001-of-00099.safetensors": b"old",
            "old.json": b"{}",
            "notes-of-the-user.txt": b"mine",
            "README.md": b"---\nlicense: mit\n---\n# Mine\n",
        },
    )
    assert kit.requant("publish", output, "--quiet", "--dry-run") == 0
    said = capsys.readouterr().out
    assert "would delete model-00001-of-00099.safetensors" in said
    assert "notes-of-the-user" not in said
    assert kit.requant("publish", output, "--quiet") == 0
    tree = hub.tree(REPO, PR)
    assert set(tree) == published_names(output) | {"notes-of-the-user.txt"}
    assert hub.content(REPO, "notes-of-the-user.txt", PR) == b"mine"
    assert len(hub.asked("^POST .*/commit/")) == 1


@pytest.mark.parametrize("via", ["branch", "main"])
def test_the_other_ways(output, hub, kit, via):
    assert kit.requant("publish", output, "--quiet", "--via", via) == 0
    revision = {"branch": "requant-tiny-mxfp4", "main": "main"}[via]
    assert set(hub.tree(REPO, revision)) == published_names(output)
    assert hub.repos[REPO].pulls == {}
    assert kit.requant("publish", output, "--quiet", "--via", via) == 0
    assert len(hub.asked("^POST .*/commit/")) == 1


def test_a_public_repository_is_made_only_on_demand(output, hub, kit):
    assert kit.requant("publish", output, "--quiet", "--repo", "tester/open", "--public") == 0
    assert hub.repos["tester/open"].private is False


def test_xet_storage_takes_it_too(xet_hub, kit):
    output = kit.signed(publish=PUBLISH)
    assert kit.requant("publish", output, "--quiet") == 0
    tree = xet_hub.tree(REPO, PR)
    shards = [name for name in tree if name.endswith(".safetensors")]
    assert len(shards) > 1
    for name in shards:
        assert tree[name].xet
        assert xet_hub.content(REPO, name, PR) == (output / name).read_bytes()


def test_convert_push_publishes_what_it_signed(hub, kit):
    manifest = kit.manifest(kit.source(), publish=PUBLISH)
    assert kit.requant("convert", manifest, "--push", "--quiet") == 0
    assert set(hub.tree(REPO, PR)) == published_names(kit.tmp / "out")


def test_convert_push_asks_for_the_token_before_the_work(hub, kit, monkeypatch, capsys):
    monkeypatch.delenv("HF_TOKEN")
    assert kit.requant("convert", kit.manifest(kit.source(), publish=PUBLISH), "--push", "--quiet") == 7
    assert "there is no access token" in capsys.readouterr().err
    assert not (kit.tmp / "out").exists()


def test_push_without_a_repository_is_refused_before_the_work(hub, kit, capsys):
    assert kit.requant("convert", kit.manifest(kit.source()), "--push", "--quiet") == 7
    assert "no repository is named" in capsys.readouterr().err
    assert not (kit.tmp / "out").exists()


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("notes.txt", "hf_" + "a" * 34, "holds an access token"),
        ("model.safetensors.part", "x", "looks like an unfinished file"),
        ("run.log", "x", "looks like an unfinished file or a log"),
    ],
)
def test_what_must_not_leave_is_refused_even_by_force(output, hub, kit, capsys, name, content, why):
    (output / name).write_text(content)
    assert kit.requant("publish", output, "--quiet", "--force-unsigned") == 7
    assert why in capsys.readouterr().err
    assert hub.repos == {}


def test_a_link_out_of_the_folder_is_not_followed(output, hub, kit, capsys, tmp_path):
    (tmp_path / "secret").write_text("s")
    (output / "innocent.txt").symlink_to(tmp_path / "secret")
    assert kit.requant("publish", output, "--quiet", "--force-unsigned") == 7
    assert "innocent.txt: is a link that leads out of the folder" in capsys.readouterr().err


def test_the_charts_go_along_and_the_card_shows_them(output, hub, kit):
    assert kit.requant("publish", output, "--quiet") == 0
    card = hub.content(REPO, "README.md", PR).decode()
    charts = sorted(path.name for path in output.glob("requant.signoff.*.svg"))
    assert "requant.signoff.bytes.svg" in charts
    for name in charts:
        assert f"]({name})" in card
        assert hub.content(REPO, name, PR) == (output / name).read_bytes()
