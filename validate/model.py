"""Stage `model`: the converted model against its source on the same tokens, both computing with the weights as stored.

Measured: KL divergence of the next-token distributions, agreement on the first token and perplexity, each with its
error, on a text; at least 64 greedy steps from several prompts; for chat models those prompts are questions through the
chat template, and the divergence is measured along the source's answers as well, because the perplexity of a chat model
on a plain text says little.

Judged: `max_kl` and `max_ppl_ratio`. `auto` stands for what the pair of formats makes one expect. Where the stage
`numerics` found every weight equal to its source, that is a KL of exactly 0, equal logits and identical greedy tokens:
the reference path (fp4_modules.py) computes the same bits from the same values. A ratio of perplexities passes only if
its whole one-sided 95% interval lies under the bound; a text too short to tell is no pass.

What cannot be measured here (no transformers, no such class, no tokenizer, too little memory or text) is `not run` with
that reason; what was measured before something broke is kept and marked incomplete.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

import numpy as np
from requant.kernels.empty_model import ModelUnavailableError, load_tokenizer
from requant.manifests.gates import ModelGate
from requant.validate.results import JSON, Finding, StageResult, Status, status_of

if TYPE_CHECKING:
    import torch
    from requant.validate.divergence import Positions
    from requant.validate.load_model import LoadedModel

__all__ = ["Limits", "check_model", "default_limits"]

STAGE: Final = "model"
PATH: Final = "CPU reference: FP4 decoded to FP32, multiplied in FP32"
PATH_GPU: Final = "GPU: the FP4 kernel of the chip, BF16 activations"
_GPU_KL: Final = 1e-3
"""Instead of exactly 0 on a GPU: kernels for two formats may sum in another order, in BF16."""
_BINS: Final = 16


@dataclass(frozen=True, slots=True)
class Limits:
    """The bounds that are judged; None: measured only. identical: logits and greedy tokens must be the source's, bit by
    bit. origin: whose bounds."""

    max_kl: float | None
    max_ppl_ratio: float | None
    identical: bool
    origin: str


_DEFAULTS: Final[Mapping[str, tuple[float, float]]] = {
    "fp8": (0.02, 1.03),
    "nvfp4": (0.35, 1.50),
    "mxfp4": (0.80, 2.00),
}
"""(max_kl, max_ppl_ratio) of a conversion that rounds, by the target's numbers. They hold for a model of 135 M weights,
about the worst case (docs/accuracy.md: by the nearest codes NVFP4 has KL 0.23 and x1.33, MXFP4 0.47 and x1.49); larger
models lose far less, and their manifests should say so."""


def default_limits(target: str, *, lossless: bool) -> tuple[float | None, float | None]:
    """(max_kl, max_ppl_ratio) for `auto`. target: the manifest's target.format."""
    if lossless:
        return 0.0, 1.0
    return _DEFAULTS.get(target.partition("-")[0], (None, None))


def check_model(
    source: Path,
    output: Path,
    gate: ModelGate,
    *,
    target: str,
    lossless: bool,
    progress: Callable[[int, int], None] = lambda _done, _all: None,
) -> StageResult:
    """Judge `output` against `source`. lossless: every weight is known to equal its source (stage numerics).

    progress: called with (tokens done, tokens in all). Never raises for what a checkpoint or text holds.
    """
    begin = time.perf_counter()
    found: list[Finding] = []
    data: dict[str, JSON] = {"complete": False}
    device = ""
    try:
        device = _device(gate)
        measured = _Measurement(source, output, gate, progress, data)
        measured.run(found)
        limits = _limits(gate, target, lossless)
        _judge(measured, limits, found)
        data["complete"] = True
        status, reason = status_of(found), _reason(measured, limits, found)
    except ModelUnavailableError as error:
        status, reason = Status.NOT_RUN, _so_far(str(error), data)
    except (MemoryError, RuntimeError, IndexError, ValueError) as error:  # out of memory; a forward pass that breaks
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        status, reason = Status.NOT_RUN, _so_far(f"the model broke off with {type(error).__name__}: {first}", data)
    return StageResult(STAGE, status, reason, tuple(found), data, device, time.perf_counter() - begin)


def _device(gate: ModelGate) -> str:
    """Where the stage runs: on the CPU, unless the gate asks for a GPU."""
    if gate.device != "cuda":
        return "cpu"
    import torch

    if not torch.cuda.is_available():
        raise ModelUnavailableError("the gate asks for a GPU, and there is none")
    return f"cuda:0 {torch.cuda.get_device_name()}"


def _so_far(reason: str, data: Mapping[str, JSON]) -> str:
    done = data.get("tokens")
    return f"{reason} (what was measured on {done:,} tokens is kept)" if isinstance(done, int) else reason


# --- measuring --------------------------------------------------------------------------------------------------------


class _Measurement:
    """Both models on the same tokens; what is measured goes to `data` as soon as it is known."""

    def __init__(
        self,
        source: Path,
        output: Path,
        gate: ModelGate,
        progress: Callable[[int, int], None],
        data: dict[str, JSON],
    ) -> None:
        self._paths = {"source": source, "target": output}
        self._gate = gate
        self._report = progress
        self._done = 0
        self._total = 0
        self._cuda = gate.device == "cuda"
        self.data = data
        self.positions: Positions | None = None
        self.answers: Positions | None = None
        self.first_difference: list[int | None] = []
        self.identical = True

    def run(self, found: list[Finding]) -> None:
        from requant.validate.model_inputs import (
            check_context,
            pad_of,
            prompts_of,
            read_text,
            windows_of,
        )

        gate = self._gate
        text = read_text(gate.text)
        tokenizer = load_tokenizer(self._paths["target"], trust_remote_code=gate.trust_remote_code)
        windows = windows_of(tokenizer, text, gate, found)
        models = {name: self._load(path, name) for name, path in self._paths.items()}
        check_context(models["target"].model.config, gate)
        prompts, kind = prompts_of(tokenizer, gate, windows)
        scored = sum(len(window) - 1 for window in windows)
        self._total = scored + 2 * len(prompts) * gate.greedy_steps
        self.data["text"] = {"file": Path(gate.text).name, "sha256": hashlib.sha256(text.encode()).hexdigest()}
        self.data["path"] = PATH_GPU if self._cuda else PATH
        self._score(models, windows)
        self._generate(models, prompts, kind, pad_of(tokenizer))

    def _load(self, path: Path, name: str) -> LoadedModel:
        from requant.validate.load_model import load_model

        loaded = load_model(
            path,
            trust_remote_code=self._gate.trust_remote_code,
            w4a4=self._gate.w4a4 and name == "target",
            keep_decoded=True,
            device="cuda" if self._cuda else "cpu",
        )
        facts: dict[str, JSON] = {
            "class": type(loaded.model).__name__,
            "packed_weights": loaded.packed,
            "plain_weights": loaded.plain,
            "fp4_layers": loaded.layers,
            "unused_tensors": list(loaded.unused[:20]),
        }
        self.data[name] = facts
        return loaded

    def _advance(self, tokens: int) -> None:
        self._done += tokens
        self._report(self._done, self._total)

    def _score(self, models: Mapping[str, LoadedModel], windows: Sequence[Sequence[int]]) -> None:
        import torch
        from requant.validate.divergence import Positions, compare_logits

        parts: list[Positions] = []
        for window in windows:
            ids = torch.tensor([list(window)], device="cuda" if self._cuda else "cpu")
            with torch.inference_mode():
                logits: list[torch.Tensor] = [
                    m.model(input_ids=ids, use_cache=False).logits[0, :-1] for m in models.values()
                ]
                parts.append(compare_logits(logits[0], logits[1], ids[0, 1:]))
            self.identical = self.identical and torch.equal(logits[0], logits[1])
            self.data["identical_logits"] = self.identical
            self.positions = Positions.joined(parts)
            self.data.update(_summary(self.positions, len(windows[0]) - 1))
            self._advance(len(window) - 1)

    def _generate(
        self, models: Mapping[str, LoadedModel], prompts: Sequence[Sequence[int]], kind: str, pad: int
    ) -> None:
        from requant.validate.divergence import Positions, compare_logits
        from requant.validate.generation import batch_of, greedy, logits_after

        batch, steps = batch_of(prompts, pad, "cuda" if self._cuda else "cpu"), self._gate.greedy_steps
        ours = {name: greedy(loaded.model, batch, steps, self._advance) for name, loaded in models.items()}
        differs = ours["source"] != ours["target"]
        self.first_difference = [int(row.int().argmax()) if bool(row.any()) else None for row in differs]
        shared = [steps if at is None else at for at in self.first_difference]
        self.data["greedy"] = {
            "prompts": len(prompts),
            "of": kind,
            "steps": steps,
            "identical": sum(at is None for at in self.first_difference),
            "first_difference": self.first_difference,
            "mean_shared_steps": float(np.mean(shared)),
        }
        answers = ours["source"]
        source, target = (logits_after(models[name].model, batch, answers) for name in ("source", "target"))
        self.answers = Positions.joined(
            [compare_logits(s, t, row) for s, t, row in zip(source, target, answers, strict=True)]
        )
        self.data["answers"] = {
            "tokens": int(answers.numel()),
            "kl_mean": _finite(float(self.answers.kl.mean())),
            "top1_agreement": float(self.answers.agree.mean()),
        }


def _summary(positions: Positions, window: int) -> dict[str, JSON]:
    """The measurements on the text as JSON."""
    from requant.validate.divergence import mean_of, ratio_of

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


# --- judging ----------------------------------------------------------------------------------------------------------


def _limits(gate: ModelGate, target: str, lossless: bool) -> Limits:
    exact = lossless and not gate.w4a4
    kl, ratio = default_limits(target, lossless=exact)
    if exact and gate.device == "cuda":
        kl, ratio = _GPU_KL, 1 + _GPU_KL
    own = [name for name in ("max_kl", "max_ppl_ratio") if getattr(gate, name) != "auto"]
    pair = "weights equal to their source" if exact else f"a conversion to {target} that rounds"
    return Limits(
        kl if gate.max_kl == "auto" else gate.max_kl,
        ratio if gate.max_ppl_ratio == "auto" else gate.max_ppl_ratio,
        exact and gate.max_kl == "auto" and gate.device != "cuda",
        "manifest" if len(own) == 2 else f"default for {pair}" + (f", {own[0]} from the manifest" if own else ""),
    )


def _judge(measured: _Measurement, limits: Limits, found: list[Finding]) -> None:
    """Findings for every bound that is not kept."""
    from requant.validate.divergence import Verdict, mean_of, ratio_of

    data, positions, answers = measured.data, measured.positions, measured.answers
    data["limits"] = {
        "max_kl": limits.max_kl,
        "max_ppl_ratio": limits.max_ppl_ratio,
        "identical_greedy": limits.identical,
        "origin": limits.origin,
    }
    if positions is None or answers is None:
        raise ModelUnavailableError("nothing was measured")
    if not all(np.isfinite(values).all() for values in (positions.kl, positions.nll_source, positions.nll_target)):
        where = int(np.argmin(np.isfinite(positions.kl + positions.nll_source + positions.nll_target)))
        found.append(
            Finding(
                "not-finite",
                "error",
                f"logits hold NaN or infinity from token {where} on",
                hint="run validate --only numerics",
            )
        )
        return
    kl, ratio = mean_of(positions.kl), ratio_of(positions)
    along = float(answers.kl.mean())
    if limits.max_kl is not None and max(kl.value, along) > limits.max_kl:
        place = "text" if kl.value > limits.max_kl else "source's own answers"
        both = f"{kl.value:.4g} nats on the text, {along:.4g} along the source's answers"
        message = f"mean KL is {both}: over {limits.max_kl:g}"
        found.append(Finding("kl-over-bound", "error", message, where=place, hint="max_kl"))
    if limits.identical and not measured.identical:
        found.append(Finding("logits-differ", "error", "the weights are said to be equal, and the logits are not"))
    differing = sum(at is not None for at in measured.first_difference)
    if limits.identical and differing:
        first = min(at for at in measured.first_difference if at is not None)
        message = (
            f"{differing} of {len(measured.first_difference)} greedy continuations differ, from step {first + 1} on"
        )
        found.append(Finding("greedy-differs", "error", message))
    if limits.max_ppl_ratio is None:
        return
    verdict = Verdict.NOT_INFERIOR if not kl.value else ratio.verdict(limits.max_ppl_ratio)
    data["perplexity_verdict"] = verdict.value
    if verdict is not Verdict.NOT_INFERIOR:
        interval = "" if ratio.low is None or ratio.high is None else f" (95%: {ratio.low:.3f} to {ratio.high:.3f})"
        message = f"perplexity is x{ratio.value:.3f}{interval}: {verdict} against x{limits.max_ppl_ratio:g}"
        hint = "raise validate.model.tokens" if verdict is Verdict.INCONCLUSIVE else "max_ppl_ratio"
        found.append(Finding("perplexity-over-bound", "error", message, hint=hint))


def _reason(measured: _Measurement, limits: Limits, found: Sequence[Finding]) -> str:
    errors = [finding.message for finding in found if finding.severity == "error"]
    if errors:
        return errors[0]
    greedy, perplexity, kl = (cast("Mapping[str, JSON]", measured.data[key]) for key in ("greedy", "perplexity", "kl"))
    bounds = "" if limits.max_kl is not None or limits.max_ppl_ratio is not None else "; no bounds"
    return (
        f"KL {kl['mean']:.4g} nats, perplexity x{perplexity['ratio']:.4f}, "
        f"{greedy['identical']} of {greedy['prompts']} greedy continuations identical{bounds}"
    )
