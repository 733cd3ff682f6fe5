"""The verdict on an output: gates, stages, hashes, and how they are written down and read back.

`to_json` is what gets published, so it drops what names a machine or a person: the folders of absolute paths, tokens.
`from_json` reads it back, so that a report can be rendered, and a folder checked, anywhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, cast

from requant.validate.hashing import FileHash
from requant.validate.results import JSON, Finding, Severity, StageResult, Status

__all__ = ["ALWAYS_REQUIRED", "VERSION", "Gate", "SignOff"]

VERSION: Final = 1
"""Of the JSON file's format."""
ALWAYS_REQUIRED: Final = ("contract", "numerics")
_PATH: Final = re.compile(r"(?<![\w.:/\\])(?:[A-Za-z]:)?[/\\](?:[^\s/\\'\",:;()\[\]]+[/\\])+(?=[^\s/\\])")
"""The folders of an absolute path, up to its last part."""
_TOKEN: Final = re.compile(r"\b(?:hf|ghp|github_pat)_[A-Za-z0-9_]{16,}")


@dataclass(frozen=True, slots=True)
class Gate:
    """One condition of the sign-off. device: where it must be measured; measured_on: where it was, or ""."""

    name: str
    required: bool
    device: str
    status: Status
    reason: str
    measured_on: str = ""

    def to_json(self) -> dict[str, JSON]:
        """As json.dumps takes it."""
        return {
            "gate": self.name,
            "required": self.required,
            "device": self.device,
            "status": self.status.value,
            "reason": self.reason,
            "measured_on": self.measured_on,
        }


@dataclass(frozen=True, slots=True)
class SignOff:
    """The verdict on one output folder and everything it rests on."""

    name: str
    created: str
    gates: tuple[Gate, ...]
    stages: tuple[StageResult, ...]
    files: tuple[FileHash, ...]
    environment: Mapping[str, str]
    source: Mapping[str, str]

    @property
    def signed_off(self) -> bool:
        """Every required gate passed, and at least contract and numerics are among them."""
        passed = {gate.name for gate in self.gates if gate.status is Status.PASSED}
        return all(gate.name in passed for gate in self.gates if gate.required) and passed.issuperset(ALWAYS_REQUIRED)

    @property
    def unmet(self) -> tuple[Gate, ...]:
        """The required gates that stand in the way."""
        return tuple(gate for gate in self.gates if gate.required and gate.status is not Status.PASSED)

    def stage(self, name: str) -> StageResult | None:
        """The result of one stage, None if it was not run at all."""
        return next((stage for stage in self.stages if stage.stage == name), None)

    def to_json(self) -> dict[str, JSON]:
        """As json.dumps takes it, without absolute paths and tokens."""
        return {
            "version": VERSION,
            "name": self.name,
            "signed_off": self.signed_off,
            "created": self.created,
            "source": dict(self.source),
            "environment": dict(self.environment),
            "gates": [cast("JSON", _publishable(gate.to_json())) for gate in self.gates],
            "stages": [cast("JSON", _publishable(stage.to_json())) for stage in self.stages],
            "files": {file.name: {"size": file.size, "sha256": file.sha256} for file in self.files},
        }

    @classmethod
    def from_json(cls, raw: Mapping[str, object]) -> SignOff:
        """The inverse of `to_json`. KeyError, TypeError, ValueError or AttributeError if raw is not such an object."""
        gates = cast("list[dict[str, str]]", raw["gates"])
        stages = cast("list[dict[str, str]]", raw["stages"])
        files = cast("dict[str, dict[str, str]]", raw["files"])
        return cls(
            name=str(raw["name"]),
            created=str(raw["created"]),
            gates=tuple(
                Gate(g["gate"], bool(g["required"]), g["device"], Status(g["status"]), g["reason"], g["measured_on"])
                for g in gates
            ),
            stages=tuple(_stage(stage) for stage in stages),
            files=tuple(FileHash(name, int(entry["size"]), entry["sha256"]) for name, entry in files.items()),
            environment=dict(cast("dict[str, str]", raw["environment"])),
            source=dict(cast("dict[str, str]", raw["source"])),
        )


def _stage(raw: Mapping[str, object]) -> StageResult:
    findings = cast("list[dict[str, str]]", raw["findings"])
    return StageResult(
        stage=str(raw["stage"]),
        status=Status(str(raw["status"])),
        reason=str(raw["reason"]),
        findings=tuple(
            Finding(
                f["rule"],
                cast("Severity", f["severity"]),
                f["message"],
                where=f.get("where", ""),
                runtime=f.get("runtime", ""),
                hint=f.get("hint", ""),
            )
            for f in findings
        ),
        data=cast("Mapping[str, JSON]", raw["data"]),
        device=str(raw["device"]),
        seconds=float(cast("float", raw["seconds"])),
    )


def _publishable(value: object) -> object:
    """The same value, its strings without the folders of absolute paths and without tokens."""
    if isinstance(value, str):
        return _TOKEN.sub("***", _PATH.sub(".../", value))
    if isinstance(value, Mapping):
        return {key: _publishable(item) for key, item in cast("Mapping[str, object]", value).items()}
    if isinstance(value, Sequence):
        return [_publishable(item) for item in cast("Sequence[object]", value)]
    return value
