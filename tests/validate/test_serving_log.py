"""What a server's log says of its FP4 kernels, in the words of vLLM and SGLang."""

from __future__ import annotations

import pytest
from requant.validate.serving_log import read_log

STAMP = "(EngineCore pid=187) INFO 05-01 18:55:06 "
DENSE = STAMP + "[__init__.py:683] Using FlashInferCutlassNvFp4LinearKernel for NVFP4 GEMM\n"
POTENTIAL = "['FLASHINFER_TRTLLM', 'FLASHINFER_CUTLASS', 'VLLM_CUTLASS', 'MARLIN', 'EMULATION'].\n"


def moe(name: str) -> str:
    return f"{STAMP}[nvfp4.py:209] Using '{name}' NvFp4 MoE backend out of potential backends: {POTENTIAL}"


WEIGHT_ONLY = (
    "WARNING [marlin.py:34] Your GPU does not have native support for FP4 computation but FP4 quantization is being "
    "used. Weight-only FP4 compression will be used leveraging the Marlin kernel. This may degrade performance\n"
)


@pytest.mark.parametrize(
    ("log", "kernels", "native"),
    [
        (DENSE, ("dense: FlashInferCutlassNvFp4LinearKernel",), True),
        (DENSE + moe("VLLM_CUTLASS"), ("dense: FlashInferCutlassNvFp4LinearKernel", "MoE: VLLM_CUTLASS"), True),
        (DENSE + moe("MARLIN"), ("dense: FlashInferCutlassNvFp4LinearKernel", "MoE: MARLIN"), False),
        (moe("EMULATION"), ("MoE: EMULATION",), False),
        ("Using NvFp4LinearBackend.MARLIN for NVFP4 GEMM\n", ("dense: MARLIN",), False),
        (WEIGHT_ONLY, ("weight-only: Marlin",), False),
        (WEIGHT_ONLY + moe("MARLIN"), ("MoE: MARLIN",), False),
        ("INFO [mxfp4.py:1] [get_mxfp4_backend] Using Marlin backend\n", ("MXFP4: Marlin",), False),
        ("server_args=ServerArgs(fp4_gemm_runner_backend='flashinfer_cutlass')", ("dense: flashinfer_cutlass",), True),
        ("server_args=ServerArgs(fp4_gemm_runner_backend='auto', moe_runner_backend='auto')", (), None),
        ("INFO:     Uvicorn running on http://localhost:8000\n", (), None),
        ("", (), None),
    ],
)
def test_the_kernels_and_whether_fp4_units_multiply(log: str, kernels: tuple[str, ...], native: bool | None) -> None:
    found = read_log(log)
    assert found.kernels == kernels
    assert found.fp4_native is native


@pytest.mark.parametrize(
    ("log", "server", "version"),
    [
        ("INFO [api_server.py] vLLM API server version 0.26.0\n", "vLLM", "0.26.0"),
        ("Initializing a V1 LLM engine (v0.24.0+092c4842.dev) with config\n", "vLLM", "0.24.0+092c4842.dev"),
        ("server_args=ServerArgs(model_path='m')\n", "SGLang", ""),
        ("[TensorRT-LLM] TensorRT LLM version: 1.2\n", "TensorRT-LLM", ""),
        ("llama_model_loader: loaded meta data\n", "llama.cpp", ""),
        ("INFO: Started server process [1]\n", "", ""),
    ],
)
def test_the_server_and_its_version(log: str, server: str, version: str) -> None:
    found = read_log(log)
    assert (found.server, found.version) == (server, version)
