"""`report --html` and `compare` from the command line: what they write, print and end with."""

import json

import pytest
from requant.convert.cli import main
from requant.validate.results import StageResult, Status
from requant.validate.signoff import HTML_NAME, sign_off, write_signoff


def requant(*arguments):
    with pytest.raises(SystemExit) as ended:
        main([str(a) for a in arguments])
    return int(ended.value.code or 0)


@pytest.fixture
def folder(tmp_path):
    """A signed-off folder with nothing in it but a file."""
    output = tmp_path / "output"
    output.mkdir()
    (output / "model.safetensors").write_bytes(b"weights")
    stages = [StageResult(name, Status.PASSED, "as told") for name in ("contract", "numerics")]
    write_signoff(output, sign_off(output, None, stages))
    return output


def test_report_writes_the_page_that_lies_in_the_folder(folder, tmp_path, capsys):
    assert requant("report", folder, "--html", tmp_path / "page.html") == 0
    assert (tmp_path / "page.html").read_text() == (folder / HTML_NAME).read_text()
    assert "output: Signed off" in capsys.readouterr().out
    assert requant("report", folder, "--html", tmp_path / "absent" / "page.html") == 6
    assert "cannot be written" in capsys.readouterr().err


def test_compare_prints_ratios_and_refuses_what_is_not_alike(tmp_path, capsys):
    samples = {"latency_s": [1.0, 1.1, 1.2, 1.3], "ttft_ms": [9, 8, 7, 9], "itl_ms": [1, 1, 2, 2]}
    run = {
        "kind": "requant serving run", "label": "a", "complete": True, "server": "vLLM 0.30.0", "flags": "serve",
        "prompts": {"synthetic_tokens": 8}, "card": "H200", "kernels": [], "fp4_native": None,
        "points": [{"concurrency": 1, "samples": {**samples, "output_tokens": [8, 8, 8, 8]}}],
    }  # fmt: skip
    (tmp_path / "a.json").write_text(json.dumps(run))
    (tmp_path / "b.json").write_text(json.dumps({**run, "label": "b", "card": "H100"}))
    assert requant("compare", tmp_path / "a.json", tmp_path / "a.json") == 0
    assert capsys.readouterr().out.count("no difference") == 3
    assert requant("compare", tmp_path / "a.json", tmp_path / "b.json") == 2
    assert "card differ: 'H200' and 'H100'" in capsys.readouterr().err
    assert requant("compare", tmp_path / "a.json", tmp_path / "b.json", "--allow", "card", "--format", "json") == 0
    assert json.loads(capsys.readouterr().out)["differs_by_leave"] == ["card differ: 'H200' and 'H100' (card)"]


def test_bench_of_a_server_says_what_is_missing(tmp_path, capsys):
    assert requant("bench", tmp_path, "--launch", "vllm serve {model}", "--quiet") == 2
    assert "{port}" in capsys.readouterr().err
    assert requant("bench", tmp_path, "--endpoint", "http://x", "--launch", "y {port}") == 2
    assert requant("bench", tmp_path, "--endpoint", "http://x", "--concurrency", "1,two") == 2
    assert "no list of numbers" in capsys.readouterr().err
