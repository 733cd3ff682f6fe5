"""What a serving run is: the server to measure, everything that two runs must share to be compared, and what ends one.

A run is a JSON object with a label (compare.py reads it): server and version, flags, prompts and their lengths, card.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from requant.manifests.errors import EnvironmentFault, NotSignedOffError, RequantError
from requant.validate.results import JSON
from requant.validate.serving_load import Point

__all__ = ["ANSWER", "QUESTION", "RUN_KIND", "Broken", "Run", "Server"]

RUN_KIND: Final = "requant serving run"
QUESTION: Final = "What is the capital of France? Answer with one word."
ANSWER: Final = "Paris"


@dataclass(frozen=True, slots=True)
class Server:
    """What to measure. endpoint or launch; the others describe a server that cannot be asked, or override its answer.

    launch: a command; `{model}` and `{port}` are filled in. answer "": the question is not asked.
    """

    folder: Path
    endpoint: str | None = None
    launch: str | None = None
    label: str = ""
    model: str = ""
    timeout_s: float = 900.0
    question: str = QUESTION
    answer: str = ANSWER
    version: str = ""
    flags: str = ""
    card: str = ""


@dataclass(slots=True)
class Run:
    """One labelled run. error: why it is not complete. wrong: the server's answers are at fault, not this machine."""

    label: str
    model: str
    created: str
    server: str = ""
    flags: str = ""
    card: str = ""
    kernels: tuple[str, ...] = ()
    fp4_native: bool | None = None
    prompts: dict[str, JSON] = field(default_factory=dict[str, JSON])
    answer: str = "not asked"
    points: list[Point] = field(default_factory=list[Point])
    complete: bool = False
    error: str = ""
    wrong: bool = False

    def to_json(self) -> dict[str, JSON]:
        """As json.dumps takes it."""
        return {
            "kind": RUN_KIND,
            "version": 1,
            "label": self.label,
            "complete": self.complete,
            "error": self.error,
            "created": self.created,
            "model": self.model,
            "server": self.server,
            "flags": self.flags,
            "card": self.card,
            "kernels": list(self.kernels),
            "fp4_native": self.fp4_native,
            "prompts": self.prompts,
            "answer": self.answer,
            "points": [point.to_json() for point in self.points],
        }

    def fault(self) -> RequantError | None:
        """The error to end with, or None after a complete run: exit 5 for wrong answers, 6 for what did not work."""
        if self.complete:
            return None
        kept = f"{len(self.points)} concurrencies were measured and are kept, marked incomplete" if self.points else ""
        kind = NotSignedOffError if self.wrong else EnvironmentFault
        return kind(self.error, where=f"run {self.label!r}", hint=kept or "nothing was measured")


class Broken(Exception):  # noqa: N818 - ends a run; becomes Run.error
    """wrong: the server answers, but not as it must."""

    def __init__(self, message: str, *, wrong: bool = False) -> None:
        super().__init__(message)
        self.wrong = wrong
