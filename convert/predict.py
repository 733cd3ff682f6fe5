"""How long a plan takes on a cluster, from the rate of one worker that was measured and the limits that are known.

Four things run side by side, and the slowest decides: the workers' computing, each node's network, the shared file
system, and the largest unit, which is never cut. To it come the start and the last batch, during which the others idle.
What the model leaves out stands in ASSUMPTIONS; `tests/bench/bench_scaling.py` compares it with runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from requant.convert.engine import batch_limit

__all__ = ["ASSUMED_WORKER_GBPS", "ASSUMPTIONS", "Fleet", "Load", "Prediction", "predict", "prediction_text"]

ASSUMED_WORKER_GBPS: Final = 0.5
"""GB of source per second of one worker where none was measured; the text says so."""
START_S: Final = 15.0
"""From the command to the first task: planning (10 s for half a million tensors), connecting, starting workers."""
ASSUMPTIONS: Final = (
    "nodes and workers are equal, and none is lost",
    "every byte of source is read once, every byte of output written once, over the network of the node that does it",
    "a worker's rate does not depend on how many there are, until the network or the file system is full",
    "reads and writes overlap, and the network carries both at full rate",
)


@dataclass(frozen=True, slots=True)
class Load:
    """What a plan moves, in bytes. unit: of the largest unit."""

    bytes_in: int
    bytes_out: int
    unit: int


@dataclass(frozen=True, slots=True)
class Fleet:
    """A cluster. worker_gb_per_s: GB of source per second of one worker. network_gbit_per_s: of each node, each way.
    storage_gb_per_s: of the shared file system, reads and writes together. None: taken for unlimited."""

    nodes: int
    workers_per_node: int
    worker_gb_per_s: float
    network_gbit_per_s: float | None = None
    storage_gb_per_s: float | None = None

    @property
    def workers(self) -> int:
        """All of them."""
        return self.nodes * self.workers_per_node


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds of the whole run; of each thing that runs side by side, alone; and of start and tail."""

    seconds: float
    parts: dict[str, float]
    start: float
    tail: float

    @property
    def bound(self) -> str:
        """What the run waits for."""
        return max(self.parts, key=lambda name: self.parts[name])


def predict(load: Load, fleet: Fleet) -> Prediction:
    """The time of `load` on `fleet`."""
    rate = fleet.worker_gb_per_s * 1e9
    batch = min(batch_limit(load.bytes_in, fleet.workers), max(load.bytes_in, 1))
    parts = {
        "workers": load.bytes_in / rate / fleet.workers,
        "largest unit": load.unit / rate,
    }
    if fleet.network_gbit_per_s is not None:
        parts["network"] = max(load.bytes_in, load.bytes_out) / fleet.nodes / (fleet.network_gbit_per_s / 8 * 1e9)
    if fleet.storage_gb_per_s is not None:
        parts["storage"] = (load.bytes_in + load.bytes_out) / (fleet.storage_gb_per_s * 1e9)
    longest = max(parts.values())
    tail = batch / rate if fleet.workers > 1 and longest > parts["largest unit"] else 0.0
    return Prediction(START_S + longest + tail, parts, START_S, tail)


def prediction_text(prediction: Prediction, fleet: Fleet, origin: str) -> str:
    """The prediction with its parts and what it assumes. origin: of the worker's rate."""
    parts = ", ".join(f"{name} {seconds:,.0f} s" for name, seconds in prediction.parts.items())
    lines = [
        f"  {fleet.nodes} nodes of {fleet.workers_per_node} workers: about {prediction.seconds:,.0f} s, "
        f"bound by {prediction.bound}",
        f"    alone: {parts}; start {prediction.start:.0f} s, last batch {prediction.tail:.0f} s",
        f"    {fleet.worker_gb_per_s:.2f} GB/s of source a worker ({origin})",
    ]
    if fleet.network_gbit_per_s is None:
        lines.append("    network: not considered (--gbps)")
    if fleet.storage_gb_per_s is None:
        lines.append("    shared file system: not considered (--storage)")
    return "\n".join(lines + [f"    assumes: {assumption}" for assumption in ASSUMPTIONS])
