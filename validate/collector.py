"""Findings as they come in, bounded: a broken rule on 70,000 tensors is one finding with ten examples, not 70,000.

The first `EXAMPLES` hits of a rule (per severity and runtime) are kept whole; the rest are counted, and one closing
finding says how many there were. Nothing is silent: `counts` holds the true number of every rule.
"""

from __future__ import annotations

from requant.validate.results import Finding, Severity

__all__ = ["EXAMPLES", "Collector"]

EXAMPLES = 10
"""Findings kept whole per rule, severity and runtime."""


class Collector:
    """Gathers findings in the order in which they are met."""

    def __init__(self) -> None:
        self._kept: list[Finding] = []
        self._seen: dict[tuple[str, Severity, str], int] = {}

    def add(
        self, rule: str, severity: Severity, message: str, *, where: str = "", runtime: str = "", hint: str = ""
    ) -> None:
        """Keep one finding, or count it when its rule already has its examples."""
        key = (rule, severity, runtime)
        self._seen[key] = self._seen.get(key, 0) + 1
        if self._seen[key] <= EXAMPLES:
            self._kept.append(Finding(rule, severity, message, where=where, runtime=runtime, hint=hint))

    def error(self, rule: str, message: str, *, where: str = "", runtime: str = "", hint: str = "") -> None:
        """A finding that fails the stage."""
        self.add(rule, "error", message, where=where, runtime=runtime, hint=hint)

    def warning(self, rule: str, message: str, *, where: str = "", runtime: str = "", hint: str = "") -> None:
        """A finding that a user should read before serving."""
        self.add(rule, "warning", message, where=where, runtime=runtime, hint=hint)

    def info(self, rule: str, message: str, *, where: str = "", runtime: str = "", hint: str = "") -> None:
        """A finding said so that nothing is silent."""
        self.add(rule, "info", message, where=where, runtime=runtime, hint=hint)

    def has(self, rule: str) -> bool:
        """Whether the rule has hit at all."""
        return any(seen == rule for seen, _, _ in self._seen)

    @property
    def counts(self) -> dict[str, int]:
        """Hits per rule, whatever the severity and runtime."""
        totals: dict[str, int] = {}
        for (rule, _, _), number in self._seen.items():
            totals[rule] = totals.get(rule, 0) + number
        return totals

    def errors_for(self, runtime: str) -> int:
        """Errors that concern `runtime`: its own and those of every runtime."""
        return sum(n for (_, severity, of), n in self._seen.items() if severity == "error" and of in ("", runtime))

    def findings(self) -> tuple[Finding, ...]:
        """What was kept, errors first, and for every rule with more hits one finding that says how many."""
        kept = list(self._kept)
        for (rule, severity, runtime), number in self._seen.items():
            if number > EXAMPLES:
                message = f"{number - EXAMPLES} more of the same ({number} in all)"
                kept.append(Finding(rule, severity, message, runtime=runtime))
        order = {"error": 0, "warning": 1, "info": 2}
        return tuple(sorted(kept, key=lambda finding: order[finding.severity]))
