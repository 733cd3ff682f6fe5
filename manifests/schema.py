"""The manifest, version 1: what a user declares, as frozen models that refuse every key they do not know.

```
Manifest
|- source       which checkpoint, and how its producer stored it
|- target       which numbers, in which layout, where, for which runtimes
|- layers       first rule whose `match` fits the module decides what becomes of it
|- activations  where the static activation scales come from
|- kv_cache     the KV cache's format
|- execute      how to run; decides nothing about the bytes
|- validate     the gates of the sign-off (attribute `validation`: pydantic keeps the name `validate` for itself)
`- publish      where the result goes
```

The sections are in `sections.py` and `gates.py` (all can be imported from here), what takes several of them to judge in
`checks.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, Self, cast

from pydantic import BeforeValidator, Field, Strict, model_validator
from requant.manifests.checks import UNSCALED_FORMATS, disagreements
from requant.manifests.fields import Section, Text, fault
from requant.manifests.gates import Device, KernelsGate, ModelGate, NumericsGate, ServingGate, SpeedGate, Validate
from requant.manifests.sections import (
    Activations,
    Calibrate,
    Execute,
    FromCheckpoint,
    Granularity,
    LayerRule,
    Publish,
    Runtime,
    ScaleChoice,
    Source,
    SourceLayout,
    Target,
    TargetFormat,
    TargetLayout,
    TensorFormat,
)

__all__ = [
    "Activations",
    "Calibrate",
    "Device",
    "Execute",
    "FromCheckpoint",
    "Granularity",
    "KernelsGate",
    "LayerRule",
    "Manifest",
    "ModelGate",
    "NumericsGate",
    "Publish",
    "Runtime",
    "ScaleChoice",
    "ServingGate",
    "Source",
    "SourceLayout",
    "SpeedGate",
    "Target",
    "TargetFormat",
    "TargetLayout",
    "TensorFormat",
    "Validate",
    "json_schema",
    "with_default_input_scale",
]


def with_default_input_scale(data: Mapping[str, object]) -> Mapping[str, object]:
    """The raw manifest with `input_scale: null` where its format has no activation scales and none is written.

    The default of 1.0 is one for NVFP4; a format without such scales must not get it.
    """
    target, activations = data.get("target"), data.get("activations", {})
    kind = cast("Mapping[str, object]", target).get("format") if isinstance(target, Mapping) else None
    kind = target.format if isinstance(target, Target) else kind
    if kind not in UNSCALED_FORMATS or not isinstance(activations, Mapping) or "input_scale" in activations:
        return data
    return {**data, "activations": {**cast("Mapping[str, object]", activations), "input_scale": None}}


def _not_a_flag(value: object) -> object:
    """`version: true` is no version, though True == 1."""
    if isinstance(value, bool):
        raise fault("", f"this program reads version 1, not '{str(value).lower()}'")
    return value


class Manifest(Section):
    """A conversion: source, target, rules, gates."""

    version: Annotated[Literal[1], BeforeValidator(_not_a_flag)] = Field(
        description="Version of the manifest format: 1."
    )
    name: Annotated[str, Strict(), Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,95}$")] = Field(
        description="Name of the conversion in reports: letters, digits, '.', '_' and '-'."
    )
    include: tuple[Text, ...] = Field(
        default=(),
        description="Manifests merged first, in order, relative to this file, or names of built-in ones. "
        "This file wins key by key; a list is replaced as a whole.",
    )
    source: Source = Field(description="Which checkpoint to read.")
    target: Target = Field(description="What to make of it.")
    layers: tuple[LayerRule, ...] = Field(
        min_length=1, description="Rules in order; the first that matches a module decides. None may match nothing."
    )
    activations: Activations = Field(default=Activations(), description="Where static activation scales come from.")
    kv_cache: Literal["fp8"] | None = Field(default=None, description="Format of the KV cache; null leaves it alone.")
    execute: Execute = Field(default=Execute(), description="How to run; changes no byte of the output.")
    validation: Validate = Field(default=Validate(), alias="validate", description="The gates of the sign-off.")
    publish: Publish | None = Field(default=None, description="Where the result goes; null publishes nothing.")

    @model_validator(mode="before")
    @classmethod
    def _default_input_scale(cls, data: object) -> object:
        return with_default_input_scale(cast("Mapping[str, object]", data)) if isinstance(data, Mapping) else data

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        for path, what in disagreements(
            source=self.source,
            target=self.target,
            layers=self.layers,
            activations=self.activations,
            execute=self.execute,
            validation=self.validation,
            publish=self.publish,
        ):
            raise fault(path, what)
        return self


def json_schema() -> dict[str, object]:
    """The manifest as JSON Schema (draft 2020-12); `schema.json` beside this file holds it for editors."""
    schema = Manifest.model_json_schema(by_alias=True, mode="validation")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "requant manifest, version 1",
    }
