"""lm-eval tasks on both models of the stage `model`: the same questions, with errors and a verdict.

Tasks and their data are files in a folder that the manifest names; lm-eval's own tasks are not looked at, and nothing
is fetched. The models are those already loaded, FP4 modules and all. The first metric of a task is judged, and must be
better where it is higher: the target may score less than the source by `margin`, and the whole one-sided interval of
the paired differences counts (paired.py). Where weights equal their source on the CPU reference path, every score must
be equal.

lm-eval comes with the extra `requant[eval]`. It is imported only if a manifest asks for tasks.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import io
import logging
import warnings
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from requant.kernels.empty_model import ModelUnavailableError, quiet_transformers
from requant.manifests.gates import LmEval
from requant.validate.divergence import Verdict
from requant.validate.model_inputs import pad_of
from requant.validate.paired import PairedScores, paired
from requant.validate.results import JSON, Finding

if TYPE_CHECKING:
    from requant.validate.model_measure import Measurement

__all__ = ["check_tasks", "judge_task", "run_tasks"]

_SEED: Final = 1234
"""lm-eval's own, for the choice of examples in a prompt."""


def check_tasks(wanted: LmEval) -> None:
    """ModelUnavailableError for tasks that cannot be run here, before anything else takes its time."""
    if importlib.util.find_spec("lm_eval") is None:
        raise ModelUnavailableError("lm_eval is not installed: pip install 'requant[eval]'")
    if not Path(wanted.folder).is_dir():
        raise ModelUnavailableError(f"validate.model.lm_eval: {wanted.folder} is no folder")
    with _offline():
        known = sorted(_manager(wanted).all_tasks)
    missing = [name for name in wanted.tasks if name not in known]
    if missing:
        said = f"it has {', '.join(known)}" if known else "it has none"
        raise ModelUnavailableError(f"validate.model.lm_eval: no task {', '.join(missing)} in {wanted.folder}: {said}")


def run_tasks(
    measured: Measurement, wanted: LmEval, found: list[Finding], *, lossless: bool, data: dict[str, JSON]
) -> None:
    """Every task on both models; results go to data["lm_eval"] as they come, what fails to `found`.

    lossless: every score must equal the source's. ModelUnavailableError where lm-eval breaks off.
    """
    tasks: dict[str, JSON] = {}
    data["lm_eval"] = {"version": importlib.metadata.version("lm_eval"), "tasks": tasks}
    for name in wanted.tasks:
        scores = {arm: _scores(measured, arm, name, wanted) for arm in measured.models}
        for metric, source in scores["source"].items():
            both = paired(source, scores["target"][metric])
            told, finding = judge_task(name, metric, both, wanted.margin, lossless)
            judged = metric == next(iter(scores["source"]))
            tasks[f"{name}, {metric}"] = {**told, "judged": judged}
            if finding is not None and judged:
                found.append(finding)


def judge_task(
    task: str, metric: str, scores: PairedScores, margin: float, lossless: bool
) -> tuple[dict[str, JSON], Finding | None]:
    """The task's figures, and the finding if its bound is not kept."""
    told: dict[str, JSON] = {
        "metric": metric,
        "questions": scores.questions,
        "source": scores.source.value,
        "source_stderr": scores.source.error,
        "target": scores.target.value,
        "target_stderr": scores.target.error,
        "difference": scores.difference.value,
        "difference_stderr": scores.difference.error,
        "margin": 0.0 if lossless else margin,
    }
    if lossless:
        told["verdict"] = (Verdict.NOT_INFERIOR if scores.equal else Verdict.INFERIOR).value
        message = f"the weights are said to be equal, and scores ({metric}) are not"
        return told, None if scores.equal else Finding("task-differs", "error", message, where=task)
    verdict = scores.verdict(margin)
    told["verdict"] = verdict.value
    if verdict is Verdict.NOT_INFERIOR:
        return told, None
    error = scores.difference.error
    spread = "" if error is None else f" +- {error:.3f}"
    message = (
        f"{metric} is {scores.target.value:.3f}, the source's {scores.source.value:.3f}; the difference of "
        f"{scores.difference.value:+.3f}{spread} is {verdict} against a margin of {margin:g}"
    )
    hint = "give the task more questions" if verdict is Verdict.INCONCLUSIVE else "validate.model.lm_eval.margin"
    return told, Finding("task-under-bound", "error", message, where=task, hint=hint)


# --- lm-eval ----------------------------------------------------------------------------------------------------------


def _scores(measured: Measurement, arm: str, task: str, wanted: LmEval) -> dict[str, list[float]]:
    """One model's scores by metric, each in the order of the questions; fewer at a time if memory asks for it."""
    from requant.validate.model_measure import out_of_memory

    batch = wanted.batch_size
    while True:
        try:
            samples, better = _samples(measured, arm, task, wanted, batch)
            scores = _by_metric(samples, better, task)
            break
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error) or batch == 1:
                raise
        batch //= 2
    if batch < wanted.batch_size:
        measured.smaller(f"{wanted.batch_size} requests of lm-eval at a time: {batch} were made ({task}, {arm})")
    return scores


def _samples(
    measured: Measurement, arm: str, task: str, wanted: LmEval, batch: int
) -> tuple[Sequence[Mapping[str, Any]], Mapping[str, bool | None]]:
    """What lm-eval noted of every question, and of every metric whether higher is better. Relative paths in a task are
    from its folder."""
    lm_eval = importlib.import_module("lm_eval")
    model: Any = importlib.import_module("lm_eval.models.huggingface").HFLM
    tasks: Any = importlib.import_module("lm_eval.tasks")
    loaded, tokenizer = measured.models[arm].model, measured.tokenizer
    # what lm-eval puts before a question without a beginning; it fails where a tokenizer has none
    first = pad_of(tokenizer) if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None else None
    with _offline(), contextlib.chdir(wanted.folder):
        try:
            chosen: Any = tasks.get_task_dict([task], _manager(wanted))
            for one in chosen.values():
                one.set_fewshot_seed(seed=_SEED)
            results: Any = lm_eval.evaluate(
                model(pretrained=loaded, tokenizer=tokenizer, batch_size=batch, prefix_token_id=first),
                chosen,
                limit=wanted.limit,
                bootstrap_iters=0,
                apply_chat_template=wanted.chat_template,
            )
        except (MemoryError, RuntimeError):
            raise
        except Exception as error:  # a task is a file of the user's, with code of its own
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            message = f"lm-eval broke off at task {task} with {type(error).__name__}: {first}"
            raise ModelUnavailableError(message) from error
    samples = cast("Sequence[Mapping[str, Any]]", results["samples"][task])
    return samples, cast("Mapping[str, bool | None]", results["higher_is_better"].get(task) or {})


def _by_metric(
    samples: Sequence[Mapping[str, Any]], better: Mapping[str, bool | None], task: str
) -> dict[str, list[float]]:
    """Numbers by metric, of the first filter alone. better: of each metric whether higher is better.

    ModelUnavailableError where no metric gives a number a question, or the first that does is better where it is lower.
    """
    own = [sample for sample in samples if sample["filter"] == samples[0]["filter"]]
    own.sort(key=lambda sample: int(sample["doc_id"]))
    found: dict[str, list[float]] = {}
    for metric in cast("Sequence[str]", own[0]["metrics"]) if own else ():
        values = [sample[metric] for sample in own]
        if all(isinstance(value, int | float) for value in values):
            found[metric] = [float(value) for value in values]
    if not found:
        raise ModelUnavailableError(f"lm-eval task {task} has no metric with a number for each question")
    judged = next(iter(found))
    if better.get(judged) is False:
        message = f"lm-eval task {task}: its first metric, {judged}, is better where it is lower, and is what is judged"
        raise ModelUnavailableError(f"{message}: list one first that is better where it is higher")
    return found


def _manager(wanted: LmEval) -> Any:
    tasks: Any = importlib.import_module("lm_eval.tasks")
    return tasks.TaskManager(include_path=str(Path(wanted.folder).resolve()), include_defaults=False)


@contextlib.contextmanager
def _offline() -> Generator[None]:
    """Nothing is fetched, and lm-eval and its libraries say nothing: their bars and hints would mix with ours."""
    loggers = [logging.getLogger(name) for name in ("lm_eval", "lm-eval", "datasets")]
    levels = [logger.level for logger in loggers]
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stderr(io.StringIO()),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        warnings.simplefilter("ignore")  # of several libraries, and none of them ours
        settings: list[Any] = [importlib.import_module(n) for n in ("huggingface_hub.constants", "datasets.config")]
        before = [module.HF_HUB_OFFLINE for module in settings]
        try:
            for logger in loggers:
                logger.setLevel(logging.CRITICAL)
            for module in settings:
                module.HF_HUB_OFFLINE = True
            with quiet_transformers():
                yield
        finally:
            for module, value in zip(settings, before, strict=True):
                module.HF_HUB_OFFLINE = value
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
