"""Greedy continuation of prompts by a transformers model: what a user of the model would see, without a sampler's luck.

Prompts of several lengths go as one batch, padded on the left; no end-of-text token stops a continuation, so that every
prompt gives as many steps as were asked for.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

__all__ = ["CHAT_PROMPTS", "Batch", "batch_of", "greedy", "logits_after"]

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

    def extended(self, tokens: torch.Tensor) -> Batch:
        """With tokens [B, n] behind each prompt."""
        return Batch(torch.cat([self.ids, tokens], 1), torch.cat([self.mask, torch.ones_like(tokens)], 1))


def batch_of(prompts: Sequence[Sequence[int]], pad: int, device: str = "cpu") -> Batch:
    """Token lists, none empty, as a batch on a device."""
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.full((len(prompts), longest), pad, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(list(prompt))
        mask[row, longest - len(prompt) :] = 1
    return Batch(ids.to(device), mask.to(device))


def greedy(model: Any, batch: Batch, steps: int, progress: Callable[[int], None] = lambda _: None) -> torch.Tensor:
    """The `steps` most likely tokens behind each prompt, [B, steps]. progress: called with the tokens of a step."""
    cache_name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    ids, mask, cache = batch.ids, batch.mask, None
    chosen: list[torch.Tensor] = []
    with torch.inference_mode():
        for _ in range(steps):
            out = model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=_positions(mask)[:, -ids.shape[1] :],
                use_cache=True,
                logits_to_keep=1,
                **({} if cache is None else {cache_name: cache}),
            )
            cache = out[cache_name]
            ids = out.logits[:, -1:].argmax(-1)
            mask = torch.cat([mask, torch.ones_like(ids)], 1)
            chosen.append(ids)
            progress(ids.shape[0])
    return torch.cat(chosen, 1)


def logits_after(model: Any, batch: Batch, answers: torch.Tensor) -> torch.Tensor:
    """Logits [B, n, V] from which each token of answers [B, n] would be chosen, if the ones before it were given."""
    whole, count = batch.extended(answers), answers.shape[1]
    with torch.inference_mode():
        out = model(
            input_ids=whole.ids,
            attention_mask=whole.mask,
            position_ids=_positions(whole.mask),
            use_cache=False,
            logits_to_keep=count + 1,
        )
    return out.logits[:, -count - 1 : -1]


def _positions(mask: torch.Tensor) -> torch.Tensor:
    """Position of each token, padding not counted."""
    return (mask.cumsum(1) - 1).clamp(min=0)
