"""The `validate` section: the gates of the sign-off.

A section that stands in the manifest is a required gate unless it says `required: false`, and counts only if it ran on
its `device`. A bound that is null is measured and reported, and judged by nobody.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self, cast

from pydantic import Field, Strict, model_validator
from requant.manifests.fields import Count, Flag, Location, Positive, Section, Text, fault, no_repeats

__all__ = ["Device", "KernelsGate", "LmEval", "ModelGate", "NumericsGate", "ServingGate", "SpeedGate", "Validate"]

Device = Literal["cpu", "cuda", "any"]


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


class LmEval(Section):
    """Tasks of lm-eval on the source and the converted model, from files of yours; nothing is fetched."""

    tasks: tuple[Text, ...] = Field(description="Names of tasks that stand in the folder.")
    folder: Location = Field(description="Folder with the tasks' YAML files and their data.")
    limit: Count | None = Field(default=None, description="How many questions of each; null: all.")
    margin: Annotated[float, Strict(), Field(allow_inf_nan=False, ge=0)] = Field(
        default=0.02,
        description="How much less than the source the converted model may score; the whole one-sided 95% interval "
        "counts. Where every weight equals its source, scores must be equal on a CPU.",
    )
    batch_size: Count = Field(default=8, description="Requests at a time; fewer where memory does not suffice.")
    chat_template: Flag = Field(default=False, description="Ask through the chat template.")

    @model_validator(mode="after")
    def _named_once(self) -> Self:
        if not self.tasks:
            raise fault("tasks", "an empty list measures nothing; give at least one task")
        no_repeats("tasks", self.tasks)
        return self


class ModelGate(Gate):
    """The converted model against the source on the same tokens."""

    text: Location = Field(description="File with the text to score, UTF-8.")
    tokens: Count = Field(default=4096, description="How many tokens of it.")
    sequence_length: Count = Field(default=512, description="Tokens in a row; the text is cut into such stretches.")
    greedy_steps: Annotated[int, Strict(), Field(ge=64)] = Field(
        default=64, description="Greedy steps to compare from each prompt: fewer than 64 have passed broken models."
    )
    prompts: Location | None = Field(
        default=None,
        description="File with a prompt per line, through the chat template where there is one. Without it: eight "
        "built-in questions for chat models, beginnings of the text for others.",
    )
    max_kl: Annotated[float, Strict(), Field(allow_inf_nan=False, ge=0)] | Literal["auto"] | None = Field(
        default="auto",
        description="Largest mean KL divergence of the next-token distributions, in nats. `auto`: 0, and identical "
        "greedy tokens, where every weight equals its source; otherwise what the format makes one expect.",
    )
    max_ppl_ratio: Positive | Literal["auto"] | None = Field(
        default="auto", description="Largest perplexity, as a multiple of the source's; the whole interval counts."
    )
    lm_eval: LmEval | None = Field(default=None, description="Tasks to run on both models; null runs none.")
    w4a4: Flag = Field(
        default=False, description="Also round activations to NVFP4 by their static scales, as FP4 tensor cores do."
    )
    trust_remote_code: Flag = Field(
        default=False, description="Run Python code that the checkpoint carries. Never needed to convert."
    )


def _load_points(concurrency: tuple[int, ...], requests: tuple[int, ...]) -> None:
    """Fault unless every concurrency has its number of requests, at least as large."""
    if not concurrency:
        raise fault("concurrency", "an empty list measures nothing; give at least one concurrency")
    no_repeats("concurrency", concurrency)
    if len(requests) != len(concurrency):
        raise fault("requests", f"{len(requests)} numbers for {len(concurrency)} concurrencies; give one for each")
    for index, (streams, count) in enumerate(zip(concurrency, requests, strict=True)):
        if count < streams:
            raise fault(
                f"requests.{index}", f"{count} requests cannot keep {streams} streams busy; give at least {streams}"
            )


class SpeedGate(Gate):
    """Tokens per second of the converted model, at each concurrency."""

    device: Device = Field(default="cuda", description="Device on which it must have run to count.")
    concurrency: tuple[Count, ...] = Field(default=(1, 8, 16), description="Streams that decode at a time.")
    requests: tuple[Count, ...] = Field(default=(8, 32, 48), description="Requests to serve at each of them.")
    baseline: Literal["source", "bf16"] = Field(default="source", description="What the speed is compared with.")
    prompt_tokens: Count = Field(default=512, description="Tokens of each prompt; they are random.")
    output_tokens: Annotated[int, Strict(), Field(ge=2)] = Field(
        default=128, description="Tokens that each request decodes."
    )
    min_speedup: Positive | None = Field(
        default=None, description="Least speed of decoding, as a multiple of the baseline's, at every concurrency."
    )
    min_tokens_per_s: Positive | None = Field(
        default=None, description="Least tokens per second of one stream, at the first concurrency."
    )
    min_roofline: Annotated[float, Strict(), Field(gt=0, le=1)] | None = Field(
        default=None,
        description="Least part of a step's bandwidth roofline, at the first concurrency; needs a GPU.",
    )

    @model_validator(mode="after")
    def _points(self) -> Self:
        _load_points(self.concurrency, self.requests)
        return self


Bound = Positive | tuple[Positive, ...] | None
"""A bound for every concurrency alike, or one for each."""


class ServingGate(Gate):
    """A server with an OpenAI-compatible interface: one that runs (`endpoint`) or one to start (`launch`)."""

    endpoint: Annotated[str, Strict(), Field(pattern=r"^https?://[^\s]+$")] | None = Field(
        default=None, description="Address of a server that runs."
    )
    launch: Text | None = Field(default=None, description="Command that starts one; {model} and {port} are filled in.")
    label: Text | None = Field(default=None, description="Name of the run in reports and comparisons.")
    card: Text | None = Field(
        default=None,
        description="What an endpoint runs on, such as NVIDIA B200; it cannot be asked, and `device` counts.",
    )
    timeout_s: Positive = Field(default=900.0, description="Seconds to wait for the server to become healthy.")
    question: Text | None = Field(
        default=None, description="Asked before anything is timed. null: the capital of France."
    )
    answer: Annotated[str, Strict()] = Field(
        default="Paris", description="A word that must stand in the answer. Empty: nothing is asked (random weights)."
    )
    concurrency: tuple[Count, ...] = Field(default=(1, 8, 16), description="Streams at a time.")
    requests: tuple[Count, ...] = Field(default=(8, 32, 48), description="Requests to send at each of them.")
    prompt_tokens: Count = Field(default=512, description="Tokens of a synthetic prompt.")
    output_tokens: Count = Field(default=128, description="Tokens of an answer.")
    prompts: Location | None = Field(
        default=None, description="File with a prompt per line, instead of synthetic ones."
    )
    max_ttft_ms: Bound = Field(
        default=None,
        description="Most time to the first token, at the 95th percentile; one for all or each concurrency.",
    )
    max_itl_ms: Bound = Field(default=None, description="Most time between tokens, likewise.")
    min_output_tokens_per_s: Bound = Field(default=None, description="Least output of all streams together, likewise.")
    native_fp4: Flag = Field(
        default=False, description="The server's log must name a kernel that multiplies in FP4, and none that decodes."
    )

    @model_validator(mode="after")
    def _one_server(self) -> Self:
        if (self.endpoint is None) == (self.launch is None):
            which = "neither is" if self.endpoint is None else "both are"
            raise fault("", f"exactly one of endpoint and launch must be given; {which}")
        _load_points(self.concurrency, self.requests)
        if self.native_fp4 and self.launch is None:
            raise fault("native_fp4", "of an endpoint no log is seen, so this can never hold; use launch")
        for name in ("max_ttft_ms", "max_itl_ms", "min_output_tokens_per_s"):
            bound = cast("Bound", getattr(self, name))
            if isinstance(bound, tuple) and len(bound) != len(self.concurrency):
                raise fault(
                    name, f"{len(bound)} bounds for {len(self.concurrency)} concurrencies; give one, or one for each"
                )
        return self


class Validate(Section):
    """The gates of the sign-off. The contract check and the comparison of numbers run whatever stands here."""

    numerics: NumericsGate | None = Field(default=None, description="Bounds on the converted weights.")
    kernels: KernelsGate | None = Field(default=None, description="FP4 kernels on the converted weights.")
    model: ModelGate | None = Field(default=None, description="Accuracy of the model as a whole.")
    speed: SpeedGate | None = Field(default=None, description="Decode speed of the model.")
    serving: ServingGate | None = Field(default=None, description="A real server that loads the output.")
