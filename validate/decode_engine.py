"""C streams that decode together: a static KV cache, and on a GPU one CUDA graph that holds the whole step.

Batching is static: the streams of a wave start together, each prompt is prefilled into its stream in turn, then all
decode to the same length. That is enough to measure a step and a prefill, and no scheduler hides in the figures.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import torch
from requant.kernels import w4a16
from requant.validate.decode_glue import Glue, PlainGlue
from requant.validate.decode_model import Decoder
from requant.validate.decode_products import Products
from requant.validate.decode_step import Cache, State, prefill, step

__all__ = ["Engine", "Wave", "make_glue"]

_TIMED: Final = 5
"""Steps that are timed for each product that might be chosen."""


@dataclass(frozen=True, slots=True)
class Wave:
    """What one wave took. prefill_ms: each prompt; first_ms: from the wave's start to each stream's first token;
    step_us: each step; seconds: all of it; tokens: new ones, of all streams."""

    prefill_ms: tuple[float, ...]
    first_ms: tuple[float, ...]
    step_us: tuple[float, ...]
    seconds: float
    tokens: int


def make_glue(decoder: Decoder, *, pdl: bool | None = None) -> Glue:
    """Fused Triton kernels on a GPU, plain torch elsewhere. pdl: whether launches may overlap; None: if the GPU can."""
    if not decoder.embedding.is_cuda:
        return PlainGlue()
    from requant.validate.decode_fused import FusedGlue

    return FusedGlue(pdl=_can_overlap() if pdl is None else pdl, routes=not w4a16.uses_triton())


def _can_overlap() -> bool:
    return torch.cuda.get_device_capability() >= (9, 0)


class Engine:
    """`streams` streams of at most `capacity` tokens each. logits [C, V]: of the last step."""

    def __init__(
        self, decoder: Decoder, streams: int, capacity: int, products: Products, glue: Glue | None = None
    ) -> None:
        self.decoder = decoder
        self.streams = streams
        self.capacity = capacity
        self.products = products
        self.glue = make_glue(decoder) if glue is None else glue
        self.cache = Cache.empty(decoder, streams, capacity)
        self.state = State.new(decoder, streams)
        self.logits: torch.Tensor | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._graph_logits: torch.Tensor | None = None
        self._prefill: torch.cuda.CUDAGraph | None = None
        device = decoder.embedding.device
        self._prompt = torch.zeros(0, dtype=torch.int64, device=device)
        self._stream = torch.zeros(1, dtype=torch.int64, device=device)

    @property
    def on_gpu(self) -> bool:
        """Whether steps run on a GPU."""
        return self.decoder.embedding.is_cuda

    def capture(self, prompt_tokens: int = 0) -> None:
        """Record a step as a CUDA graph, and the prefill of a prompt of that many tokens as another (nothing on a CPU).

        Streams start anew afterwards.
        """
        if not self.on_gpu:
            return
        self._graph = _recorded(self._eager)
        self._graph_logits = self.logits
        if prompt_tokens:
            self._prompt = torch.zeros(prompt_tokens, dtype=torch.int64, device=self._stream.device)
            self._prefill = _recorded(self._eager_prefill)
        self.state.positions.zero_()

    def tune(self) -> None:
        """Choose among products by what a whole step takes with each (nothing on a CPU). Streams start anew."""
        if not self.on_gpu:
            return
        made = torch.Generator(self._stream.device).manual_seed(0)
        size = len(self.decoder.embedding)
        tokens = torch.randint(0, size, (self.streams,), generator=made, device=self._stream.device)

        def step_us() -> float:
            self.state.tokens.copy_(tokens)  # distinct ones, which go to different experts
            self.rewind(self.capacity // 2)
            self._graph = _recorded(self._eager)
            return statistics.median(self._timed_steps(_TIMED))

        self.products.refine(step_us)
        self._graph = None
        self.rewind(0)

    def step(self, *, eager: bool = False) -> None:
        """One token more for every stream."""
        if self._graph is None or eager:
            with torch.inference_mode():
                self._eager()
        else:
            self._graph.replay()
            self.logits = self._graph_logits

    def _eager(self) -> None:
        self.logits = step(self.decoder, self.cache, self.state, self.glue, self.products)

    def start(self, stream: int, prompt: torch.Tensor, *, eager: bool = False) -> None:
        """Prefill a prompt; its first token becomes the stream's last."""
        self._stream.fill_(stream)
        if self._prefill is not None and len(prompt) == len(self._prompt) and not eager:
            self._prompt.copy_(prompt)
            self._prefill.replay()
            return
        kept, self._prompt = self._prompt, prompt
        with torch.inference_mode():
            self._eager_prefill()
        self._prompt = kept

    def _eager_prefill(self) -> None:
        logits = prefill(self.decoder, self.cache, self._stream, self._prompt, self.glue, self.products)
        self.state.tokens.index_copy_(0, self._stream, logits.argmax()[None])
        self.state.positions.index_fill_(0, self._stream, len(self._prompt))

    def rewind(self, position: int) -> None:
        """Let every stream stand at this position; what lies behind it in the cache is overwritten."""
        self.state.positions.fill_(position)

    def tokens(self, prompts: Sequence[torch.Tensor], count: int, *, eager: bool) -> list[list[int]]:
        """The `count` greedy tokens of each stream. eager: kernel by kernel, without the graphs."""
        for stream, prompt in enumerate(prompts):
            self.start(stream, prompt, eager=eager)
        return self._decoded(count, eager=eager)

    def tokens_both_ways(self, prompts: Sequence[torch.Tensor], count: int) -> tuple[list[list[int]], list[list[int]]]:
        """The greedy tokens without the graphs, and with them: of the prefills the first stream's is done again."""
        for stream, prompt in enumerate(prompts):
            self.start(stream, prompt, eager=True)
        first, stands = self.state.tokens.clone(), self.state.positions.clone()
        without = self._decoded(count, eager=True)
        self.state.tokens.copy_(first)
        self.state.positions.copy_(stands)  # what the steps wrote behind it is overwritten
        self.start(0, prompts[0])
        return without, self._decoded(count, eager=False)

    def _decoded(self, count: int, *, eager: bool) -> list[list[int]]:
        seen = [self.state.tokens.clone()]
        for _ in range(count - 1):
            self.step(eager=eager)
            seen.append(self.state.tokens.clone())
        return torch.stack(seen, dim=1).tolist()

    def wave(self, prompts: Sequence[torch.Tensor], count: int) -> Wave:
        """Serve one prompt per stream, `count` new tokens each, and time it."""
        prefills: list[float] = []
        firsts: list[float] = []
        self._wait()
        begin = before = time.perf_counter()
        for stream, prompt in enumerate(prompts):
            self.start(stream, prompt)
            self._wait()
            now = time.perf_counter()
            prefills.append((now - before) * 1e3)
            firsts.append((now - begin) * 1e3)
            before = now
        steps = self._timed_steps(count - 1)
        seconds = time.perf_counter() - begin
        return Wave(tuple(prefills), tuple(firsts), tuple(steps), seconds, count * len(prompts))

    def _timed_steps(self, count: int) -> list[float]:
        """Microseconds of each step: between events on a GPU, which then never waits for the host."""
        if not self.on_gpu:
            times: list[float] = []
            for _ in range(count):
                begin = time.perf_counter()
                self.step()
                times.append((time.perf_counter() - begin) * 1e6)
            return times
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        events[0].record()
        for event in events[1:]:
            self.step()
            event.record()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) * 1e3 for a, b in pairwise(events)]

    def _wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()


def _recorded(work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """A CUDA graph of `work`, which has run twice before: kernels compile and products are tuned outside a capture."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.inference_mode():
        work()
        work()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph):
        work()
    return graph
