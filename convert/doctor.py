"""`requant doctor`: what this machine offers, and which kernel paths run here."""

from __future__ import annotations

import os
import platform
import shutil
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from requant.convert.show import size_text, table

__all__ = ["diagnose", "doctor_text"]

PACKAGES = (
    "requant",
    "torch",
    "numpy",
    "numba",
    "safetensors",
    "huggingface_hub",
    "pydantic",
    "triton",
    "transformers",
)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def diagnose() -> dict[str, Any]:
    """Versions, processors, memory, disk, GPUs."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    gpus: list[dict[str, Any]] = []
    reason = ""
    try:
        torch: Any = import_module("torch")
        if torch.cuda.is_available():
            for index in range(torch.cuda.device_count()):
                properties = torch.cuda.get_device_properties(index)
                gpus.append(
                    {
                        "name": properties.name,
                        "capability": f"{properties.major}.{properties.minor}",
                        "memory_bytes": properties.total_memory,
                    }
                )
        else:
            reason = "torch sees no CUDA device" if torch.version.cuda else "this torch is a CPU build"
    except ImportError as error:
        reason = f"torch cannot be imported: {error}"
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processors": usable,
        "packages": {name: _version(name) for name in PACKAGES},
        "nvcc": shutil.which("nvcc"),
        "disk_free_bytes": shutil.disk_usage(os.curdir).free,
        "copy_file_range": hasattr(os, "copy_file_range"),
        "gpus": gpus,
        "no_gpu_because": reason,
        "kernel_paths": _kernel_paths(),
    }


def _kernel_paths() -> list[dict[str, str]]:
    """Each kernel path, and the GPU quantizers: runs, compiles, or unavailable because ..."""
    from requant.kernels import gpu_quantize
    from requant.kernels.dispatch import paths

    found = [(state.path.value, state.availability) for state in paths()]
    found.append(("gpu-quantize", gpu_quantize.availability()))
    return [{"path": path, "state": state.state.value, "reason": state.reason} for path, state in found]


def doctor_text(facts: dict[str, Any]) -> str:
    """The diagnosis as a page."""
    lines = [
        f"Python {facts['python']} on {facts['platform']}, {facts['processors']} processors, "
        f"{size_text(facts['disk_free_bytes'])} free here",
        "",
        table(["package", "version"], list(facts["packages"].items())),
        "",
    ]
    if facts["gpus"]:
        lines += [f"GPU {g['name']}, SM{g['capability']}, {size_text(g['memory_bytes'])}" for g in facts["gpus"]]
    else:
        lines.append(f"no GPU: {facts['no_gpu_because']}; conversion does not need one")
    lines.append(f"nvcc: {facts['nvcc'] or 'not found (CUDA kernels cannot be built here)'}")
    lines.append(f"copy_file_range: {'yes' if facts['copy_file_range'] else 'no (plain copies)'}")
    lines += ["", table(["kernel path", "state", "why"], [
        [p["path"], p["state"], p["reason"]] for p in facts["kernel_paths"]
    ])]  # fmt: skip
    return "\n".join(lines)
