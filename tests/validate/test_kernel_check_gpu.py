"""The stage `kernels` on a GPU: every path that runs there, dense and grouped, on checkpoints of every layout."""

from pathlib import Path

import pytest
from requant.kernels.dispatch import paths
from requant.manifests.gates import KernelsGate
from requant.validate.kernel_check import COLUMNS, check_kernels
from requant.validate.results import Status

pytestmark = pytest.mark.gpu

GOLDENS = Path(__file__).resolve().parents[1] / "goldens" / "modelopt"


@pytest.mark.parametrize(
    ("golden", "experts", "static"),
    [
        ("llama_nvfp4_kvfp8", False, True),
        ("llama_mxfp4", False, False),
        ("qwen3moe_nvfp4_experts", True, True),
        ("gptoss_nvfp4_requant", True, True),
        ("_src_gptoss_mxfp4", True, False),
    ],
)
def test_every_path_of_this_gpu_is_right_on_these_weights(golden, experts, static):
    result = check_kernels(GOLDENS / golden, KernelsGate(modules="all", device="cuda"))
    assert (result.status, result.errors) == (Status.PASSED, ()), result.reason
    assert result.device.startswith("cuda:0 ")
    run = {state.path.value for state in paths() if state.runs} - {"reference"}
    found = [dict(zip(COLUMNS, row, strict=True)) for row in result.data["rows"]]
    assert {row["path"] for row in found} == run == set(result.data["worst"])
    assert max(row["of_bound"] for row in found) <= 1
    for path in run:
        kinds = {row["activations"] for row in found if row["path"] == path}
        rounds = any(state.path.value == path and state.path.rounds_activations for state in paths())
        expected = (
            {"random", "wide", "edges"}
            | ({"experts"} if experts else set())
            | ({"static"} if static and rounds else set())
        )
        assert kinds == expected, path
        assert all((row["rounding_error"] is None) is not rounds for row in found if row["path"] == path)
