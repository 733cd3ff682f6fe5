"""The kinds of value that a manifest's fields hold, and the base of its models.

Python holds that `True == 1`, and pydantic would turn `yes` into 1 and `"3"` into 3: numbers, booleans and text are
therefore strict, and the loader is the only place that reads text as anything else.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Annotated, ClassVar, Final

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, Strict, WithJsonSchema
from pydantic_core import PydanticCustomError
from requant.manifests.sizes import SIZE_PATTERN, parse_size
from requant.manifests.urls import is_url, url_fault

__all__ = [
    "FLOAT32_MAX",
    "FLOAT32_MIN",
    "Count",
    "Flag",
    "Location",
    "Place",
    "Positive",
    "RepoId",
    "Scale",
    "Section",
    "Size",
    "Text",
    "fault",
    "no_repeats",
]

FLOAT32_MIN: Final = 2.0**-126
"""Smallest normal FP32: the scales are stored as FP32, and a smaller one may read as zero."""
FLOAT32_MAX: Final = (2.0 - 2.0**-23) * 2.0**127


def fault(at: str, what: str) -> PydanticCustomError:
    """What a model finds wrong with itself, to be raised: at which field (dotted; empty: the whole), and a sentence."""
    return PydanticCustomError("requant", "{what}", {"at": at, "what": what})


def _size(value: object) -> object:
    """Bytes of a size; anything but a string is left to the field's own type."""
    return parse_size(value) if isinstance(value, str) else value


def _expanduser_or_url(value: str) -> str:
    """A folder, or an address in an object store without a slash at its end; `file://` is a folder."""
    if value.startswith("file://"):
        return value.removeprefix("file://")
    if not is_url(value):
        return os.path.expanduser(value)  # noqa: PTH111 - a text stays the text that it is, "./x" too
    if wrong := url_fault(value):
        raise fault("", wrong)
    return value.rstrip("/")


def no_repeats(field: str, values: Iterable[object]) -> None:
    """Fault if a list names something twice."""
    seen: set[object] = set()
    for index, value in enumerate(values):
        if value in seen:
            raise fault(f"{field}.{index}", f"'{value}' stands here twice")
        seen.add(value)


Flag = Annotated[bool, Strict()]
Count = Annotated[int, Strict(), Field(ge=1)]
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
Location = Annotated[str, Strict(), Field(min_length=1), AfterValidator(os.path.expanduser)]
Place = Annotated[str, Strict(), Field(min_length=1), AfterValidator(_expanduser_or_url)]
RepoId = Annotated[str, Strict(), Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*$")]


class Section(BaseModel):
    """A part of the manifest: frozen, and no key is ignored."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())
