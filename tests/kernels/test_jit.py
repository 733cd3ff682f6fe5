"""The lazy compiler: one signature per kernel, no numba before the first call, a cache that may fail."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from requant.kernels.jit import Kernel, kernel


def _add_one(values, j):
    return values[j] + np.float32(1.0)


@kernel("const f32[:]", "f32[:]", uses=(_add_one,))
def _increment(values, out):
    for j in range(values.shape[0]):
        out[j] = _add_one(values, j)


def test_kernels_import_without_numba():
    modules = "quantize, repack_jit, cpu, cpu_dequant, jit"
    code = (
        f"import sys; from requant.kernels import {modules}; sys.exit('numba' in sys.modules or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_writable_and_read_only_arrays_share_one_signature():
    values, out = np.arange(4, dtype=np.float32), np.empty(4, np.float32)
    frozen = values.copy()
    frozen.flags.writeable = False
    for given in (values, frozen):
        out[:] = 0
        _increment(given, out)
        assert out.tolist() == [1, 2, 3, 4]
    with pytest.raises(TypeError):
        _increment(values, frozen)
    with pytest.raises(TypeError):
        _increment(values.astype(np.float64), out)


@kernel("i64", "i64[:]")
def _spin(rounds, state):
    for _ in range(rounds):
        state[0] = state[0] * 6364136223846793005 + 1442695040888963407


def test_a_kernel_lets_other_threads_run():
    _spin(1, np.zeros(1, np.int64))
    worker = threading.Thread(target=_spin, args=(200_000_000, np.zeros(1, np.int64)))
    worker.start()
    time.sleep(0.02)  # the kernel has begun: were the GIL held, this would return only after its end
    running = worker.is_alive()
    worker.join()
    assert running


def test_first_calls_from_many_threads_compile_once(monkeypatch):
    fresh = Kernel(_increment._function, ("const f32[:]", "f32[:]"), (_add_one,))
    builds = []
    build = fresh._build
    monkeypatch.setattr(fresh, "_build", lambda **kw: builds.append(kw) or build(**kw))

    def call(i):
        out = np.empty(2, np.float32)
        fresh(np.full(2, i, np.float32), out)
        return out.tolist()

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(call, range(16))) == [[i + 1, i + 1] for i in range(16)]
    assert builds == [{"cache": True}]


@pytest.mark.parametrize(
    "error",
    [OSError(28, "No space left on device"), RuntimeError("no locator available"), EOFError(), ImportError("gone")],
)
def test_a_cache_that_fails_costs_time_and_nothing_else(monkeypatch, error):
    fresh = Kernel(_increment._function, ("const f32[:]", "f32[:]"), (_add_one,))
    build = fresh._build

    def failing(*, cache):
        if cache:
            raise error
        return build(cache=cache)

    monkeypatch.setattr(fresh, "_build", failing)
    out = np.empty(1, np.float32)
    fresh(np.zeros(1, np.float32), out)
    assert out[0] == 1


def test_a_helper_of_another_file_is_refused_because_its_cache_would_go_stale():
    with pytest.raises(ValueError, match="joinpath"):
        kernel("f32", uses=(Path.joinpath,))(_add_one)
