"""`kernel`: a typed, lazy face on numba.njit, the only place that knows numba.

    @kernel("const u8[:,:]", "i64[:]", uses=(_helper,))
    def _census(codes, hist): ...

Numba is imported and the function compiled on the first call, so that `--help` and `plan` never pay for it. One
signature per kernel: an argument marked `const` takes read-only arrays (a memory map) and writable ones alike, where
numba left to itself would compile each apart. Every array is C-contiguous and aligned; the callers check that, and the
shapes, because the compiled code does not check bounds.

Options, and why: nogil (the workers are threads), error_model numpy (no branch per division), fastmath off (every
result is defined bit by bit, and NaN must survive), cache on. The cache lies where numba puts it, in `__pycache__`
beside the source or in the user's own cache folder, both writable by this user only; with neither, with a full disk or
a spoilt cache file, the kernel is compiled in memory. Numba throws a cached kernel away when the text of the file that
holds it changes, hence helpers must stand in the kernel's own file; whoever changes the options here, or the tables of
formats.py, must clear the cache.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import FunctionType
from typing import Any, Generic, ParamSpec, TypeVar, cast

__all__ = ["Kernel", "kernel"]

P = ParamSpec("P")
R = TypeVar("R")

_SCALARS = {"u8": "uint8", "u16": "uint16", "u32": "uint32", "i64": "int64", "f32": "float32", "f64": "float64"}
_LOCK = threading.Lock()


def _numba_type(spec: str) -> Any:
    """`f32`, `i64[:]` or `const u8[:,:]` as a numba type."""
    from numba import types

    text = spec.removeprefix("const ")
    name, _, dims = text.partition("[")
    scalar: Any = getattr(types, _SCALARS[name])
    if not dims:
        return scalar
    return types.Array(scalar, dims.count(":"), "C", readonly=text != spec)


class Kernel(Generic[P, R]):
    """A function that becomes machine code when it is first called; thread-safe, releases the GIL."""

    def __init__(
        self, function: Callable[P, R], signature: tuple[str, ...], uses: tuple[Callable[..., Any], ...]
    ) -> None:
        self._function = cast(FunctionType, function)
        self._signature = signature
        self._uses = uses
        self._compiled: Callable[P, R] | None = None
        strangers = [used.__name__ for used in uses if used.__module__ != function.__module__]
        if strangers:
            raise ValueError(f"{function.__name__} uses {strangers} of another file: its cache would go stale")

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return (self._compiled or self.compile())(*args, **kwargs)

    def compile(self) -> Callable[P, R]:
        """Machine code for the one signature, from the cache where there is one."""
        with _LOCK:
            if self._compiled is None:
                try:
                    self._compiled = self._build(cache=True)
                except Exception:  # noqa: BLE001 - no folder to cache in, a full disk, a spoilt file: no reason to stop
                    self._compiled = self._build(cache=False)
        return self._compiled

    def _build(self, *, cache: bool) -> Callable[P, R]:
        import numba

        jit: Any = numba.njit
        scope = dict(self._function.__globals__)
        for used in self._uses:  # in order: a helper sees the helpers before it
            scope[used.__name__] = jit(error_model="numpy")(_rebind(cast(FunctionType, used), scope))
        dispatcher = jit(nogil=True, cache=cache, error_model="numpy")(_rebind(self._function, scope))
        dispatcher.compile(tuple(_numba_type(spec) for spec in self._signature))
        dispatcher.disable_compile()
        return cast(Callable[P, R], dispatcher)


def _rebind(function: FunctionType, scope: dict[str, Any]) -> FunctionType:
    """The same code, looking its globals up in scope."""
    copy = FunctionType(function.__code__, scope, function.__name__, function.__defaults__, function.__closure__)
    copy.__module__ = function.__module__
    copy.__qualname__ = function.__qualname__
    return copy


def kernel(*signature: str, uses: tuple[Callable[..., Any], ...] = ()) -> Callable[[Callable[P, R]], Kernel[P, R]]:
    """Mark a function for compilation with these argument types; `uses` names the plain functions that it calls."""

    def wrap(function: Callable[P, R]) -> Kernel[P, R]:
        return Kernel(function, signature, uses)

    return wrap
