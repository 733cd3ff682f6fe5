"""Stage `model` where it cannot measure: the reason is told, nothing is raised, nothing passes. Bounds by format."""

import pytest
from requant.kernels import empty_model
from requant.kernels.empty_model import ModelUnavailableError
from requant.manifests.gates import ModelGate
from requant.validate.model import check_model, default_limits
from requant.validate.results import StageResult, Status, weights_equal


def gate(tmp_path, **fields):
    text = tmp_path / "text.txt"
    text.write_text("All the world is a stage. " * 400)
    return ModelGate(text=fields.pop("text", str(text)), **fields)


def result_of(tmp_path, made):
    return check_model(tmp_path, tmp_path, made, target="nvfp4", lossless=False)


def test_without_transformers_the_stage_did_not_run_and_names_the_extra(tmp_path, monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(empty_model.importlib, "import_module", missing)
    result = result_of(tmp_path, gate(tmp_path))
    assert result.status is Status.NOT_RUN
    assert "requant[eval]" in result.reason
    assert result.data["complete"] is False


@pytest.mark.parametrize(
    ("content", "reason"), [(None, "No such file"), (b"\xff\xfe\x00", "not UTF-8"), ("folder", "Is a directory")]
)
def test_a_text_that_cannot_be_read_is_named(tmp_path, content, reason):
    path = tmp_path / "other.txt"
    if content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    result = result_of(tmp_path, gate(tmp_path, text=str(path)))
    assert result.status is Status.NOT_RUN
    assert "other.txt" in result.reason
    assert reason in result.reason


def test_a_gate_for_a_gpu_is_not_met_without_one(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = result_of(tmp_path, gate(tmp_path, device="cuda"))
    assert result.status is Status.NOT_RUN
    assert "there is none" in result.reason


def test_an_error_of_the_forward_pass_is_a_reason_and_not_a_crash(tmp_path, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied\nmore")

    monkeypatch.setattr("requant.validate.model_measure.load_tokenizer", broken)
    result = result_of(tmp_path, gate(tmp_path))
    assert result.status is Status.NOT_RUN
    assert result.reason.endswith("RuntimeError: mat1 and mat2 shapes cannot be multiplied")


def test_unavailable_stays_itself():
    assert issubclass(ModelUnavailableError, RuntimeError)  # caught before RuntimeError, so order matters


def test_auto_bounds_follow_what_became_of_the_numbers():
    assert default_limits("nvfp4", lossless=True) == (0.0, 1.0)
    assert default_limits("nvfp4-w4a16", lossless=False) == default_limits("nvfp4", lossless=False)
    kl = {fmt: default_limits(fmt, lossless=False)[0] for fmt in ("fp8", "nvfp4", "mxfp4")}
    assert kl["fp8"] < kl["nvfp4"] < kl["mxfp4"]
    assert default_limits("bf16", lossless=False) == (None, None)
    rounded = default_limits("nvfp4", lossless=True, w4a4=True)  # activations lose where weights do not
    assert rounded[0] > kl["nvfp4"]
    assert rounded == default_limits("nvfp4-w4a16", lossless=False, w4a4=True)
    assert default_limits("fp8", lossless=False, w4a4=True) == default_limits("fp8", lossless=False)


def test_any_device_means_the_cpu_for_small_models_and_a_gpu_for_large_ones(tmp_path, monkeypatch):
    from requant.validate import model

    small, large = tmp_path / "small", tmp_path / "large"
    for folder, size in ((small, 10), (large, 3 << 30)):
        folder.mkdir()
        with (folder / "model.safetensors").open("wb") as file:
            file.truncate(size)  # sparse
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA X")
    wanted = {device: gate(tmp_path, device=device) for device in ("any", "cpu", "cuda")}
    assert model._device(wanted["any"], small) == ("cpu", "cpu")
    assert model._device(wanted["any"], large) == ("cuda", "cuda:0 NVIDIA X")
    assert model._device(wanted["cpu"], large) == ("cpu", "cpu")
    assert model._device(wanted["cuda"], small) == ("cuda", "cuda:0 NVIDIA X")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert model._device(wanted["any"], large) == ("cpu", "cpu")


def test_bounds_on_a_gpu_leave_room_for_the_order_of_a_sum(tmp_path):
    from requant.validate.model import _limits

    made = gate(tmp_path)
    cpu, gpu = (_limits(made, "nvfp4", True, device) for device in ("cpu", "cuda"))
    assert (cpu.max_kl, cpu.max_ppl_ratio, cpu.identical) == (0.0, 1.0, True)
    assert (gpu.max_kl, gpu.max_ppl_ratio, gpu.identical) == (1e-3, 1.001, False)


def test_without_lm_eval_a_gate_with_tasks_names_the_extra_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    made = gate(tmp_path, lm_eval={"tasks": ("t",), "folder": str(tmp_path)})
    result = result_of(tmp_path, made)
    assert result.status is Status.NOT_RUN
    assert result.reason == "lm_eval is not installed: pip install 'requant[eval]'"


@pytest.mark.parametrize(
    ("status", "data", "equal"),
    [
        (Status.PASSED, {"totals": {"changed": 0}}, True),
        (Status.PASSED, {"totals": {"changed": 1}}, False),
        (Status.FAILED, {"totals": {"changed": 0}}, False),
        (Status.NOT_RUN, {}, False),
    ],
)
def test_only_a_numerics_stage_that_passed_makes_weights_equal(status, data, equal):
    assert weights_equal(StageResult("numerics", status, "", data=data)) is equal


def judged(kl, answers_kl, *, max_kl=None, max_ppl_ratio=None):
    """Findings on 256 positions of a text and of answers, with these KLs; the perplexities are equal."""
    from types import SimpleNamespace

    import numpy as np
    from requant.validate.divergence import Positions
    from requant.validate.model import Limits, _judge

    def positions(values):
        some = np.broadcast_to(np.asarray(values, dtype=np.float64), 256)
        return Positions(some, np.ones(256), np.full(256, 2.0), np.full(256, 2.0))

    found = []
    measured = SimpleNamespace(
        data={}, positions=positions(kl), answers=positions(answers_kl), identical=True, first_difference=[None]
    )
    _judge(measured, Limits(max_kl, max_ppl_ratio, False, "manifest"), found)
    return [(finding.rule, finding.message) for finding in found]


def test_answers_that_are_no_numbers_do_not_pass_beside_a_text_that_is_fine():
    import numpy as np

    spoilt = np.full(256, 0.1)
    assert judged(0.1, spoilt, max_kl=0.2) == []
    assert judged(0.1, 0.3, max_kl=0.2)[0][0] == "kl-over-bound"
    spoilt[70] = np.nan
    said = "logits hold NaN or infinity from token 70"
    assert judged(0.1, spoilt, max_kl=0.2) == [("not-finite", f"{said} of the source's answers on")]
    assert judged(spoilt, 0.1, max_kl=0.2) == [("not-finite", f"{said} on")]


def test_equal_models_have_a_ratio_of_one_and_keep_no_bound_below_it():
    assert judged(0.0, 0.0, max_ppl_ratio=1.0) == []
    assert [rule for rule, _ in judged(0.0, 0.0, max_ppl_ratio=0.99)] == ["perplexity-over-bound"]
