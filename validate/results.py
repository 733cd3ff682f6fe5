"""What a validation stage hands back: findings, a status, measurements. Every stage and the sign-off share these types.

A stage has one of three outcomes. `passed` and `failed` are measurements; `not run` is the honest third one, with its
reason (no GPU, not declared, an earlier stage failed), and never counts as passed. A finding names its rule by a stable
kebab-case id, so that reports of two runs can be compared and a test can say which rule it protects.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, TypeAlias

__all__ = ["JSON", "Finding", "Severity", "StageResult", "Status", "status_of", "weights_equal"]

JSON: TypeAlias = "str | int | float | bool | Sequence[JSON] | Mapping[str, JSON] | None"
"""Any value json.dumps writes; callers keep NaN and infinity out."""

Severity: TypeAlias = Literal["error", "warning", "info"]
"""error: the stage fails. warning: loads, but a user should know. info: said so that nothing is silent."""


class Status(StrEnum):
    """Outcome of one stage."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_RUN = "not run"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing a rule saw: which rule, what, where, and what to do about it.

    where: file, tensor or config key. runtime: the one runtime it concerns, "" for all of them.
    """

    rule: str
    severity: Severity
    message: str
    where: str = ""
    runtime: str = ""
    hint: str = ""

    def to_json(self) -> dict[str, JSON]:
        """As a flat object, empty fields left out."""
        fields: dict[str, JSON] = {
            "rule": self.rule,
            "severity": self.severity,
            "message": self.message,
            "where": self.where,
            "runtime": self.runtime,
            "hint": self.hint,
        }
        return {key: value for key, value in fields.items() if value != ""}


@dataclass(frozen=True, slots=True)
class StageResult:
    """One stage's outcome. device: where it was measured ("cpu", "cuda:0 NVIDIA ..."); seconds: wall time.

    reason: one line that says why the status is what it is; never empty for `failed` and `not run`.
    data: the measurements, JSON values only; its keys are the stage's own.
    """

    stage: str
    status: Status
    reason: str
    findings: tuple[Finding, ...] = ()
    data: Mapping[str, JSON] = field(default_factory=dict[str, JSON])
    device: str = "cpu"
    seconds: float = 0.0

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings that fail the stage."""
        return tuple(finding for finding in self.findings if finding.severity == "error")

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """The findings a user should read although the stage did not fail for them."""
        return tuple(finding for finding in self.findings if finding.severity == "warning")

    def to_json(self) -> dict[str, JSON]:
        """As json.dumps takes it."""
        return {
            "stage": self.stage,
            "status": self.status.value,
            "reason": self.reason,
            "device": self.device,
            "seconds": round(self.seconds, 3),
            "findings": [finding.to_json() for finding in self.findings],
            "data": dict(self.data),
        }


def status_of(findings: Sequence[Finding]) -> Status:
    """`failed` if any finding is an error, `passed` otherwise."""
    return Status.FAILED if any(finding.severity == "error" for finding in findings) else Status.PASSED


def weights_equal(numerics: StageResult) -> bool:
    """Whether the stage `numerics` passed and found every converted weight equal to its source."""
    totals = numerics.data.get("totals")
    return numerics.status is Status.PASSED and isinstance(totals, Mapping) and totals.get("changed") == 0
