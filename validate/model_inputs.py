"""What the stage `model` measures on: the text in stretches, prompts to continue, and the tokenizer of the checkpoint.

Whatever is missing or does not fit is a ModelUnavailableError that says what: the stage is then `not run`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from requant.kernels.empty_model import ModelUnavailableError, encode, quiet_transformers
from requant.manifests.gates import ModelGate
from requant.validate.generation import CHAT_PROMPTS
from requant.validate.results import Finding

__all__ = ["Tokens", "check_context", "pad_of", "prompts_of", "read_text", "tokens_of"]

_PROMPTS: Final = 8
_PROMPT_TOKENS: Final = 32
"""Of a prompt cut from the text, for models without a chat template."""
_FEWEST: Final = 128
"""Scored tokens below which there is no standard error (two blocks of 64)."""


def read_text(location: str) -> str:
    """A UTF-8 file that the manifest names."""
    try:
        return Path(location).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ModelUnavailableError(f"validate.model: {location} cannot be read: {why}") from error


@dataclass(frozen=True, slots=True)
class Tokens:
    """A text as tokens. first: what the model expects before any of them, if anything. wanted: how many are scored."""

    ids: tuple[int, ...]
    first: tuple[int, ...]
    wanted: int
    length: int

    def stretches(self, length: int) -> list[list[int]]:
        """Stretches of length + 1 tokens: of each but its first token the prediction is scored."""
        starts = range(0, max(self.wanted - length, 0) + 1, length)
        return [[*self.first, *self.ids[start : start + length + 1 - len(self.first)]] for start in starts]


def tokens_of(tokenizer: Any, text: str, gate: ModelGate, found: list[Finding]) -> Tokens:
    """The text's tokens, of which as many are scored as the gate asks for, or as there are: then with a warning."""
    ids = encode(tokenizer, text, special=False)
    wanted, length = gate.tokens, min(gate.sequence_length, gate.tokens)
    if len(ids) <= _FEWEST:
        raise ModelUnavailableError(f"the text has {len(ids)} tokens; at least {_FEWEST + 1} are needed for an error")
    if len(ids) <= wanted:
        found.append(
            Finding(
                "text-short",
                "warning",
                f"the text has {len(ids):,} tokens, {wanted:,} were asked for: all of it was scored",
                where=Path(gate.text).name,
                hint="give a longer text, or ask for fewer tokens",
            )
        )
        wanted, length = len(ids) - 1, min(length, len(ids) - 1)
    first = encode(tokenizer, "", special=True)[:1]  # what the model expects first, if anything
    return Tokens(tuple(ids), tuple(first), wanted, length)


def check_context(config: Any, gate: ModelGate, prompts: Sequence[Sequence[int]]) -> None:
    """ModelUnavailableError if the gate asks for more tokens in a row than the model takes."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    context = getattr(text, "max_position_embeddings", None)
    if not isinstance(context, int):
        return
    asked = {"sequence_length": gate.sequence_length}
    asked["the longest prompt and greedy_steps"] = max(len(p) for p in prompts) + gate.greedy_steps
    for name, longest in asked.items():
        if longest > context:
            message = f"validate.model asks for {longest:,} tokens in a row ({name}), the model takes {context:,}"
            raise ModelUnavailableError(message)


def prompts_of(tokenizer: Any, gate: ModelGate, windows: Sequence[Sequence[int]]) -> tuple[list[list[int]], str]:
    """Token lists to continue, and what they are."""
    given = (
        [line for line in read_text(gate.prompts).splitlines() if line.strip()] if gate.prompts is not None else None
    )
    if given is not None and not given:
        raise ModelUnavailableError(f"validate.model: {gate.prompts} holds no prompt")
    if getattr(tokenizer, "chat_template", None):
        chats = [[{"role": "user", "content": prompt}] for prompt in given or CHAT_PROMPTS]
        with quiet_transformers():
            texts = [tokenizer.apply_chat_template(c, tokenize=False, add_generation_prompt=True) for c in chats]
        return [encode(tokenizer, text, special=False) for text in texts], "chat prompts"
    if given is not None:
        return [encode(tokenizer, prompt, special=True) for prompt in given], "prompts"
    step = max(1, len(windows) // _PROMPTS)
    return [list(window[:_PROMPT_TOKENS]) for window in windows[::step][:_PROMPTS]], "beginnings of stretches"


def pad_of(tokenizer: Any) -> int:
    """The token to pad with; masked, so any will do."""
    pad = tokenizer.pad_token_id
    return int(pad) if isinstance(pad, int) else 0
