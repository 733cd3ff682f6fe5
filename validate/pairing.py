"""Which output tensor came from which source tensor, from names, dtypes and shapes alone: a closed census.

This is the second opinion's own reading of the layouts: it shares nothing with the code that wrote the output. Every
source tensor ends as converted, copied or dropped by a rule of the manifest; every output tensor as converted, copied
or added (global scales, input scales, KV scales). What is left on either side is an error, never a shrug.

A `View` is a 2-D matrix [rows, width] inside a stored tensor: one expert of a stack, every second row (gpt-oss stores
gate and up interleaved), or a plane that lies transposed ([E, K/2, N], as modelopt exports stacked experts). Two views
of the same shape can be compared whatever the two checkpoints look like.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from requant.kernels.formats import NumberFormat
from requant.validate.decoders import Decoded, decoded_of, split_family
from requant.validate.modules import Kind, Module, expert_of, modules_of
from requant.validate.opened import Tensor

__all__ = ["Copy", "Pair", "Pairing", "UnreadableError", "View", "Weight", "pair_checkpoints", "weight_of"]

_INTERLEAVED = {"gate_proj": 0, "up_proj": 1}
"""Rows of gpt-oss's gate_up_proj: even = gate, odd = up (transformers, modeling_gpt_oss.py)."""
_ADDED_SUFFIXES = (".k_scale", ".v_scale", ".input_scale", ".input_global_scale", "_input_scale")
_NO_FORMAT = {
    Kind.UNSCALED: "packed codes without a scale",
    Kind.INTEGER: "an integer tensor",
    Kind.ORPHAN: "scales without codes",
}


@dataclass(frozen=True, slots=True)
class View:
    """Rows first, first + step, ... of one matrix in a tensor. expert: index on the first axis, None for a 2-D tensor.

    transposed: the matrix is stored as [columns, rows].
    """

    tensor: Tensor
    expert: int | None = None
    first: int = 0
    step: int = 1
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class Weight:
    """One [N, K] weight matrix. codes: FP4 codes [N, K/2], or plain values [N, K] for BF16; scales [N, K/group].

    decoded: how to read a weight in another format than these; `codes` is then the tensor that holds most of it.
    """

    module: str
    format: NumberFormat
    rows: int
    k: int
    codes: View
    scales: View | None = None
    global_scale: Tensor | None = None
    reciprocal: bool = False
    decoded: Decoded | None = None

    @property
    def packed(self) -> bool:
        """FP4 codes with block scales, which can be compared without decoding."""
        return self.scales is not None

    @property
    def label(self) -> str:
        """The format's name in reports."""
        return self.decoded.kind if self.decoded is not None else self.format.value


@dataclass(frozen=True, slots=True)
class Pair:
    """A converted weight. name: the output module it is reported under."""

    name: str
    source: Weight
    output: Weight


@dataclass(frozen=True, slots=True)
class Copy:
    """Two tensors, or one row of a source tensor and a whole output tensor, that must hold the same bytes."""

    source: Tensor
    output: Tensor
    expert: int | None = None
    first: int = 0
    step: int = 1


@dataclass(slots=True)
class Pairing:
    """The census. unreadable: output weights for which no comparison is known, with the reason."""

    pairs: list[Pair] = field(default_factory=list[Pair])
    copies: list[Copy] = field(default_factory=list[Copy])
    dropped: dict[str, str] = field(default_factory=dict[str, str])
    missing: list[str] = field(default_factory=list[str])
    incomplete: dict[str, str] = field(default_factory=dict[str, str])
    extra: list[str] = field(default_factory=list[str])
    leftover: list[str] = field(default_factory=list[str])
    added: list[str] = field(default_factory=list[str])
    unreadable: dict[str, str] = field(default_factory=dict[str, str])
    converted: set[str] = field(default_factory=set[str])


class UnreadableError(Exception):
    """A module that cannot be seen as a weight; the message says why."""


def pair_checkpoints(
    source: Mapping[str, Tensor],
    output: Mapping[str, Tensor],
    dropped_by: Callable[[str], str | None],
    configs: tuple[Mapping[str, object] | None, Mapping[str, object] | None] = (None, None),
    restated: Callable[[Module, Module], bool] | None = None,
) -> Pairing:
    """Pair all tensors of two checkpoints.

    dropped_by(module) names the rule that drops a module, or None. configs: config.json of source and output, for what
    tensors do not tell (FP8 blocks, GPTQ's zero points, how experts are stacked). restated: whether a module of the
    output that stands in the source under the same names has another global scale there, so that its numbers must be
    compared and not its bytes. Never raises for what the checkpoints hold.
    """
    census = Pairing()
    ours, theirs = modules_of(output), modules_of(source)
    claimed: set[str] = set()
    covered: dict[str, int] = {}
    for module in ours.values():
        if not _converted(module, theirs):
            continue
        if not _kept(module, theirs, source) or (restated is not None and restated(module, theirs[module.name])):
            _pair_module(module, theirs, census, claimed, covered, configs)
        elif (scale := theirs[module.name].input_scale) is not None and module.input_scale is None:
            census.converted.add(
                scale.name
            )  # a weight-only output of the same weights: whether it may is the contract's
    for name, rows in covered.items():
        origin = theirs[name]
        expected = _rows(origin, split_family(configs[0])) * _experts(origin)
        if rows != expected:
            census.incomplete[name] = f"{rows:,} of its {expected:,} rows are in the output"
    _pair_copies(source, output, theirs, claimed, census)
    owners = {part.name: module.name for module in theirs.values() for part in module.parts.values()}
    copied = {copy.source.name for copy in census.copies}
    for name in source:
        if name in census.converted or name in copied:
            continue
        rule = dropped_by(owners[name])
        if rule is None:
            census.missing.append(name)
        else:
            census.dropped[name] = rule
    return census


def _experts(module: Module) -> int:
    weight = module.weight
    return weight.shape[0] if module.stacked and weight is not None and len(weight.shape) > 2 else 1


def _converted(module: Module, theirs: Mapping[str, Module]) -> bool:
    """Whether an output module holds a weight that a conversion makes: quantized, or BF16 of something else."""
    if module.kind in (Kind.NVFP4, Kind.MXFP4, Kind.FP8):
        return True
    origin = theirs.get(module.name)
    if module.kind is not Kind.PLAIN or origin is None or module.weight is None:
        return False
    was = origin.weight
    if origin.kind is Kind.PLAIN:
        to_bf16 = was is not None and was.dtype in ("F16", "F32") and module.weight.dtype == "BF16"
        return to_bf16 and len(module.weight.shape) > 1
    return origin.kind in (Kind.NVFP4, Kind.MXFP4, Kind.FP8, Kind.INT4, Kind.GGUF)


def _core(module: Module) -> set[str]:
    """Names of the tensors that make up the weight: what a conversion consumes, or writes anew."""
    if module.kind is Kind.INT4:
        return {part.name for role, part in module.parts.items() if role != "bias"}
    parts = (module.weight, module.block_scale, module.global_scale, module.input_scale)
    return {part.name for part in parts if part is not None}


def _rows(module: Module, split: bool | None = None) -> int:
    """Output features, per expert: [E, N, K/32, 16] blocks, [E, K, N] stacks, [N, K] matrices.

    split: plain stacks lie [E, N, K] (True), or [E, K, N] (False, None).
    """
    weight = module.weight
    if module.kind is Kind.INT4:
        return _int4_rows(module)
    if weight is None or len(weight.shape) < 2:
        return 0
    if "blocks" in module.parts:
        return weight.shape[1]
    if module.kind is Kind.GGUF:
        return weight.shape[-2]
    if module.stacked and module.kind is Kind.PLAIN and split:
        return weight.shape[1]
    return weight.shape[-1] if module.stacked else weight.shape[0]


def _int4_rows(module: Module) -> int:
    """N of an INT4 weight: the last axis of GPTQ's and AWQ's scales, the first of compressed-tensors'."""
    scales = module.parts.get("scales")
    if scales is not None:
        return scales.shape[-1] if scales.shape else 0
    return module.parts["weight_packed"].shape[0]


def _kept(module: Module, theirs: Mapping[str, Module], source: Mapping[str, Tensor]) -> bool:
    """Whether the module stands in the source under the same names, dtypes and shapes: a copy, not a conversion."""
    origin = theirs.get(module.name)
    core = [part for part in (module.weight, module.block_scale, module.global_scale) if part is not None]
    same = all(t.name in source and (source[t.name].dtype, source[t.name].shape) == (t.dtype, t.shape) for t in core)
    return origin is not None and origin.kind is module.kind and same


def _pair_module(
    module: Module,
    theirs: Mapping[str, Module],
    census: Pairing,
    claimed: set[str],
    covered: dict[str, int],
    configs: tuple[Mapping[str, object] | None, Mapping[str, object] | None],
) -> None:
    claimed.update(_core(module))
    try:
        origin, first, step = _origin(module, theirs, split_family(configs[0]))
        census.converted.update(_core(origin))
        weights = list(_matched(module, origin, first, step, configs))
    except UnreadableError as error:
        census.unreadable[module.name] = str(error)
        return
    for theirs_weight, ours_weight in weights:
        covered[origin.name] = covered.get(origin.name, 0) + ours_weight.rows
        if (theirs_weight.rows, theirs_weight.k) != (ours_weight.rows, ours_weight.k):
            census.unreadable[module.name] = (
                f"is {ours_weight.rows} x {ours_weight.k}, its source {theirs_weight.rows} x {theirs_weight.k}"
            )
            return
        census.pairs.append(Pair(module.name, theirs_weight, ours_weight))


def _origin(module: Module, theirs: Mapping[str, Module], split: bool | None) -> tuple[Module, int, int]:
    """The source module, and which of its rows: every `step`-th from `first`, or a half of them (step 0)."""
    if module.name in theirs:
        return theirs[module.name], 0, 1
    parts = expert_of(module.name)
    if parts is not None:
        parent, _, leaf = parts
        alone = theirs.get(f"{parent}.{leaf}")
        if alone is not None and alone.stacked:
            return alone, 0, 1
        stack = theirs.get(f"{parent}.gate_up_proj") if leaf in _INTERLEAVED else None
        if stack is not None and stack.stacked:
            if split is None or stack.kind is not Kind.PLAIN:
                return stack, _INTERLEAVED[leaf], 2
            return stack, _INTERLEAVED[leaf] * _rows(stack, split) // 2, 0
    raise UnreadableError("has no counterpart in the source")


def _matched(
    module: Module,
    origin: Module,
    first: int,
    step: int,
    configs: tuple[Mapping[str, object] | None, Mapping[str, object] | None],
) -> Iterator[tuple[Weight, Weight]]:
    parts = expert_of(module.name)
    before, after = configs
    if origin.stacked and not module.stacked:
        if parts is None:
            raise UnreadableError(f"is one matrix, its source {origin.name} a stack of experts")
        if parts[1] >= _experts(origin):
            raise UnreadableError(f"expert {parts[1]} does not exist: the source has {_experts(origin)}")
        yield weight_of(origin, parts[1], first, step, before), weight_of(module, None, config=after)
    elif origin.stacked and module.stacked:
        if _experts(origin) != _experts(module):
            raise UnreadableError(f"holds {_experts(module)} experts, its source {_experts(origin)}")
        for expert in range(_experts(origin)):
            yield weight_of(origin, expert, config=before), weight_of(module, expert, config=after)
    elif module.stacked:
        raise UnreadableError(f"is a stack of experts, its source {origin.name} one matrix")
    else:
        yield weight_of(origin, None, config=before), weight_of(module, None, config=after)


def weight_of(
    module: Module,
    expert: int | None,
    first: int = 0,
    step: int = 1,
    config: Mapping[str, object] | None = None,
) -> Weight:
    """A module (or one expert of it) as a matrix; UnreadableError where parts or shapes are wrong.

    Of its rows every `step`-th from `first`; step 0: half of them, from `first`.
    """
    codes, scales = module.weight, module.block_scale
    if module.kind in (Kind.FP8, Kind.INT4, Kind.GGUF):
        found = decoded_of(module, config, expert or 0)
        if isinstance(found, str):
            raise UnreadableError(f"{module.name} {found}")
        body = codes or module.parts["qweight"]
        kind = NumberFormat.FP8 if module.kind is Kind.FP8 else NumberFormat.BF16
        return Weight(module.name, kind, found.rows, found.k, View(body), decoded=found)
    if codes is None or module.kind in _NO_FORMAT:
        raise UnreadableError(
            f"{module.name} is {_NO_FORMAT.get(module.kind, 'no weight')}: no comparison is known for it"
        )
    if expert is None and len(codes.shape) != 2:
        raise UnreadableError(f"{codes.name} has shape {list(codes.shape)}: expected two axes")
    split = split_family(config) if module.kind is Kind.PLAIN else None
    turned = module.stacked and "blocks" not in module.parts and not split
    view = View(codes, expert, first, step or 1, turned)
    rows = _rows(module, split) // (step or 2)
    if module.kind is Kind.PLAIN:
        k = codes.shape[-1] if split and module.stacked else module.k
        return Weight(module.name, NumberFormat.BF16, rows, k, view)
    if scales is None:
        raise UnreadableError(f"{module.name} has no block scales")
    if scales.shape != module.scale_shape(module.group) or module.k % module.group:
        expected = list(module.scale_shape(module.group))
        raise UnreadableError(f"{scales.name} has shape {list(scales.shape)}: expected {expected}")
    if module.kind is Kind.NVFP4 and (module.global_scale is None or scales.dtype != "F8_E4M3"):
        wrong = "no global scale" if module.global_scale is None else f"{scales.dtype} scales where E4M3 belong"
        raise UnreadableError(f"{module.name} has {wrong}")
    return Weight(
        module.name,
        NumberFormat.NVFP4 if module.kind is Kind.NVFP4 else NumberFormat.MXFP4,
        rows,
        module.k,
        view,
        View(scales, expert, first, step or 1, turned),
        module.global_scale,
        "weight_global_scale" in module.parts,
    )


def _pair_copies(
    source: Mapping[str, Tensor],
    output: Mapping[str, Tensor],
    theirs: Mapping[str, Module],
    claimed: set[str],
    census: Pairing,
) -> None:
    bias_rows: dict[str, int] = {}
    for name, tensor in output.items():
        if name in claimed:
            if name in source and source[name].name not in census.converted:
                census.copies.append(Copy(source[name], tensor))
            continue
        if name in source:
            if name in census.converted:
                census.leftover.append(name)
            else:
                census.copies.append(Copy(source[name], tensor))
            continue
        bias = _stacked_bias(name, theirs)
        if bias is not None:
            origin, expert, first, step = bias
            census.copies.append(Copy(origin, tensor, expert, first, step))
            bias_rows[origin.name] = bias_rows.get(origin.name, 0) + tensor.elements
        elif name.endswith(_ADDED_SUFFIXES):
            census.added.append(name)
        else:
            census.extra.append(name)
    census.added.extend(sorted(name for name in claimed if name not in source and name.endswith(_ADDED_SUFFIXES)))
    for name, elements in bias_rows.items():
        if elements != source[name].elements:
            census.incomplete[name] = f"{elements:,} of its {source[name].elements:,} elements are in the output"


def _stacked_bias(name: str, theirs: Mapping[str, Module]) -> tuple[Tensor, int, int, int] | None:
    """(source tensor, expert, first, step) for `...experts.E.gate_proj.bias`, where the source stacks its biases."""
    module, _, leaf = name.rpartition(".")
    parts = expert_of(module)
    if leaf != "bias" or parts is None:
        return None
    parent, expert, projection = parts
    stack = theirs.get(f"{parent}.{'gate_up_proj' if projection in _INTERLEAVED else projection}")
    bias = stack.parts.get("bias") if stack is not None else None
    if bias is None or len(bias.shape) != 2 or expert >= bias.shape[0]:
        return None
    return (bias, expert, _INTERLEAVED[projection], 2) if projection in _INTERLEAVED else (bias, expert, 0, 1)
