"""lm-eval on the stage's own models: local tasks, both arms, a verdict; and everything that keeps it from running."""

import json

import pytest

pytest.importorskip("lm_eval", reason="needs the extra eval")

from requant.manifests.gates import LmEval, ModelGate
from requant.validate.model import check_model
from requant.validate.results import Status

CHOICE = """task: letters
dataset_path: json
dataset_kwargs: {data_files: {test: letters.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
"""
WRITTEN = """task: sums
dataset_path: json
dataset_kwargs: {data_files: {test: sums.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["!"], max_gen_toks: 3}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
"""


@pytest.fixture
def tasks(tmp_path):
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "letters.yaml").write_text(CHOICE)
    (folder / "sums.yaml").write_text(WRITTEN)
    letters = [
        {"question": f"After {chr(97 + n % 20)} comes", "choices": [" b", " q", " zz"], "answer": n % 3}
        for n in range(60)
    ]
    sums = [{"question": f"1+{n}=", "answer": str(n + 1)} for n in range(4)]
    for name, rows in (("letters", letters), ("sums", sums)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def judge(source, output, text, folder, *, lossless=False, **fields):
    wanted = LmEval(folder=str(folder), **{"tasks": ("letters",), **fields})
    gate = ModelGate(text=text, tokens=256, sequence_length=64, lm_eval=wanted)
    return check_model(source, output, gate, target="nvfp4", lossless=lossless)


def by_hand(folder, tasks):
    """Accuracy on the letters by the likelihood of each choice, without lm-eval."""
    import torch
    from requant.validate.load_model import load_model

    model, right = load_model(folder).model, []
    for line in (tasks / "letters.jsonl").read_text().splitlines():
        row = json.loads(line)
        scores = []
        for choice in row["choices"]:
            before, after = [ord(c) for c in row["question"]], [ord(c) for c in choice]
            with torch.inference_mode():
                logits = model(input_ids=torch.tensor([before + after[:-1]]), use_cache=False).logits[0]
            rows = torch.log_softmax(logits, -1)[len(before) - 1 :]
            scores.append(float(rows.gather(1, torch.tensor(after)[:, None]).sum()))
        right.append(scores.index(max(scores)) == row["answer"])
    return sum(right) / len(right)


def test_both_models_answer_the_same_questions_with_errors_and_a_verdict(golden, text, tasks, capfd):
    source, output = golden("_src_llama_bf16"), golden("llama_mxfp4")
    result = judge(source, output, text, tasks, margin=0.5)
    assert result.status is Status.PASSED, result.reason
    assert set(result.data["lm_eval"]["tasks"]) == {"letters, acc", "letters, acc_norm"}
    told = result.data["lm_eval"]["tasks"]["letters, acc"]
    assert told["questions"] == 60
    assert told["source"] == pytest.approx(by_hand(source, tasks))
    assert told["target"] == pytest.approx(by_hand(output, tasks))
    assert told["difference"] == pytest.approx(told["target"] - told["source"])
    assert 0 < told["difference_stderr"] < 0.2
    assert told["source_stderr"] == pytest.approx((told["source"] * (1 - told["source"]) / 59) ** 0.5, rel=1e-6)
    assert told["verdict"] == "not inferior"
    assert told["judged"] is True
    assert result.data["lm_eval"]["tasks"]["letters, acc_norm"]["judged"] is False
    assert capfd.readouterr() == ("", "")  # no bar, no hint, no question to git


def test_equal_weights_must_have_equal_scores_and_generated_answers_count(
    golden, text, tasks, tmp_path, lossless_nvfp4
):
    source = golden("llama_mxfp4", eos_token="~")
    output = lossless_nvfp4(source, tmp_path / "output", "modelopt")
    result = judge(source, output, text, tasks, lossless=True, tasks=("letters", "sums"))
    assert result.status is Status.PASSED, result.reason
    told = result.data["lm_eval"]["tasks"]
    assert told["letters, acc"]["verdict"] == told["sums, exact_match"]["verdict"] == "not inferior"
    assert told["sums, exact_match"]["questions"] == 4
    assert told["letters, acc"]["margin"] == 0.0
    other = judge(source, golden("llama_nvfp4_kvfp8"), text, tasks, lossless=True)
    assert other.status is Status.FAILED


def test_few_questions_are_inconclusive_and_no_pass(golden, text, tasks):
    result = judge(golden("_src_llama_bf16"), golden("llama_mxfp4"), text, tasks, limit=10)
    assert result.status is Status.FAILED
    assert [finding.rule for finding in result.errors] == ["task-under-bound"]
    assert "inconclusive against a margin of 0.02" in result.errors[0].message
    assert result.errors[0].hint == "give the task more questions"


@pytest.mark.parametrize(
    ("break_it", "fields", "reason"),
    [
        (lambda f: None, {"tasks": ("hellaswag",)}, "no task hellaswag in"),
        (lambda f: (f / "letters.jsonl").unlink(), {}, "lm-eval broke off at task letters"),
        (lambda f: (f / "letters.yaml").write_text(CHOICE.replace("path: json", "path: owner/set")), {}, "broke off"),
        (lambda f: (f / "letters.yaml").write_text("task: [\n"), {}, "letters"),
    ],
)
def test_what_keeps_a_task_from_running_is_told_and_the_rest_is_kept(golden, text, tasks, break_it, fields, reason):
    break_it(tasks)
    result = judge(golden("_src_llama_bf16"), golden("llama_mxfp4"), text, tasks, **fields)
    assert result.status is Status.NOT_RUN
    assert reason in result.reason
    assert result.data["complete"] is False
    if "broke off" in reason:
        assert "256 tokens is kept" in result.reason
        assert result.data["kl"]["mean"] > 0


def test_a_folder_that_is_none_is_named(golden, text, tmp_path):
    result = judge(golden("_src_llama_bf16"), golden("llama_mxfp4"), text, tmp_path / "none")
    assert result.status is Status.NOT_RUN
    assert "none is no folder" in result.reason


def test_lm_eval_too_asks_for_less_at_a_time_where_memory_does_not_suffice(golden, text, tasks, monkeypatch):
    import torch
    from requant.validate import model_tasks

    real, batches = model_tasks._samples, []

    def cramped(measured, arm, task, wanted, batch):
        batches.append((arm, batch))
        if batch > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(measured, arm, task, wanted, batch)

    monkeypatch.setattr(model_tasks, "_samples", cramped)
    result = judge(golden("_src_llama_bf16"), golden("llama_mxfp4"), text, tasks, margin=0.5)
    assert result.status is Status.PASSED
    assert batches == [(arm, batch) for arm in ("source", "target") for batch in (8, 4, 2)]
    assert "8 requests of lm-eval at a time: 2 were made" in result.warnings[0].message
