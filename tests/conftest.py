"""What the whole suite shares: a deterministic hypothesis profile for CI, the budget of skipped tests, and `-m gpu`.

A skipped test passes unseen, so each one must stand in CONTRIBUTING.md, section "Skipped tests", with its number and
its reason. A run that skips more than is listed there fails, whatever else it says.

A machine with a GPU need not have what the other tests import (gguf, jsonschema, ...): `-m gpu` opens only the files in
which that mark stands.
"""

import os
import re
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("dev", deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "dev")

BUDGET_FILE = Path(__file__).resolve().parent.parent / "CONTRIBUTING.md"
BUDGET_ROW = re.compile(r"^\| `(?P<test>[^`]+)` \| (?P<count>\d+) \| (?P<reason>\S.*) \|$", re.MULTILINE)


def read_budget(text):
    """Test (file::function, or a file) -> how many of its cases may be skipped."""
    section = text.partition("\n## Skipped tests\n")[2].partition("\n## ")[0]
    return {row["test"]: int(row["count"]) for row in BUDGET_ROW.finditer(section)}


class SkipBudget:
    """Counts skips as the reports come in; with xdist they all arrive at the controller."""

    def __init__(self):
        self.skipped = defaultdict(set)
        self.overrun = []

    def pytest_runtest_logreport(self, report):
        if report.skipped and not hasattr(report, "wasxfail"):
            self.skipped[report.nodeid.partition("[")[0].partition("@")[0]].add(report.nodeid)

    def pytest_collectreport(self, report):
        if report.skipped:
            self.skipped[report.nodeid].add(report.nodeid)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session):
        allowed = read_budget(BUDGET_FILE.read_text(encoding="utf-8"))
        self.overrun = [
            f"{test}: {len(cases)} skipped, {allowed.get(test, 0)} listed"
            for test, cases in sorted(self.skipped.items())
            if len(cases) > allowed.get(test, 0)
        ]
        if self.overrun:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter):
        if self.overrun:
            terminalreporter.section("skipped beyond CONTRIBUTING.md, section 'Skipped tests'", red=True)
            terminalreporter.write_line("\n".join(self.overrun))


def pytest_ignore_collect(collection_path, config):
    if config.option.markexpr == "gpu" and collection_path.name.startswith("test_") and collection_path.is_file():
        return "mark.gpu" not in collection_path.read_text(encoding="utf-8") or None
    return None


def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(SkipBudget(), "skip-budget")
