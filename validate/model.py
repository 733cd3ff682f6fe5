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

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, cast

import numpy as np
from requant.kernels.empty_model import ModelUnavailableError
from requant.manifests.gates import ModelGate
from requant.validate.results import JSON, Finding, StageResult, Status, status_of

if TYPE_CHECKING:
    from requant.validate.model_measure import Measurement

__all__ = ["Limits", "check_model", "default_limits"]

STAGE: Final = "model"
_GPU: Final = (1e-3, 1.001)
"""(max_kl, max_ppl_ratio) of equal weights on a GPU instead of exactly 0 and 1: kernels for two formats may sum in
another order, in FP32, and layers round to BF16. The interval of the perplexity must lie under its bound too: 4096
tokens may be too few to prove that, and then more are needed, as the finding says (docs/h200/README.md: a gpt-oss of
random weights had x0.9995 to 1.0019 on 4096 tokens, x0.9993 to 1.0001 on 32,768)."""
_LARGE: Final = 2 << 30
"""Bytes of a checkpoint from which `device: any` prefers a GPU: above, the CPU takes many minutes."""


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
_W4A4: Final = (0.65, 1.80)
"""Of NVFP4 with rounded activations too: there it has KL 0.42 and x1.59."""


def default_limits(target: str, *, lossless: bool, w4a4: bool = False) -> tuple[float | None, float | None]:
    """(max_kl, max_ppl_ratio) for `auto`. target: the manifest's target.format. w4a4: activations are rounded too."""
    if w4a4 and target.startswith("nvfp4"):
        return _W4A4
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
        kind, device = _device(gate, output)
        if gate.lm_eval is not None:
            from requant.validate.model_tasks import check_tasks

            check_tasks(gate.lm_eval)
        from requant.validate.model_measure import Measurement

        measured = Measurement(source, output, gate, kind, progress, data, found)
        measured.run()
        limits = _limits(gate, target, lossless, kind)
        _judge(measured, limits, found)
        if gate.lm_eval is not None:
            from requant.validate.model_tasks import run_tasks

            run_tasks(measured, gate.lm_eval, found, lossless=limits.identical, data=data)
        data["complete"] = True
        status, reason = status_of(found), _reason(measured, limits, found)
    except ModelUnavailableError as error:
        status, reason = Status.NOT_RUN, _so_far(str(error), data)
    except (MemoryError, RuntimeError, IndexError, ValueError) as error:  # out of memory; a forward pass that breaks
        status, reason = Status.NOT_RUN, _so_far(_broken(error), data)
    return StageResult(STAGE, status, reason, tuple(found), data, device, time.perf_counter() - begin)


def _broken(error: Exception) -> str:
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    if isinstance(error, MemoryError) or "out of memory" in first or "can't allocate memory" in first:
        return f"memory does not suffice, even for one short stretch at a time: {type(error).__name__}: {first}"
    return f"the model broke off with {type(error).__name__}: {first}"


def _device(gate: ModelGate, output: Path) -> tuple[Literal["cpu", "cuda"], str]:
    """Where the stage runs, and what that is called. `any`: a small model on the CPU, a large one on a GPU if there is
    one."""
    if gate.device == "cpu" or (gate.device == "any" and _bytes_of(output) < _LARGE):
        return "cpu", "cpu"
    import torch

    if torch.cuda.is_available():
        return "cuda", f"cuda:0 {torch.cuda.get_device_name()}"
    if gate.device == "cuda":
        raise ModelUnavailableError("the gate asks for a GPU, and there is none")
    return "cpu", "cpu"


def _bytes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _so_far(reason: str, data: Mapping[str, JSON]) -> str:
    done = data.get("tokens")
    return f"{reason} (what was measured on {done:,} tokens is kept)" if isinstance(done, int) else reason


# --- judging ----------------------------------------------------------------------------------------------------------


def _limits(gate: ModelGate, target: str, lossless: bool, device: str) -> Limits:
    exact = lossless and not gate.w4a4
    kl, ratio = default_limits(target, lossless=exact, w4a4=gate.w4a4)
    if exact and device == "cuda":
        kl, ratio = _GPU
    own = [name for name in ("max_kl", "max_ppl_ratio") if getattr(gate, name) != "auto"]
    pair = "weights equal to their source" if exact else f"a conversion to {target} that rounds"
    return Limits(
        kl if gate.max_kl == "auto" else gate.max_kl,
        ratio if gate.max_ppl_ratio == "auto" else gate.max_ppl_ratio,
        exact and gate.max_kl == "auto" and device != "cuda",
        "manifest" if len(own) == 2 else f"default for {pair}" + (f", {own[0]} from the manifest" if own else ""),
    )


def _judge(measured: Measurement, limits: Limits, found: list[Finding]) -> None:
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
    for part, of in ((positions, ""), (answers, " of the source's answers")):
        finite = np.isfinite(part.kl + part.nll_source + part.nll_target)
        if not finite.all():
            message = f"logits hold NaN or infinity from token {int(np.argmin(finite))}{of} on"
            found.append(Finding("not-finite", "error", message, hint="run validate --only numerics"))
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
    equal = not kl.value and limits.max_ppl_ratio >= 1
    verdict = Verdict.NOT_INFERIOR if equal else ratio.verdict(limits.max_ppl_ratio)
    data["perplexity_verdict"] = verdict.value
    if verdict is not Verdict.NOT_INFERIOR:
        interval = "" if ratio.low is None or ratio.high is None else f" (95%: {ratio.low:.3f} to {ratio.high:.3f})"
        message = f"perplexity is x{ratio.value:.3f}{interval}: {verdict} against x{limits.max_ppl_ratio:g}"
        hint = "raise validate.model.tokens" if verdict is Verdict.INCONCLUSIVE else "max_ppl_ratio"
        found.append(Finding("perplexity-over-bound", "error", message, hint=hint))


def _reason(measured: Measurement, limits: Limits, found: Sequence[Finding]) -> str:
    errors = [finding.message for finding in found if finding.severity == "error"]
    if errors:
        return errors[0]
    greedy, perplexity, kl = (cast("Mapping[str, JSON]", measured.data[key]) for key in ("greedy", "perplexity", "kl"))
    bounds = "" if limits.max_kl is not None or limits.max_ppl_ratio is not None else "; no bounds"
    return (
        f"KL {kl['mean']:.4g} nats, perplexity x{perplexity['ratio']:.4f}, "
        f"{greedy['identical']} of {greedy['prompts']} greedy continuations identical{bounds}"
    )
