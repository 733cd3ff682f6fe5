"""The numerics stage where the two checkpoints are never whole on disk: the same comparison, piece by piece.

A streamed conversion has a part of the source and the output made of it for a while, then frees them. Each piece is
judged while it is there; what was found is written down at once, one JSON line per tensor, so that an interrupted run
goes on with it. The headers of both sides are there from the beginning: the census is closed as ever, and a tensor that
no piece held is an error, not an omission.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final, cast

from requant.manifests.schema import NumericsGate
from requant.validate.carried_scales import CarriedScales
from requant.validate.modules import Kind, modules_of
from requant.validate.numerics import Both, conclude, fused_spans, judge_copy, open_both
from requant.validate.numerics_blocks import Tally
from requant.validate.numerics_compare import Result, compare, compare_copy, compare_kept
from requant.validate.numerics_read import MappedReader
from requant.validate.pairing import Copy, Pair
from requant.validate.results import StageResult

__all__ = ["PiecewiseNumerics"]


class PiecewiseNumerics:
    """source, output: folders whose shards have true headers and need hold no more. record: what is judged so far."""

    def __init__(self, source: Path, output: Path, record: Path) -> None:
        self._started = time.perf_counter()
        self._folders = source, output
        self._record = record
        self._restated: set[str] = set()
        self._both: Both = open_both(source, output)
        self._scalars = _copied_scalars(self._both)
        self._results: dict[str, Result] = {}
        self._copies: dict[str, str] = {}
        self._carried = CarriedScales(self._both.theirs, self._both.ours)
        self._read()

    def unjudged(self) -> frozenset[str]:
        """Names of the source tensors that some piece must still hold."""
        names: set[str] = set()
        for copy in self._both.census.copies:
            if copy.output.name not in self._copies:
                names.add(copy.source.name)
        for name, pairs in self._both.groups.items():
            if name not in self._results:
                names |= _sources(pairs)
        return frozenset(names)

    def piece(self, source: Path, output: Path, tensors: Collection[str]) -> None:
        """Judge everything whose source tensors are all among `tensors`, read from the folders given."""
        before = MappedReader(replace(self._both.theirs, path=source))
        after = MappedReader(replace(self._both.ours, path=output))
        there = frozenset(tensors)
        lines: list[dict[str, Any]] = []
        if moved := [
            name
            for name, copy in self._scalars.items()
            if copy.source.name in there and name not in self._restated and compare_copy(copy, before, after)
        ]:
            lines += [{"restated": name} for name in moved]
            self._restate(moved)
        for copy in self._both.census.copies:
            if copy.source.name in there and copy.output.name not in self._copies:
                self._copies[copy.output.name] = (
                    compare_kept(copy, self._both.theirs.tensors, before, after)
                    if after.holds(copy.output)
                    else _ABSENT
                )
                lines.append({"copy": copy.output.name, "wrong": self._copies[copy.output.name]})
        fresh = [
            compare(name, pairs, before, after, lambda _: None)
            for name, pairs in self._both.groups.items()
            if name not in self._results and _sources(pairs) <= there
        ]
        fused_spans(fresh, before, after)  # narrows the exponents to live blocks where that matters
        for result in fresh:
            result.activation = self._carried.wrong(result.pairs, before, after, there)
            self._results[result.name] = result
            lines.append({"weight": result.name, **_facts(result)})
        with self._record.open("a", encoding="utf-8") as stream:
            stream.writelines(json.dumps(line, default=_plain) + "\n" for line in lines)
            stream.flush()
            os.fsync(stream.fileno())  # what is judged may be freed now, and cannot be judged again

    def result(self, gate: NumericsGate | None) -> StageResult:
        """The stage's result over all pieces."""
        both, after = self._both, MappedReader(self._both.ours)
        for copy in both.census.copies:
            self._judge_copy(copy, after)
        results = [self._results[name] for name in both.groups if name in self._results]
        for result in results:
            if result.activation and self._carried.given(result.pairs, after):
                result.activation = ""
        for name in both.groups.keys() - self._results.keys():
            both.found.error("not-compared", "no piece of the run held it", where=name, hint="convert again")
        return conclude(both, results, fused_spans(results), gate, time.perf_counter() - self._started)

    def _restate(self, modules: Collection[str]) -> None:
        """These stand under the same names with another global scale: their numbers are compared, not their bytes."""
        self._restated.update(modules)
        self._both = open_both(*self._folders, restated=self._restated)

    def _judge_copy(self, copy: Copy, after: MappedReader) -> None:
        name = copy.output.name
        if self._copies.get(name) and self._carried.gives(name, after):
            return
        if name not in self._copies:
            self._both.found.error("not-compared", "no piece of the run held it", where=name, hint="convert again")
        else:
            judge_copy(self._copies[name], name, self._both.found)

    def _read(self) -> None:
        """What an interrupted run has judged already; a line that the interruption cut off ends it."""
        if not self._record.exists():
            return
        known: list[dict[str, Any]] = []
        for line in self._record.read_text(encoding="utf-8").splitlines():
            try:
                known.append(cast("dict[str, Any]", json.loads(line)))
            except ValueError:
                break
        if moved := {str(facts["restated"]) for facts in known if "restated" in facts}:
            self._restate(moved)
        for facts in known:
            if "copy" in facts:
                self._copies[facts["copy"]] = facts["wrong"]
            elif facts.get("weight") in self._both.groups:
                self._results[facts["weight"]] = _result(facts, self._both.groups[facts["weight"]])


def _copied_scalars(both: Both) -> dict[str, Copy]:
    """Global scales that stand under the same names on both sides, by module."""
    copies = {copy.output.name: copy for copy in both.census.copies}
    modules = [module for module in modules_of(both.ours.tensors).values() if module.kind is Kind.NVFP4]
    found = {module.name: copies.get(module.global_scale.name) for module in modules if module.global_scale is not None}
    return {name: copy for name, copy in found.items() if copy is not None and copy.output.dtype == "F32"}


_ABSENT: Final = "its shard was not there to be compared"


def _sources(pairs: list[Pair]) -> set[str]:
    """The source tensors that a weight is compared with."""
    views = [view for pair in pairs for view in (pair.source.codes, pair.source.scales) if view is not None]
    return {view.tensor.name for view in views}


def _facts(result: Result) -> dict[str, Any]:
    return {
        "tally": asdict(result.tally),
        "k": result.k,
        "looked": result.looked,
        "live": [result.source_live, result.output_live],
        "activation": result.activation,
    }


def _result(facts: Mapping[str, Any], pairs: list[Pair]) -> Result:
    k = cast("list[int] | None", facts["k"])
    source_live, output_live = facts["live"]
    return Result(
        name=str(facts["weight"]),
        pairs=pairs,
        tally=Tally(**facts["tally"]),
        k=(k[0], k[1]) if k else None,
        looked=bool(facts["looked"]),
        source_live=bool(source_live),
        output_live=bool(output_live),
        activation=str(facts.get("activation", "")),
    )


def _plain(value: Any) -> object:
    """A numpy scalar as Python's own."""
    return value.item()
