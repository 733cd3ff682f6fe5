"""What to convert, into what, how: every section of a manifest but `validate` (gates.py).

Each model checks what can be judged by looking at it alone; what takes several of them is in `checks.py`, and
`schema.py` puts them together. The descriptions become the JSON Schema, and so the help that an editor shows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, Self, cast

from pydantic import Field, model_validator
from requant.manifests.fields import Count, Flag, Location, Place, RepoId, Scale, Section, Size, Text, fault, no_repeats
from requant.manifests.match import REGEX_PREFIX, pattern_fault
from requant.manifests.sizes import format_size

__all__ = [
    "SCALE_CHOICES",
    "Activations",
    "Calibrate",
    "Execute",
    "FromCheckpoint",
    "Granularity",
    "LayerRule",
    "Publish",
    "Rounding",
    "Runtime",
    "ScaleChoice",
    "Source",
    "SourceLayout",
    "Target",
    "TargetFormat",
    "TargetLayout",
    "TensorFormat",
]

SourceLayout = Literal[
    "auto",
    "deepseek-v4",
    "deepseek-v3",
    "gpt-oss",
    "compressed-tensors",
    "modelopt",
    "quark",
    "gptq",
    "awq",
    "gguf",
    "plain",
]
TargetFormat = Literal["nvfp4", "nvfp4-w4a16", "mxfp4", "fp8", "bf16"]
TargetLayout = Literal["modelopt", "modelopt-experts", "compressed-tensors", "deepseek-v3"]
Granularity = Literal["tensor", "channel", "block"]
TensorFormat = Literal["nvfp4", "mxfp4", "fp8", "bf16", "keep", "drop"]
ScaleChoice = Literal["lossless", "nearest", "four-over-six", "mse", "weighted"]
Rounding = Literal["nearest", "gptq"]
Runtime = Literal["vllm", "sglang", "trtllm", "transformers"]

SCALE_CHOICES: Final[dict[TensorFormat, tuple[ScaleChoice, ...]]] = {
    "nvfp4": ("lossless", "nearest", "four-over-six", "mse", "weighted"),
    "mxfp4": ("nearest", "lossless", "mse"),
    "fp8": ("nearest", "lossless", "mse"),
    "bf16": ("lossless",),
    "keep": ("lossless",),
    "drop": ("lossless",),
}
"""Scale choices that mean something for a `to`; the first is the default. Nothing is rescaled by the last three."""

SHARD_SIZE_MIN: Final = 1000
SHARD_SIZE_MAX: Final = 10**12


class Source(Section):
    """Which checkpoint to read. Exactly one of `repo` and `path`."""

    repo: RepoId | None = Field(default=None, description="Repository on the Hub, `owner/name`.")
    path: Place | None = Field(
        default=None,
        description="Folder on this machine (relative: to the current one), or an object store: s3://BUCKET/PREFIX, "
        "gs://..., whatever fsspec reads.",
    )
    revision: Text = Field(
        default="main", description="Branch, tag or commit of `repo`; the lock records the commit it stood for."
    )
    layout: SourceLayout = Field(
        default="auto",
        description="How the producer stored its weights. `auto` recognises it from headers and config, and says why.",
    )

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if self.repo is None and self.path is None:
            raise fault("", "exactly one of repo and path must say where the checkpoint is; neither does")
        if self.repo is not None and self.path is not None:
            raise fault("path", "exactly one of repo and path must say where the checkpoint is; both do")
        if self.path is not None and "revision" in self.model_fields_set and self.revision != "main":
            raise fault("revision", "a revision belongs to source.repo; a folder given by source.path has none")
        return self


class Target(Section):
    """What to make, and who must be able to load it."""

    format: TargetFormat = Field(
        description="Number format of the converted layers. `nvfp4-w4a16` is NVFP4 without activation scales."
    )
    layout: TargetLayout = Field(
        default="modelopt",
        description="Names, suffixes and metadata of the output. `modelopt-experts` splits gpt-oss's stacked experts; "
        "`deepseek-v3` is FP8 in blocks under `weight_scale_inv`.",
    )
    output: Place = Field(
        description="Folder of the finished checkpoint; it must not exist yet. Relative: to the current folder. Or an "
        "object store: s3://BUCKET/PREFIX, gs://..."
    )
    shard_size: Size = Field(default=5 * 10**9, description="Upper bound of one output shard, such as 5GB or 512MiB.")
    runtimes: tuple[Runtime, ...] = Field(
        default=(), description="Runtimes whose loader contracts the output must meet. An empty list names none."
    )

    @model_validator(mode="after")
    def _sane(self) -> Self:
        if not SHARD_SIZE_MIN <= self.shard_size <= SHARD_SIZE_MAX:
            bounds = f"{format_size(SHARD_SIZE_MIN)} and {format_size(SHARD_SIZE_MAX)}"
            raise fault("shard_size", f"{self.shard_size} bytes is no useful shard: say between {bounds}, such as 5GB")
        if self.layout == "modelopt-experts" and self.format not in ("nvfp4", "nvfp4-w4a16"):
            raise fault(
                "layout", f"layout modelopt-experts is defined for nvfp4 and nvfp4-w4a16, not for {self.format}"
            )
        if self.layout == "deepseek-v3" and self.format != "fp8":
            raise fault("layout", f"layout deepseek-v3 is FP8 in blocks; it cannot hold {self.format}")
        no_repeats("runtimes", self.runtimes)
        return self


class LayerRule(Section):
    """What becomes of the modules whose name matches. The first rule that matches a module decides."""

    match: Text = Field(
        description="Whole module name, without `.weight`. `*` is any run of characters, dots too; `?` is one; "
        "`re:` starts a regular expression. A pattern that begins with `*` must be quoted."
    )
    to: TensorFormat = Field(
        description="Format to convert to. `keep` copies byte for byte; `drop` leaves the tensors out."
    )
    scale: ScaleChoice = Field(
        default="lossless",
        description="How block scales are chosen. `lossless` moves an MXFP4 scale over exactly (default for nvfp4); "
        "`nearest` rounds as modelopt does (default for mxfp4, fp8); `four-over-six` and `mse` search for less error, "
        "`mse` over the global scale too; `weighted` is `mse` with each input channel weighed by what "
        "activations.calibrate saw there.",
    )
    rounding: Rounding = Field(
        default="nearest",
        description="How weights become codes under those scales. `gptq` makes later columns compensate the errors of "
        "earlier ones, for less error of the layer's output; to nvfp4 and mxfp4, needs activations.calibrate.",
    )
    granularity: Granularity | None = Field(
        default=None,
        description="With `to: fp8`, what one scale covers: the tensor (default of layout modelopt), each output "
        "channel (of compressed-tensors), or each block of 128 x 128 (of deepseek-v3; of modelopt the "
        "weight-only FP8_PB_WO).",
    )
    optional: Flag = Field(
        default=False, description="Without it, a rule that matches no module of the checkpoint is an error."
    )

    @model_validator(mode="before")
    @classmethod
    def _default_scale(cls, data: object) -> object:
        """Fill in the scale that fits `to`, so that a reader of the model never has to ask."""
        if not isinstance(data, Mapping):
            return data
        given = cast("Mapping[str, object]", data)
        return {**given, "scale": "nearest"} if "scale" not in given and given.get("to") in ("mxfp4", "fp8") else given

    @model_validator(mode="after")
    def _means_something(self) -> Self:
        if wrong := pattern_fault(self.match):
            raise fault("match", wrong)
        if not self.match.startswith(REGEX_PREFIX) and self.match.endswith(".weight"):
            raise fault(
                "match", f"rules name modules, not tensors; did you mean '{self.match.removesuffix('.weight')}'?"
            )
        if self.granularity is not None and self.to != "fp8":
            raise fault("granularity", f"granularity has no meaning with to: {self.to}; FP4 has blocks of its own")
        choices = SCALE_CHOICES[self.to]
        if self.scale not in choices:
            why = "nothing is rescaled" if len(choices) == 1 else f"it takes {', '.join(choices)}"
            raise fault("scale", f"scale: {self.scale} has no meaning with to: {self.to} ({why})")
        if self.rounding == "gptq" and (self.to not in ("nvfp4", "mxfp4") or self.scale == "lossless"):
            what = f"to: {self.to}" if self.to not in ("nvfp4", "mxfp4") else "scale: lossless"
            raise fault("rounding", f"rounding: gptq has no meaning with {what}: nothing is rounded to FP4")
        return self

    @property
    def needs_calibration(self) -> bool:
        """Whether it cannot be followed without activations.calibrate."""
        return self.rounding == "gptq" or self.scale == "weighted"


class FromCheckpoint(Section):
    """Activation scales copied from another NVFP4 checkpoint of the same model."""

    path: Location = Field(alias="from", description="Folder of the other checkpoint.")


class Calibrate(Section):
    """Activation scales measured by running the source model over a text."""

    text: Location = Field(description="File with the calibration text, UTF-8.")
    samples: Count = Field(default=512, description="How many sequences to run.")
    sequence_length: Count = Field(default=512, description="Tokens per sequence.")


class Activations(Section):
    """Where `input_scale` comes from: a constant, another checkpoint, or calibration."""

    input_scale: Scale | FromCheckpoint | None = Field(
        default=1.0,
        description="Constant for every layer (1.0 is modelopt's data-free choice), or {from: FOLDER} to copy from "
        "another NVFP4 checkpoint of the model. Left out: the source's own scales where it has them, else 1.0. "
        "null where the format has none (nvfp4-w4a16, mxfp4, bf16).",
    )
    calibrate: Calibrate | None = Field(default=None, description="Measure the scales on a text instead.")

    @model_validator(mode="before")
    @classmethod
    def _one_origin(cls, data: object) -> object:
        """With `calibrate` there is no constant: the default steps back, a written one is a contradiction."""
        if not isinstance(data, Mapping):
            return data
        given = cast("Mapping[str, object]", data)
        alone = given.get("calibrate") is not None and "input_scale" not in given
        return {**given, "input_scale": None} if alone else given

    @model_validator(mode="after")
    def _not_both(self) -> Self:
        if self.calibrate is not None and self.input_scale is not None:
            raise fault("input_scale", "input_scale and calibrate exclude each other: delete one")
        return self


class Execute(Section):
    """How to run. Nothing here changes a byte of the output."""

    workers: Count | Literal["auto"] = Field(
        default="auto", description="Threads (engine local) or tasks (engine ray)."
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="Where it computes; auto takes a GPU that measures faster (docs/kernels.md)."
    )
    engine: Literal["local", "ray"] = Field(default="local", description="`ray` spreads the work over a cluster.")
    ray_address: Text | None = Field(
        default=None, description="Of a running cluster: auto or ray://HOST:PORT. Without it a local Ray is started."
    )
    stream: Flag = Field(
        default=False,
        description="Fetch from the Hub or object store only what is converted next and free it afterwards. With "
        "engine ray every task does so by itself, and needs no shared file system.",
    )
    max_disk: Size | None = Field(
        default=None,
        description="With `stream`: bytes on disk at any time, such as 40GB. With engine ray: of one task.",
    )
    work: Location | None = Field(
        default=None,
        description="Where target.output is an object store: the folder here in which the output takes shape, with "
        "the journal. Left out: a folder of the output's last name in the current one.",
    )

    @model_validator(mode="after")
    def _belongs(self) -> Self:
        if self.ray_address is not None and self.engine != "ray":
            raise fault("ray_address", "ray_address has no meaning with engine: local; did you mean engine: ray?")
        if self.max_disk is not None and not self.stream:
            raise fault("max_disk", "max_disk bounds a streamed conversion; did you mean to set stream: true?")
        return self


class Publish(Section):
    """Where the signed-off checkpoint goes."""

    repo: RepoId = Field(description="Repository on the Hub, `owner/name`; made if it does not exist.")
    private: Flag = Field(default=True, description="Whether a new repository is private.")
    via: Literal["pull_request", "branch", "main"] = Field(
        default="pull_request", description="What the upload lands in. An upload to main is not atomic."
    )
