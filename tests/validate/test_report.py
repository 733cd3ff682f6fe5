"""What a reader of a report sees: the verdict first, the numbers right, tables that line up."""

from __future__ import annotations

from pathlib import Path

import pytest
from requant.validate.numerics import check_numerics
from requant.validate.report import render_markdown, render_text
from requant.validate.results import Finding, StageResult, Status
from requant.validate.signoff import sign_off
from requant.validate.verdict import SignOff

GOLDENS = Path(__file__).parents[1] / "goldens" / "modelopt"
CONTRACT = StageResult(
    "contract",
    Status.PASSED,
    "vllm | sglang",
    data={"runtimes": {"vllm": "simulated: would load", "trtllm": "unverified"}},
)


@pytest.fixture(scope="module")
def cast() -> SignOff:
    """modelopt's own cast of the gpt-oss golden, judged by us."""
    numerics = check_numerics(GOLDENS / "_src_gptoss_mxfp4", GOLDENS / "gptoss_nvfp4_cast", None)
    return sign_off(GOLDENS / "gptoss_nvfp4_cast", None, [CONTRACT, numerics])


def test_the_verdict_comes_first_and_names_what_stands_in_the_way(cast: SignOff) -> None:
    assert render_text(cast).startswith("gptoss_nvfp4_cast: Signed off: every required gate passed\n")
    assert render_markdown(cast).splitlines()[2] == "**Signed off: every required gate passed**"
    failed = StageResult("numerics", Status.FAILED, "12 blocks lossy")
    verdict = sign_off(GOLDENS / "gptoss_nvfp4_cast", None, [failed])
    assert render_text(verdict).splitlines()[0].endswith("Not signed off: contract not run; numerics failed")
    assert "12 blocks lossy" in render_markdown(verdict)


def test_the_numbers_are_those_of_the_comparison_with_thousands_separators(cast: SignOff) -> None:
    lines = {" ".join(line.split()) for line in render_text(cast).splitlines()}
    numerics = cast.stage("numerics")
    assert numerics is not None
    changed = numerics.data["totals"]["changed"]
    assert 0 < changed <= 64
    assert f"weights equal to their source {147_456 - changed:,} of 147,456" in lines
    assert "blocks of 16: equal, codes unchanged 3,304 of 9,216" in lines
    assert "blocks of 16: equal but for the sign of a zero 5,908 of 9,216" in lines
    assert "blocks of 16: lossy 4 of 9,216" in lines
    assert "blocks of 32: lossy 2 of 4,608" in lines
    assert "tensors within 17 octaves (native) 2 of 4" in lines
    assert "tensors within 14 octaves (Marlin) 2 of 4" in lines
    assert "block scales that Marlin flushes 4" in lines
    assert "bytes before 166,816" in lines
    assert "bytes after 171,456 (1.028x)" in lines
    assert "| blocks of 16: lossy | 4 of 9,216 |" in render_markdown(cast)


def test_the_worst_tensors_come_worst_first(cast: SignOff) -> None:
    lines = render_text(cast).splitlines()
    start = lines.index("Worst tensors (4 of 4)")
    order = [line.split()[0] for line in lines[start + 2 : start + 6]]
    assert order == [f"model.layers.{n}.mlp.experts.{leaf}" for n in (1, 0) for leaf in ("down_proj", "gate_up_proj")]
    assert lines[start + 2].endswith("32: outside both")
    assert lines[start + 5].endswith("5: Marlin and native")


def test_every_row_of_a_terminal_table_has_its_columns_in_line(cast: SignOff) -> None:
    lines = render_text(cast).splitlines()
    start = lines.index("Worst tensors (4 of 4)")
    head, *rows = lines[start + 1 : start + 6]
    end = head.index("lossy") + len("lossy")
    assert all(row[end - 1].isdigit() and row[end] == " " for row in rows)
    assert all(line == line.rstrip() for line in lines)


def test_a_simulation_is_called_a_simulation(cast: SignOff) -> None:
    for text in (render_text(cast), render_markdown(cast)):
        assert "simulated: would load" in text
        assert "no runtime has loaded them" in text
        assert "unverified" in text


def test_bars_in_cells_do_not_break_the_markdown_table(cast: SignOff) -> None:
    row = next(line for line in render_markdown(cast).splitlines() if line.startswith("| contract"))
    assert "vllm \\| sglang" in row
    assert row.replace("\\|", "").count("|") == 6


def test_markdown_lists_every_file_with_its_hash_and_the_terminal_counts_them(cast: SignOff) -> None:
    markdown = render_markdown(cast)
    for file in cast.files:
        assert f"| {file.name} | {file.size:,} | `{file.sha256}` |" in markdown
        assert file.sha256 not in render_text(cast)
    assert f"{len(cast.files)} files, " in render_text(cast)


def test_findings_are_shown_with_their_hint_and_the_rest_is_counted() -> None:
    many = tuple(Finding("lossy-blocks", "error", f"{i} blocks", where=f"t{i}", hint="keep it") for i in range(25))
    info = (Finding("tensor-dropped", "info", "by rule", where="mtp"),)
    stage = StageResult("numerics", Status.FAILED, "lossy", many + info)
    verdict = sign_off(GOLDENS / "llama_mxfp4", None, [stage])
    text = render_text(verdict)
    assert "  error lossy-blocks: t0: 0 blocks -> keep it\n" in text
    assert "t19: 19 blocks" in text
    assert "t20: 20 blocks" not in text
    assert "5 more in the JSON report" in text
    assert "tensor-dropped" not in text
    assert "6 more in the JSON report" in render_markdown(verdict)


def test_an_exact_conversion_shows_no_error_figures() -> None:
    numerics = check_numerics(GOLDENS / "_src_gptoss_mxfp4", GOLDENS / "_src_gptoss_mxfp4", None)
    text = render_text(sign_off(GOLDENS / "_src_gptoss_mxfp4", None, [CONTRACT, numerics]))
    assert "largest error" not in text
    assert "Worst tensors" not in text
    assert "tensors copied byte for byte" in text


def test_encodings_of_plain_weights_show_sqnr_and_no_window() -> None:
    numerics = check_numerics(GOLDENS / "_src_llama_bf16", GOLDENS / "llama_mxfp4", None)
    lines = [" ".join(line.split()) for line in render_text(sign_off(GOLDENS, None, [numerics])).splitlines()]
    assert f"least SQNR of a tensor {numerics.data['totals']['min_sqnr_db']:.2f} dB" in lines
    assert not any("octaves (" in line or line.startswith("blocks of 16") for line in lines)


MODEL = {
    "complete": True,
    "tokens": 2048,
    "sequence_length": 512,
    "text": {"file": "botchan.txt"},
    "path": "CPU reference",
    "kl": {"mean": 0.2554, "stderr": 0.0258, "p99": 2.1},
    "top1_agreement": {"mean": 0.7314, "stderr": 0.0117},
    "perplexity": {
        "source": 33.1188,
        "source_stderr": 3.7,
        "target": 41.7767,
        "target_stderr": 4.9,
        "ratio": 1.2614,
        "ratio_low": 1.198,
        "ratio_high": 1.3282,
    },
    "greedy": {"prompts": 8, "of": "chat prompts", "steps": 64, "identical": 1},
    "answers": {"kl_mean": 0.2599},
    "limits": {"max_kl": 0.3, "max_ppl_ratio": 1.35, "identical_greedy": False, "origin": "default"},
}


def test_the_model_is_shown_with_errors_and_bounds() -> None:
    stage = StageResult("model", Status.PASSED, "fine", data=MODEL)
    text = render_markdown(sign_off(GOLDENS / "llama_mxfp4", None, [stage]))
    assert "| KL on the text, mean | 0.2554 | +- 0.0258 | 0.3 |" in text
    assert "| same first token | 73.14% | +- 1.17 | - |" in text
    assert "| ratio of perplexities | 1.2614 | 1.1980 to 1.3282 | 1.35 |" in text
    assert "| greedy continuations identical | 1 | of 8 (chat prompts), 64 steps | - |" in text
    assert "2,048 tokens of botchan.txt" in text
    task = {"questions": 60, "source": 0.5, "source_stderr": 0.06, "target": 0.45, "difference": -0.05, "margin": 0.1}
    tasks = {"a, acc": {**task, "judged": True, "verdict": "not inferior"}, "a, f1": {**task, "judged": False}}
    more = {**MODEL, "reduced": ["the memory of the GPU did not suffice"], "lm_eval": {"version": "1", "tasks": tasks}}
    text = render_markdown(
        sign_off(GOLDENS / "llama_mxfp4", None, [StageResult("model", Status.PASSED, "", data=more)])
    )
    assert "| a, acc | 60 | 0.5000 +- 0.06 | 0.4500 | -0.0500 | -0.1 | not inferior |" in text
    assert "| a, f1 | 60 | 0.5000 +- 0.06 | 0.4500 | -0.0500 | - | not judged |" in text
    assert "Reduced: the memory of the GPU did not suffice." in text
    broken = StageResult("model", Status.NOT_RUN, "MemoryError", data={**MODEL, "complete": False, "limits": {}})
    text = render_markdown(sign_off(GOLDENS / "llama_mxfp4", None, [broken]))
    assert "Incomplete: the stage broke off." in text
    assert "not judged" in text
