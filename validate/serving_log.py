"""Which server wrote this log, and which FP4 kernels it says it chose.

A server that loads an FP4 checkpoint without FP4 units decodes the weights and multiplies in BF16 (Marlin and its
kin), and says so in one line among thousands: a speed without that line compares two kernels by accident. The patterns
are those of vLLM 0.10 to 0.30 and SGLang; a log that holds none of them yields "unknown", never a guess.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

__all__ = ["Backend", "read_log"]

_VERSIONS: Final = (
    ("vLLM", re.compile(r"vLLM API server version v?(\d[\w.+-]*)")),
    ("vLLM", re.compile(r"Initializing a V[01] LLM engine \(v(\d[\w.+-]*?)\)")),
    ("SGLang", re.compile(r"\bsglang[ =:v]+(\d[\w.+-]*)", re.IGNORECASE)),
)
_NAMES: Final = (
    ("SGLang", re.compile(r"server_args=ServerArgs\(|\bsglang\b", re.IGNORECASE)),
    ("vLLM", re.compile(r"\bvllm\b", re.IGNORECASE)),
    ("TensorRT-LLM", re.compile(r"\[TensorRT-LLM\]|\btensorrt_llm\b", re.IGNORECASE)),
    ("llama.cpp", re.compile(r"\bllama_model_loader\b|\bllama\.cpp\b", re.IGNORECASE)),
)
_CHOICES: Final = (
    ("dense", re.compile(r"Using (?:NvFp4LinearBackend\.)?(\w+) for NVFP4 GEMM")),
    ("MoE", re.compile(r"Using '?(\w+)'? NvFp4 MoE backend")),
    ("MoE", re.compile(r"Using '?(?:Mxfp4\w*Backend\.)?(\w+)'? (?:mxfp4|Mxfp4|MXFP4)(?: MoE)? backend")),
    ("MXFP4", re.compile(r"\[get_mxfp4_backend\w*\] Using (\w[\w ]*?) backend")),
    ("dense", re.compile(r"\bfp4_gemm_(?:runner_)?backend='(\w+)'")),
    ("MoE", re.compile(r"\bmoe_runner_backend='(\w+)'")),
)
_WEIGHT_ONLY: Final = re.compile(
    r"does not have native support for FP4 computation|[Ww]eight-only FP4 compression will be used"
)
_DECODES: Final = re.compile(r"marlin|humming|emulation|triton|dequant", re.IGNORECASE)
_NATIVE: Final = re.compile(r"cutlass|trtllm|cutedsl|cudnn|b12x|flashinfer|deepgemm", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Backend:
    """server, version: "" where the log does not say. kernels: "dense: X", "MoE: Y", in the order of the log.

    fp4_native: whether FP4 units multiply; False as soon as one of the kernels decodes first; None: unknown.
    """

    server: str
    version: str
    kernels: tuple[str, ...]
    fp4_native: bool | None


def read_log(text: str) -> Backend:
    """Look for the lines that name the server and its choices."""
    server, version = next(((name, m[1]) for name, rx in _VERSIONS if (m := rx.search(text))), ("", ""))
    server = server or next((name for name, rx in _NAMES if rx.search(text)), "")
    found = [(m.start(), f"{kind}: {m[1]}") for kind, rx in _CHOICES for m in rx.finditer(text) if m[1] != "auto"]
    kernels = list(dict.fromkeys(choice for _, choice in sorted(found)))
    weight_only = _WEIGHT_ONLY.search(text) is not None
    if weight_only and not any("marlin" in choice.lower() for choice in kernels):
        kernels.append("weight-only: Marlin")
    if weight_only or any(_DECODES.search(choice) for choice in kernels):
        native: bool | None = False
    else:
        native = True if kernels and all(_NATIVE.search(choice) for choice in kernels) else None
    return Backend(server, version, tuple(kernels), native)
