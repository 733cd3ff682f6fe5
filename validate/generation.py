"""Greedy continuation of prompts by transformers models: what a user would see, without a sampler's luck.

Prompts of several lengths go as one batch, padded on the left; no end-of-text token stops a continuation, so that every
prompt gives as many steps as were asked for.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch

__all__ = ["CHAT_PROMPTS", "Batch", "along_answers", "batch_of"]

CHAT_PROMPTS: Final = (
    "What is the capital of France, and what is it known for?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Explain to a child why the sky is blue.",
    "A train travels 120 km in 90 minutes. What is its average speed in km/h? Show your steps.",
    "List three differences between a list and a tuple in Python.",
    "Summarise in one sentence: The committee met on Monday and put the vote off until all members could attend.",
    "Translate into German: Where is the nearest train station?",
    "What is 17 * 23? Answer with the number first.",
)
"""For chat models, whose raw perplexity says little: facts, code, arithmetic, rewriting."""


class Batch:
    """Prompts as one batch. ids, mask [B, T]: padded on the left."""

    def __init__(self, ids: torch.Tensor, mask: torch.Tensor) -> None:
        self.ids = ids
        self.mask = mask


def batch_of(prompts: Sequence[Sequence[int]], pad: int, device: str = "cpu") -> Batch:
    """Token lists, none empty, as a batch on a device."""
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.full((len(prompts), longest), pad, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(list(prompt))
        mask[row, longest - len(prompt) :] = 1
    return Batch(ids.to(device), mask.to(device))


def along_answers(models: Sequence[Any], batch: Batch, steps: int) -> Iterator[tuple[torch.Tensor, list[torch.Tensor]]]:
    """Per step the token [B] that the first model finds most likely behind each prompt, and all models' logits [B, V].

    All models are given the first one's tokens. Until another would have chosen differently, its logits are those of
    its own continuation, so that the first difference is the one of two free continuations.
    """
    names = ["cache" if "cache" in inspect.signature(m.forward).parameters else "past_key_values" for m in models]
    caches: list[Any] = [None] * len(models)
    ids, mask = batch.ids, batch.mask
    for _ in range(steps):
        logits: list[torch.Tensor] = []
        with torch.inference_mode():
            for index, (model, name) in enumerate(zip(models, names, strict=True)):
                out = model(
                    input_ids=ids,
                    attention_mask=mask,
                    position_ids=_positions(mask)[:, -ids.shape[1] :],
                    use_cache=True,
                    logits_to_keep=1,
                    **({} if caches[index] is None else {name: caches[index]}),
                )
                caches[index] = out[name]
                logits.append(out.logits[:, -1])
            chosen = logits[0].argmax(-1)
            ids = chosen[:, None]
            mask = torch.cat([mask, torch.ones_like(ids)], 1)
        yield chosen, logits


def _positions(mask: torch.Tensor) -> torch.Tensor:
    """Position of each token, padding not counted."""
    return (mask.cumsum(1) - 1).clamp(min=0)
