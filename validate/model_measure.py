"""What the stage `model` measures: both models on the same tokens, and along the source's greedy answers.

Everything goes to a dictionary as soon as it is known, so that what was measured before something breaks is kept. Where
memory does not suffice for a batch or a stretch, both are made smaller and a finding says so: the figures of shorter
stretches are for either model alike, and comparable with each other, but not with those of longer ones.
"""

from __future__ import annotations

import gc
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, cast

import numpy as np
import torch
from requant.kernels.empty_model import load_tokenizer
from requant.manifests.gates import ModelGate
from requant.validate.divergence import Positions, compare_logits, mean_of, ratio_of
from requant.validate.fp4_modules import kernels_used
from requant.validate.generation import along_answers, batch_of
from requant.validate.model_inputs import Tokens, check_context, pad_of, prompts_of, read_text, tokens_of
from requant.validate.results import JSON, Finding

if TYPE_CHECKING:
    from requant.validate.load_model import LoadedModel

__all__ = ["Measurement", "out_of_memory"]

PATH: Final = "CPU reference: FP4 decoded to FP32, multiplied in FP32"
PATH_GPU: Final = "GPU: FP4 weights by the chip's kernels, BF16 activations, logits in FP32"
_BINS: Final = 16
_AT_A_TIME: Final = {"cpu": 1, "cuda": 4}
"""Stretches in one forward pass: a CPU gains nothing from more."""
_SHORTEST: Final = 64
"""Tokens of a stretch, below which memory is given up: one block of an error."""
Device = Literal["cpu", "cuda"]


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory, of a GPU or of the machine, did not suffice."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


class Measurement:
    """Both models on the same tokens; what is measured goes to `data` as soon as it is known."""

    def __init__(
        self,
        source: Path,
        output: Path,
        gate: ModelGate,
        device: Device,
        progress: Callable[[int, int], None],
        data: dict[str, JSON],
        found: list[Finding],
    ) -> None:
        self._paths = {"source": source, "target": output}
        self._gate = gate
        self._device: Device = device
        self._report = progress
        self._found = found
        self._done = 0
        self._total = 0
        self.data = data
        self.models: Mapping[str, LoadedModel] = {}
        self.tokenizer: Any = None
        self.positions: Positions | None = None
        self.answers: Positions | None = None
        self.first_difference: list[int | None] = []
        self.identical = True

    def run(self) -> None:
        """Measure everything, or raise what stood in the way."""
        gate = self._gate
        text = read_text(gate.text)
        self.tokenizer = load_tokenizer(self._paths["target"], trust_remote_code=gate.trust_remote_code)
        tokens = tokens_of(self.tokenizer, text, gate, self._found)
        prompts, kind = prompts_of(self.tokenizer, gate, tokens.stretches(tokens.length))
        self.models = {name: self._load(path, name, prompts) for name, path in self._paths.items()}
        self._total = len(tokens.stretches(tokens.length)) * tokens.length + len(prompts) * gate.greedy_steps
        self.data["text"] = {"file": Path(gate.text).name, "sha256": hashlib.sha256(text.encode()).hexdigest()}
        self.data["path"] = PATH_GPU if self._device == "cuda" else PATH
        self._score(tokens)
        self._generate(prompts, kind)
        if self._device == "cuda":
            self.data["kernels"] = {name: list(kernels_used(m.model)) for name, m in self.models.items()}

    def _load(self, path: Path, name: str, prompts: Sequence[Sequence[int]]) -> LoadedModel:
        from requant.validate.load_model import load_model

        loaded = load_model(
            path,
            trust_remote_code=self._gate.trust_remote_code,
            w4a4=self._gate.w4a4 and name == "target",
            keep_decoded=True,
            device=self._device,
        )
        check_context(loaded.model.config, self._gate, prompts)
        self.data[name] = {
            "class": type(loaded.model).__name__,
            "packed_weights": loaded.packed,
            "plain_weights": loaded.plain,
            "fp4_layers": loaded.layers,
            "unused_tensors": list(loaded.unused[:20]),
        }
        return loaded

    def _advance(self, tokens: int) -> None:
        self._done += tokens
        self._report(self._done, self._total)

    # --- the text -----------------------------------------------------------------------------------------------------

    def _score(self, tokens: Tokens) -> None:
        """All stretches, fewer at a time and then shorter ones where memory does not suffice."""
        batch, length = _AT_A_TIME[self._device], tokens.length
        done = self._done
        while True:
            try:
                self._stretches(tokens.stretches(length), batch)
                break
            except (MemoryError, RuntimeError) as error:
                if not out_of_memory(error) or (batch == 1 and length < 2 * _SHORTEST):
                    raise
            batch, length = (batch // 2, length) if batch > 1 else (1, length // 2)
            self._start_over(done)
        if length < tokens.length:
            self.smaller(f"a stretch of {tokens.length} tokens: stretches of {length} were scored")
        elif batch < _AT_A_TIME[self._device]:
            self.smaller(f"{_AT_A_TIME[self._device]} stretches of {length} tokens at a time: {batch} were")

    def _stretches(self, windows: Sequence[Sequence[int]], batch: int) -> None:
        parts: list[Positions] = []
        for first in range(0, len(windows), batch):
            rows = windows[first : first + batch]
            ids = torch.tensor([list(row) for row in rows], device=self._device)
            with torch.inference_mode():
                logits: list[torch.Tensor] = [
                    m.model(input_ids=ids, use_cache=False).logits[:, :-1] for m in self.models.values()
                ]
                parts += [compare_logits(s, t, row[1:]) for s, t, row in zip(*logits, ids, strict=True)]
                self.identical = self.identical and torch.equal(logits[0], logits[1])
            self.data["identical_logits"] = self.identical
            self.positions = Positions.joined(parts)
            self.data.update(_summary(self.positions, len(windows[0]) - 1))
            self._advance(sum(len(row) - 1 for row in rows))

    def _start_over(self, done: int) -> None:
        """Forget what was measured of a part that is measured again, and free its memory."""
        self._done, self.identical = done, True
        gc.collect()
        if self._device == "cuda":
            torch.cuda.empty_cache()

    def smaller(self, what: str) -> None:
        """Note that memory did not suffice for what was asked for, and what was done instead."""
        device = "the GPU" if self._device == "cuda" else "this machine"
        message = f"the memory of {device} did not suffice for {what}"
        self._found.append(Finding("out-of-memory", "warning", message, hint="both models were given the same"))
        self.data["reduced"] = [*cast("list[JSON]", self.data.get("reduced") or []), message]

    # --- answers ------------------------------------------------------------------------------------------------------

    def _generate(self, prompts: Sequence[Sequence[int]], kind: str) -> None:
        """The source's greedy answers, and what the target would have said at each of their tokens."""
        at_once, done = len(prompts), self._done
        while True:
            try:
                self._answers(prompts, kind, at_once)
                break
            except (MemoryError, RuntimeError) as error:
                if not out_of_memory(error) or at_once == 1:
                    raise
            at_once //= 2
            identical = self.identical
            self._start_over(done)
            self.identical = identical
        if at_once < len(prompts):
            self.smaller(f"{len(prompts)} prompts at a time: {at_once} were continued")

    def _answers(self, prompts: Sequence[Sequence[int]], kind: str, at_once: int) -> None:
        steps, pad = self._gate.greedy_steps, pad_of(self.tokenizer)
        models = [loaded.model for loaded in self.models.values()]
        parts: list[Positions] = []
        for first in range(0, len(prompts), at_once):
            some = prompts[first : first + at_once]
            rows: list[Positions] = []
            for chosen, logits in along_answers(models, batch_of(some, pad, self._device), steps):
                rows.append(compare_logits(logits[0], logits[1], chosen))
                self.identical = self.identical and torch.equal(logits[0], logits[1])
                self._advance(len(some))
            parts += [Positions.joined([row.at(prompt) for row in rows]) for prompt in range(len(some))]
        self.data["identical_logits"] = self.identical
        self.answers = Positions.joined(parts)
        self.first_difference = [None if part.agree.all() else int(part.agree.argmin()) for part in parts]
        kl, ratio = mean_of(self.answers.kl), ratio_of(self.answers)
        self.data["greedy"] = {
            "prompts": len(prompts),
            "of": kind,
            "steps": steps,
            "identical": sum(at is None for at in self.first_difference),
            "first_difference": cast("list[JSON]", self.first_difference),
            "mean_shared_steps": float(np.mean([steps if at is None else at for at in self.first_difference])),
        }
        self.data["answers"] = {
            "tokens": len(self.answers.kl),
            "kl_mean": _finite(kl.value),
            "kl_stderr": kl.error,
            "top1_agreement": float(self.answers.agree.mean()),
            "perplexity_ratio": _finite(ratio.value),
        }


def _summary(positions: Positions, window: int) -> dict[str, JSON]:
    """The measurements on the text as JSON."""
    kl, agree, ratio = mean_of(positions.kl), mean_of(positions.agree), ratio_of(positions)
    bins = np.array_split(np.arange(window), min(_BINS, window))
    place = np.arange(len(positions.kl)) % window
    perplexity: dict[str, JSON] = {"ratio": _finite(ratio.value), "ratio_low": ratio.low, "ratio_high": ratio.high}
    for name, values in (("source", positions.nll_source), ("target", positions.nll_target)):
        nll = mean_of(values)
        value = math.exp(nll.value) if nll.value < 700 else math.inf
        perplexity[name] = _finite(value)
        perplexity[f"{name}_stderr"] = None if nll.error is None else _finite(value * nll.error)
    return {
        "tokens": len(positions.kl),
        "sequence_length": window,
        "kl": {
            "mean": _finite(kl.value),
            "stderr": kl.error,
            "median": _finite(float(np.median(positions.kl))),
            "p99": _finite(float(np.quantile(positions.kl, 0.99))),
            "max": _finite(float(positions.kl.max())),
            "by_position": [_finite(float(positions.kl[np.isin(place, b)].mean())) for b in bins if b[0] < len(place)],
        },
        "top1_agreement": {"mean": agree.value, "stderr": agree.error},
        "perplexity": perplexity,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
