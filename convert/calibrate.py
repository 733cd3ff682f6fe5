"""What a text does inside a model: activation ranges, second moments and Hessians, measured once and kept.

    amax.<module>      F32 []      largest |x| of the module's input; NVFP4's input_scale is amax / (6 * 448)
    moment.<module>    F32 [K]     mean of x^2 per input channel: the weights of `scale: weighted`
    tokens.<module>    I64 []      how many tokens were seen: experts of a layer differ
    k.<attention>, v.<attention>   F32 []: largest |key|, |value| as the cache gets them; KV scales are amax / 448

These are a small safetensors file, named by what they depend on (the source's headers, the text's sha256, number and
length of the sequences), in the user's cache folder; a run that finds its file measures nothing. Hessians (mean of
x x^T [K, K], for `rounding: gptq`) are many times larger: one file per decoder layer in a folder beside it, written as
the layer is done. Weights that share an input (q, k and v) share one: the file's metadata says whose.

An expert that no token reached has no range of its own. It gets the largest of its group (the same projection of the
other experts of its layer), and is listed.

The model runs in FP32, layer by layer (layerwise.py), so that it need not fit into memory; the same text gives the same
numbers.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray
from requant.convert.checkpoint import Catalogue
from requant.convert.layouts.layout import Layout
from requant.convert.smollm2 import cache_folder
from requant.kernels.empty_model import ModelUnavailableError
from requant.manifests.errors import EnvironmentFault, SourceError
from requant.manifests.match import compile_match
from requant.manifests.schema import Calibrate, Manifest

if TYPE_CHECKING:
    import torch

__all__ = [
    "Calibration",
    "calibrate",
    "calibration_path",
    "hessian_of",
    "hessian_owner",
    "load_calibration",
    "moment_of",
    "obtain",
]

OpenBar = Callable[[str], AbstractContextManager[Callable[[int, int], None]]]

_VERSION: Final = 1
_EXPERT: Final = re.compile(r"^(?P<parent>.*\bexperts)\.\d+\.(?P<leaf>.+)$")


@dataclass(frozen=True, slots=True)
class Calibration:
    """The measurements. path: the file. uncovered: modules that saw no token and were given their group's maximum."""

    path: Path
    amax: Mapping[str, float]
    kv: Mapping[str, float]
    uncovered: tuple[str, ...]
    sequences: int
    digest: str

    @property
    def note(self) -> str:
        """One line for plan, lock and report."""
        left = f", {len(self.uncovered)} experts saw no token" if self.uncovered else ""
        return f"calibrated: {len(self.amax)} modules, {self.sequences} sequences{left} {self.digest[:16]}"


def calibration_path(catalogue: Catalogue, wanted: Calibrate) -> Path:
    """Where the measurements of this source on this text are kept. SourceError if the text cannot be read."""
    digest = hashlib.sha256(f"calibration {_VERSION} {wanted.samples} {wanted.sequence_length}\n".encode())
    digest.update(hashlib.sha256(_text(wanted).encode()).digest())
    for shard in catalogue.shards:
        digest.update(f"{shard.file} {shard.size} {shard.mtime_ns} {shard.header_sha256}\n".encode())
    return cache_folder() / "calibration" / f"{digest.hexdigest()[:32]}.safetensors"


def load_calibration(path: Path, *, hessians: bool = False) -> Calibration | None:
    """The measurements that an earlier run kept, or None. hessians: only if it kept those as well."""
    import safetensors

    library: Any = importlib.import_module("safetensors.numpy")
    if hessians and not (_hessians(path) / "complete").exists():
        return None
    try:
        tensors: dict[str, Any] = library.load_file(path)
        facts = _metadata(path)
        return Calibration(
            path,
            {name.removeprefix("amax."): float(v) for name, v in tensors.items() if name.startswith("amax.")},
            {name: float(v) for name, v in tensors.items() if name.startswith(("k.", "v."))},
            tuple(json.loads(facts["uncovered"])),
            int(facts["sequences"]),
            hashlib.sha256(path.read_bytes()).hexdigest(),
        )
    except (OSError, safetensors.SafetensorError, KeyError, ValueError):
        return None  # absent, or of a run that was cut short: measured again


def _metadata(path: Path) -> dict[str, str]:
    with path.open("rb") as stream:
        header: dict[str, Any] = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    return dict(json.loads(header.get("__metadata__", {}).get("requant", "{}")))


def _hessians(path: Path) -> Path:
    return path.with_suffix(".hessians")


def moment_of(path: Path, module: str) -> NDArray[np.float32] | None:
    """Mean of x^2 per input channel of a module [K]; None if it was not seen."""
    return _stored(path, f"moment.{module}")


def hessian_owner(path: Path, module: str) -> str | None:
    """Under whose name the Hessian of a module's input is kept; None if no token reached it."""
    return _owners(path).get(module, (None, None))[1]


@lru_cache(maxsize=2)
def _owners(path: Path) -> dict[str, tuple[str, str]]:
    found: dict[str, list[str]] = json.loads((_hessians(path) / "complete").read_text(encoding="utf-8"))
    return {module: (file, owner) for module, (file, owner) in found.items()}


def hessian_of(path: Path, module: str) -> NDArray[np.float32] | None:
    """Mean of x x^T of a module's input [K, K]; None if no token reached it."""
    owners = _owners(path)
    if module not in owners:
        return None
    file, owner = owners[module]
    return _stored(_hessians(path) / file, owner)


def _stored(path: Path, name: str) -> NDArray[np.float32] | None:
    """One tensor of a file, None if it is not there."""
    import safetensors

    library: Any = safetensors
    with library.safe_open(str(path), framework="np") as file:
        return file.get_tensor(name) if name in set(file.keys()) else None


def obtain(
    manifest: Manifest, root: Path, catalogue: Catalogue, layout: Layout, bar: OpenBar | None
) -> Calibration | None:
    """What the manifest's activations.calibrate asks for: kept by an earlier run, or measured now.

    None where it asks for nothing, or where nothing is kept and bar is None, which means that nothing may run. bar:
    opens a progress bar.
    """
    wanted = manifest.activations.calibrate
    if wanted is None:
        return None
    rules = [(compile_match(rule.match), rule.rounding == "gptq") for rule in manifest.layers]

    def hessian(module: str) -> bool:
        return next((gptq for matches, gptq in rules if matches(module)), False)

    needed = any(hessian(weight.module) for weight in layout.weights(catalogue))
    kept = load_calibration(calibration_path(catalogue, wanted), hessians=needed)
    if kept is not None or bar is None:
        return kept
    with bar("calibrate, tokens") as progress:
        return calibrate(root, catalogue, layout, wanted, hessian=hessian, progress=progress)


# --- measuring --------------------------------------------------------------------------------------------------------


@dataclass
class _Seen:
    """The observer: sums over all tokens, FP64 for moments, FP32 for Hessians, of one decoder layer at a time."""

    wants_hessian: Callable[[str], bool]
    folder: Path
    amax: dict[str, float] = field(default_factory=dict[str, float])
    moments: dict[str, Any] = field(default_factory=dict[str, Any])
    tokens: dict[str, int] = field(default_factory=dict[str, int])
    kv: dict[str, float] = field(default_factory=dict[str, float])
    chosen: dict[tuple[str, int], int] = field(default_factory=dict[tuple[str, int], int])
    owners: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    _hessians: dict[str, Any] = field(default_factory=dict[str, Any])
    _alias: dict[str, str] = field(default_factory=dict[str, str])

    def linear(self, names: Sequence[str], x: torch.Tensor, same_as: str | None) -> None:
        """Take note of an input."""
        import torch

        first = same_as or names[0]
        if same_as is None:
            top = float(x.abs().max()) if x.numel() else 0.0
            if not np.isfinite(top):
                raise ModelUnavailableError(f"the input of {first} holds NaN or infinity: the source is broken")
            square = x.double().square().sum(0).numpy()
            self.amax[first] = max(self.amax.get(first, 0.0), top)
            self.moments[first] = self.moments.get(first, 0.0) + square
            self.tokens[first] = self.tokens.get(first, 0) + len(x)
        for name in names:
            if name != first:
                self._alias[name] = first
        if any(self.wants_hessian(name) for name in names) and first not in self._hessians:
            self._hessians[first] = torch.zeros(x.shape[1], x.shape[1])
            if same_as is not None:
                raise ValueError(f"{names} share the input of {same_as}, of which no Hessian was wanted")
        if same_as is None and first in self._hessians:
            self._hessians[first].addmm_(x.T, x)

    def routed(self, experts: str, expert: int, tokens: int) -> None:
        """Take note of how often an expert of a stack was chosen."""
        self.chosen[experts, expert] = self.chosen.get((experts, expert), 0) + tokens

    def cache(self, attention: str, key: torch.Tensor, value: torch.Tensor) -> None:
        """Take note of keys and values."""
        for kind, states in (("k", key), ("v", value)):
            name = f"{kind}.{attention}"
            self.kv[name] = max(self.kv.get(name, 0.0), float(states.abs().max()))

    def layer_done(self, layer: str) -> None:
        """Write the layer's Hessians, and forget them."""
        if self._hessians:
            file = f"{layer}.safetensors"
            _save(
                {name: (h / max(self.tokens[name], 1)).numpy() for name, h in self._hessians.items()},
                self.folder / file,
            )
            for name in self._hessians:
                if self.tokens[name]:
                    self.owners[name] = [file, name]
            for name, owner in self._alias.items():
                if owner in self.owners:
                    self.owners[name] = self.owners[owner]
            self._hessians.clear()

    def spread(self) -> list[str]:
        """Give weights what the one that shares their input was told, and unreached experts their group's maximum."""
        for name, owner in self._alias.items():
            self.amax[name], self.moments[name] = self.amax[owner], self.moments[owner]
            self.tokens[name] = self.tokens[owner]
        groups: dict[tuple[str, str], list[str]] = {}
        for name in self.amax:
            match = _EXPERT.match(name)
            if match:
                groups.setdefault((match["parent"], match["leaf"]), []).append(name)
        uncovered = [f"{experts}.{expert}" for (experts, expert), tokens in self.chosen.items() if not tokens]
        for members in groups.values():
            top = max(self.amax[name] for name in members)
            for name in members:
                if not self.tokens[name]:
                    uncovered.append(name)
                    self.amax[name] = top
                    del self.moments[name]
        for (parent, leaf), members in groups.items():  # a stacked output holds one scale for all experts
            self.amax.setdefault(f"{parent}.{leaf}", max(self.amax[name] for name in members))
        return sorted(uncovered)


def calibrate(
    root: Path,
    catalogue: Catalogue,
    layout: Layout,
    wanted: Calibrate,
    *,
    hessian: Callable[[str], bool] = lambda _: False,
    progress: Callable[[int, int], None] = lambda _done, _all: None,
) -> Calibration:
    """Measure the source in folder `root` on a text and keep the result; see `calibration_path`.

    hessian: of which modules one is wanted. progress: called with (tokens times layers done, in all).
    EnvironmentFault where the model cannot run here, SourceError for the text.
    """
    import torch

    path = calibration_path(catalogue, wanted)
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = _hessians(path)
    wants = any(hessian(weight.module) for weight in layout.weights(catalogue))
    if wants:
        folder.mkdir(exist_ok=True)
        (folder / "complete").unlink(missing_ok=True)
    seen = _Seen(hessian, folder)
    try:
        from requant.convert.layerwise import SourceModel

        ids = torch.tensor(_sequences(root, wanted))
        model = SourceModel(root, catalogue, layout, seen)
        try:
            total, done = ids.numel() * len(model.layers), 0

            def tick(tokens: int) -> None:
                nonlocal done
                done += tokens
                progress(done, total)

            model.run(ids, tick)
        finally:
            model.close()
    except ModelUnavailableError as error:
        raise EnvironmentFault(
            f"calibration cannot run: {error}", where="activations.calibrate", hint="or give input_scale a constant"
        ) from error
    uncovered = seen.spread()
    tensors: dict[str, Any] = {
        **{f"amax.{name}": np.float32(value) for name, value in seen.amax.items()},
        **{f"tokens.{name}": np.int64(count) for name, count in seen.tokens.items()},
        **{
            f"moment.{name}": (total / max(seen.tokens[name], 1)).astype(np.float32)
            for name, total in seen.moments.items()
        },
        **{name: np.float32(value) for name, value in seen.kv.items()},
    }
    facts = {
        "text_sha256": hashlib.sha256(_text(wanted).encode()).hexdigest(),
        "sequences": str(len(ids)),
        "sequence_length": str(ids.shape[1]),
        "uncovered": json.dumps(uncovered),
    }
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    _save({name: np.asarray(value) for name, value in tensors.items()}, partial, facts)
    partial.replace(path)
    if wants:
        (folder / "complete").write_text(json.dumps(seen.owners), encoding="utf-8")
    made = load_calibration(path)
    if made is None:
        raise EnvironmentFault("the calibration that was just written cannot be read", where=str(path))
    return made


def _save(tensors: Mapping[str, Any], path: Path, facts: Mapping[str, str] | None = None) -> None:
    library: Any = importlib.import_module("safetensors.numpy")
    # under one key: the library writes several in an order that changes from run to run
    library.save_file(dict(tensors), str(path), metadata={"requant": json.dumps(dict(facts or {}), sort_keys=True)})


def _text(wanted: Calibrate) -> str:
    try:
        return Path(wanted.text).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "is not UTF-8"
        raise SourceError(f"cannot be read: {why}", where=wanted.text, hint="activations.calibrate.text") from error


def _sequences(root: Path, wanted: Calibrate) -> list[list[int]]:
    """Token sequences of equal length, from the text's beginning; fewer than asked for where it is short."""
    from requant.kernels.empty_model import encode, load_tokenizer

    tokenizer = load_tokenizer(root)
    ids = encode(tokenizer, _text(wanted), special=False)
    bos = encode(tokenizer, "", special=True)[:1]
    length = wanted.sequence_length - len(bos)
    count = min(wanted.samples, len(ids) // length)
    if count < 1:
        raise SourceError(
            f"has {len(ids)} tokens, one sequence takes {wanted.sequence_length}",
            where=wanted.text,
            hint="give a longer text, or lower activations.calibrate.sequence_length",
        )
    return [[*bos, *ids[at * length : (at + 1) * length]] for at in range(count)]
