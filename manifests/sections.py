"""The parts of a manifest, version 1, as frozen models that refuse every key they do not know.

Each model checks what can be judged by looking at it alone; what takes several of them is in `checks.py`, and
`schema.py` puts them together. Python holds that `True == 1`, and pydantic would turn `yes` into 1 and `"3"` into 3:
numbers and booleans are therefore strict, and the loader is the only place that reads text. The descriptions become
the JSON Schema, and so the help that an editor shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, ClassVar, Final, Literal, Self, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError
from requant.manifests.match import REGEX_PREFIX, pattern_fault
from requant.manifests.sizes import SIZE_PATTERN, format_size, parse_size

__all__ = [
    "SCALE_CHOICES",
    "Activations",
    "Calibrate",
    "Device",
    "Execute",
    "Flag",
    "FromCheckpoint",
    "KernelsGate",
    "LayerRule",
    "ModelGate",
    "NumericsGate",
    "Publish",
    "RepoId",
    "Runtime",
    "ScaleChoice",
    "Section",
    "ServingGate",
    "Source",
    "SourceLayout",
    "SpeedGate",
    "Target",
    "TargetFormat",
    "TargetLayout",
    "TensorFormat",
    "Text",
    "Validate",
    "fault",
]

SourceLayout = Literal["auto", "deepseek-v4", "gpt-oss", "compressed-tensors", "modelopt", "quark", "plain"]
TargetFormat = Literal["nvfp4", "nvfp4-w4a16", "mxfp4", "fp8", "bf16"]
TargetLayout = Literal["modelopt", "modelopt-experts", "compressed-tensors"]
TensorFormat = Literal["nvfp4", "mxfp4", "fp8", "bf16", "keep", "drop"]
ScaleChoice = Literal["lossless", "nearest", "four-over-six", "mse"]
Runtime = Literal["vllm", "sglang", "trtllm", "transformers"]
Device = Literal["cpu", "cuda", "any"]

SCALE_CHOICES: Final[dict[TensorFormat, tuple[ScaleChoice, ...]]] = {
    "nvfp4": ("lossless", "nearest", "four-over-six", "mse"),
    "mxfp4": ("nearest", "lossless", "mse"),
    "fp8": ("nearest", "lossless", "mse"),
    "bf16": ("lossless",),
    "keep": ("lossless",),
    "drop": ("lossless",),
}
"""Scale choices that mean something for a `to`; the first is the default. Nothing is rescaled by the last three."""

SHARD_SIZE_MIN: Final = 1000
SHARD_SIZE_MAX: Final = 10**12
FLOAT32_MIN: Final = 2.0**-126
"""Smallest normal FP32: the scales are stored as FP32, and a smaller one may read as zero."""
FLOAT32_MAX: Final = (2.0 - 2.0**-23) * 2.0**127


def fault(at: str, what: str) -> PydanticCustomError:
    """What a model finds wrong with itself, to be raised: at which field (dotted; empty: the whole), and a sentence."""
    return PydanticCustomError("requant", "{what}", {"at": at, "what": what})


def _size(value: object) -> object:
    """Bytes of a size; anything but a string is left to the field's own type."""
    return parse_size(value) if isinstance(value, str) else value


def _no_repeats(field: str, values: Iterable[object]) -> None:
    """Fault if a list names something twice."""
    seen: set[object] = set()
    for index, value in enumerate(values):
        if value in seen:
            raise fault(f"{field}.{index}", f"'{value}' stands here twice")
        seen.add(value)


Flag = Annotated[bool, Strict()]
Count = Annotated[int, Strict(), Field(ge=1)]
Number = Annotated[float, Strict(), Field(allow_inf_nan=False)]
Positive = Annotated[float, Strict(), Field(allow_inf_nan=False, gt=0)]
Text = Annotated[str, Strict(), Field(min_length=1)]
Size = Annotated[
    int,
    Strict(),
    BeforeValidator(_size),
    Field(ge=1),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string", "pattern": SIZE_PATTERN}]}),
]
Scale = Annotated[float, Strict(), Field(allow_inf_nan=False, ge=FLOAT32_MIN, le=FLOAT32_MAX)]
RepoId = Annotated[str, Strict(), Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*$")]


class Section(BaseModel):
    """A part of the manifest: frozen, and no key is ignored."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class Source(Section):
    """Which checkpoint to read. Exactly one of `repo` and `path`."""

    repo: RepoId | None = Field(default=None, description="Repository on the Hub, `owner/name`.")
    path: Text | None = Field(default=None, description="Folder on this machine. Relative: to the current folder.")
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
        description="Names, suffixes and metadata of the output. `modelopt-experts` splits gpt-oss's stacked experts.",
    )
    output: Text = Field(
        description="Folder of the finished checkpoint; it must not exist yet. Relative: to the current folder."
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
        _no_repeats("runtimes", self.runtimes)
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
        "`nearest` rounds as modelopt does (default for mxfp4, fp8); `four-over-six` and `mse` search for less error.",
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
        choices = SCALE_CHOICES[self.to]
        if self.scale not in choices:
            why = "nothing is rescaled" if len(choices) == 1 else f"it takes {', '.join(choices)}"
            raise fault("scale", f"scale: {self.scale} has no meaning with to: {self.to} ({why})")
        return self


class FromCheckpoint(Section):
    """Activation scales copied from another NVFP4 checkpoint of the same model."""

    path: Text = Field(alias="from", description="Folder of the other checkpoint.")


class Calibrate(Section):
    """Activation scales measured by running the source model over a text."""

    text: Text = Field(description="File with the calibration text, UTF-8.")
    samples: Count = Field(default=512, description="How many sequences to run.")
    sequence_length: Count = Field(default=512, description="Tokens per sequence.")


class Activations(Section):
    """Where `input_scale` comes from: a constant, another checkpoint, or calibration."""

    input_scale: Scale | FromCheckpoint | None = Field(
        default=1.0,
        description="Constant for every layer (1.0 is modelopt's data-free choice), or {from: FOLDER} to copy from "
        "another NVFP4 checkpoint of the model. null where the format has none (nvfp4-w4a16, mxfp4, bf16).",
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
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="Where the conversion computes.")
    engine: Literal["local", "ray"] = Field(default="local", description="`ray` spreads the work over a cluster.")
    ray_address: Text | None = Field(
        default=None, description="Of a running cluster: auto or ray://HOST:PORT. Without it a local Ray is started."
    )
    stream: Flag = Field(
        default=False, description="Fetch from the Hub only what is converted next and free it afterwards."
    )
    max_disk: Size | None = Field(default=None, description="With `stream`: bytes on disk at any time, such as 40GB.")

    @model_validator(mode="after")
    def _belongs(self) -> Self:
        if self.ray_address is not None and self.engine != "ray":
            raise fault("ray_address", "ray_address has no meaning with engine: local; did you mean engine: ray?")
        if self.max_disk is not None and not self.stream:
            raise fault("max_disk", "max_disk bounds a streamed conversion; did you mean to set stream: true?")
        return self


class Gate(Section):
    """A condition of the sign-off. One that stands in the manifest is required unless it says otherwise."""

    required: Flag = Field(default=True, description="Whether the sign-off needs this gate to have run and passed.")
    device: Device = Field(default="any", description="Device on which it must have run to count.")


class NumericsGate(Gate):
    """Bounds on the converted weights against the source, tensor by tensor. The comparison itself always runs."""

    lossless: Literal["required", "report"] = Field(
        default="report",
        description="`required`: one lossy block fails the gate. `report`: they are counted, and bounded by the rest.",
    )
    max_lossy_tensors: Annotated[int, Strict(), Field(ge=0)] | None = Field(
        default=None, description="How many of the source's quantized tensors may hold a lossy block."
    )
    min_sqnr_db: Positive | None = Field(
        default=None, description="Least signal to quantization noise ratio of any one tensor, in dB."
    )

    @model_validator(mode="after")
    def _no_slack(self) -> Self:
        if self.lossless == "required" and self.max_lossy_tensors:
            raise fault("max_lossy_tensors", "lossless: required allows none; write lossless: report to allow some")
        return self


class KernelsGate(Gate):
    """The FP4 kernels on the converted weights, against float64."""

    modules: Count | Literal["all"] = Field(default=32, description="How many modules to sample, or all.")
    max_rel_error: Positive = Field(
        default=5e-3, description="Largest relative error (Frobenius norm) of any path on any module."
    )


class ModelGate(Gate):
    """The converted model against the source on the same tokens."""

    text: Text = Field(description="File with the text to score, UTF-8.")
    tokens: Count = Field(default=8192, description="How many tokens of it.")
    max_kl: Annotated[float, Strict(), Field(allow_inf_nan=False, ge=0)] | None = Field(
        default=None, description="Largest mean KL divergence of the next-token distributions, in nats."
    )
    max_ppl_ratio: Positive | None = Field(
        default=None, description="Largest perplexity, as a multiple of the source's."
    )
    trust_remote_code: Flag = Field(
        default=False, description="Run Python code that the checkpoint carries. Never needed to convert."
    )


def _load_points(concurrency: tuple[int, ...], requests: tuple[int, ...]) -> None:
    """Fault unless every concurrency has its number of requests, at least as large."""
    if not concurrency:
        raise fault("concurrency", "an empty list measures nothing; give at least one concurrency")
    _no_repeats("concurrency", concurrency)
    if len(requests) != len(concurrency):
        raise fault(
            "requests", f"{len(requests)} numbers of requests for {len(concurrency)} concurrencies; give as many"
        )
    for index, (streams, count) in enumerate(zip(concurrency, requests, strict=True)):
        if count < streams:
            raise fault(
                f"requests.{index}", f"{count} requests cannot keep {streams} streams busy; give {streams} or more"
            )


class SpeedGate(Gate):
    """Tokens per second of the converted model, at each concurrency."""

    device: Device = Field(default="cuda", description="Device on which it must have run to count.")
    concurrency: tuple[Count, ...] = Field(default=(1, 8, 16), description="Streams that decode at a time.")
    requests: tuple[Count, ...] = Field(default=(8, 32, 48), description="Requests to serve at each of them.")
    baseline: Literal["source", "bf16"] = Field(default="source", description="What the speed is compared with.")
    min_speedup: Positive | None = Field(default=None, description="Least speed, as a multiple of the baseline's.")

    @model_validator(mode="after")
    def _points(self) -> Self:
        _load_points(self.concurrency, self.requests)
        return self


class ServingGate(Gate):
    """A server with an OpenAI-compatible interface: one that runs (`endpoint`) or one to start (`launch`)."""

    endpoint: Annotated[str, Strict(), Field(pattern=r"^https?://[^\s]+$")] | None = Field(
        default=None, description="Address of a server that runs."
    )
    launch: Text | None = Field(default=None, description="Command that starts one; {model} and {port} are filled in.")
    label: Text | None = Field(default=None, description="Name of the run in reports and comparisons.")
    timeout_s: Positive = Field(default=900.0, description="Seconds to wait for the server to become healthy.")
    concurrency: tuple[Count, ...] = Field(default=(1, 8, 16), description="Streams at a time.")
    requests: tuple[Count, ...] = Field(default=(8, 32, 48), description="Requests to send at each of them.")

    @model_validator(mode="after")
    def _one_server(self) -> Self:
        if (self.endpoint is None) == (self.launch is None):
            which = "neither is" if self.endpoint is None else "both are"
            raise fault("", f"exactly one of endpoint and launch must be given; {which}")
        _load_points(self.concurrency, self.requests)
        return self


class Validate(Section):
    """The gates of the sign-off. The contract check and the comparison of numbers run whatever stands here."""

    numerics: NumericsGate | None = Field(default=None, description="Bounds on the converted weights.")
    kernels: KernelsGate | None = Field(default=None, description="FP4 kernels on the converted weights.")
    model: ModelGate | None = Field(default=None, description="Accuracy of the model as a whole.")
    speed: SpeedGate | None = Field(default=None, description="Decode speed of the model.")
    serving: ServingGate | None = Field(default=None, description="A real server that loads the output.")


class Publish(Section):
    """Where the signed-off checkpoint goes."""

    repo: RepoId = Field(description="Repository on the Hub, `owner/name`; made if it does not exist.")
    private: Flag = Field(default=True, description="Whether a new repository is private.")
    via: Literal["pull_request", "branch", "main"] = Field(
        default="pull_request", description="What the upload lands in. An upload to main is not atomic."
    )
