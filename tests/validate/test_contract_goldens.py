"""Real exports and published configurations pass the contract: nothing here may be stricter than the runtimes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from requant.manifests.errors import SourceError, UsageError
from requant.validate.contract import check_contract
from requant.validate.results import Status

MODELOPT = Path(__file__).resolve().parent.parent / "goldens" / "modelopt"


@pytest.mark.parametrize(
    "golden",
    [
        "llama_nvfp4_kvfp8",
        "llama_nvfp4_kvnvfp4",
        "llama_w4a16_nvfp4",
        "llama_mixed_fp8attn_nvfp4mlp",
        "qwen3moe_nvfp4_experts",
        "qwen3moe_nvfp4_kvfp8",
        "_src_llama_bf16",
        "_src_qwen3moe_bf16",
    ],
)
def test_exports_that_the_runtimes_load_pass(golden):
    result = check_contract(MODELOPT / golden, ("vllm", "sglang"))
    assert result.errors == ()
    assert result.status is Status.PASSED


@pytest.mark.parametrize(
    "golden",
    ["llama_mxfp4", "llama_w4a8_mxfp4_fp8", "llama_nvfp4_awq_lite", "gptoss_nvfp4_cast", "gptoss_nvfp4_requant"],
)
def test_exports_that_no_runtime_loads_are_sound_in_themselves(golden):
    result = check_contract(MODELOPT / golden, ())
    assert result.errors == ()
    assert result.reason == "no runtime is declared: the common rules hold"


@pytest.mark.parametrize("golden", ["llama_mxfp4", "llama_w4a8_mxfp4_fp8", "llama_nvfp4_awq_lite"])
@pytest.mark.parametrize("runtime", ["vllm", "sglang"])
def test_algorithms_that_the_runtimes_refuse_fail(golden, runtime, hits):
    result = check_contract(MODELOPT / golden, (runtime,))
    assert [finding.runtime for finding in hits(result, "algo-unsupported")] == [runtime]
    assert result.data["runtimes"][runtime] == "simulated: would fail"


def test_measurements_of_a_real_export():
    data = check_contract(MODELOPT / "qwen3moe_nvfp4_kvfp8", ("vllm", "sglang", "trtllm")).data
    assert data["bits_per_weight"] == 4.5
    assert data["modules"] == {"nvfp4": 16, "plain": 8}
    assert data["kv_scales"] == 2
    assert data["declared"] == "modelopt NVFP4"
    assert data["runtimes"] == {"vllm": "simulated: ok", "sglang": "simulated: ok", "trtllm": "unverified"}


def test_mxfp4_export_measures_4_25_bits():
    assert check_contract(MODELOPT / "llama_mxfp4", ()).data["bits_per_weight"] == 4.25


def test_report_never_says_loads():
    result = check_contract(MODELOPT / "llama_nvfp4_kvfp8", ("vllm", "sglang", "trtllm"))
    standing = set(result.data["runtimes"].values())
    assert standing == {"simulated: ok", "unverified"}
    assert "loads" not in result.reason


def test_result_is_json_with_the_rules_in_it():
    result = check_contract(MODELOPT / "llama_mxfp4", ("vllm",))
    back = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert back["stage"] == "contract"
    assert back["status"] == "failed"
    assert back["findings"][0]["rule"] == "algo-unsupported"
    assert back["data"]["rules"]["algo-unsupported"] == 1


def test_unknown_runtime_and_absent_folder_are_errors(tmp_path):
    with pytest.raises(UsageError, match="unknown runtime 'vlm'"):
        check_contract(MODELOPT / "llama_mxfp4", ("vlm",))
    with pytest.raises(SourceError, match="no such folder"):
        check_contract(tmp_path / "absent", ())


def test_second_opinion_shares_no_code_with_the_writer_and_imports_torch_late():
    code = (
        "import sys, requant.validate.contract; print([m for m in sys.modules if m.startswith(('torch', 'requant.c'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
