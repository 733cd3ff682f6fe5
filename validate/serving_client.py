"""The few requests of our own to an OpenAI-compatible server: is it up, what does it serve, can it answer.

Only these; load and its statistics come from guidellm (serving_load.py). The question is asked before anything is
timed, because a broken kernel serves garbage at full speed under a green health check.
"""

from __future__ import annotations

import http.client
import json
import re
import urllib.error
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, cast

__all__ = ["Client", "Refused", "holds"]

_SECONDS: Final = 5.0
"""For requests that compute nothing."""
_ANSWER_TOKENS: Final = 64


class Refused(Exception):  # noqa: N818 - it is the server's answer, not a fault of ours
    """The server answered with an error, or with something that is no answer. status: HTTP's, 0 without one."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Client:
    """url: the server's address, without /v1. model: its name there. seconds: for an answer. All raise Refused."""

    url: str
    model: str = ""
    seconds: float = 120.0

    def healthy(self) -> bool:
        """Whether /health says so, or, where there is none, /v1/models."""
        for path in ("/health", "/v1/models"):
            try:
                self._send(path, None, _SECONDS)
            except Refused:
                continue
            return True
        return False

    def first_model(self) -> str:
        """The first model that the server lists, or ""."""
        try:
            listed = self._json("/v1/models", None, _SECONDS).get("data")
        except Refused:
            return ""
        entries = cast("list[Mapping[str, object]]", listed) if isinstance(listed, list) else []
        return str(entries[0].get("id") or "") if entries else ""

    def version(self) -> str:
        """ "vLLM 0.30.0" or "SGLang 0.5" from their own pages; "" from other servers."""
        for path, name in (("/version", "vLLM"), ("/get_server_info", "SGLang")):
            try:
                found = self._json(path, None, _SECONDS).get("version")
            except Refused:
                continue
            if isinstance(found, str) and found:
                return f"{name} {found}"
        return ""

    def ask(self, question: str) -> str:
        """The answer to a question, greedily: as a chat, or as a continuation if the model has no chat template.

        For that, servers answer with 400, 404 or even 500; a server that is broken fails at the continuation too.
        """
        chat = {"messages": [{"role": "user", "content": question}]}
        try:
            return self._answer("/v1/chat/completions", chat)
        except Refused as error:
            if not error.status:
                raise
        return self._answer("/v1/completions", {"prompt": f"Question: {question}\nAnswer:"})

    def takes_fixed_lengths(self) -> bool:
        """Whether it takes `ignore_eos`, without which an answer may end before its time."""
        try:
            self._complete({"ignore_eos": True})
        except Refused as error:
            if error.status in (400, 422):
                return False
            raise
        return True

    def warm_up(self, streams: int) -> None:
        """As many short requests at a time as will be timed, so that graphs are captured and caches are warm."""
        with ThreadPoolExecutor(streams) as pool:
            list(pool.map(self._complete, [dict[str, object]()] * streams))

    def _complete(self, more: Mapping[str, object]) -> None:
        self._json(
            "/v1/completions", {"model": self.model, "prompt": "One, two,", "max_tokens": 4, **more}, self.seconds
        )

    def _answer(self, path: str, prompt: Mapping[str, object]) -> str:
        body = {"model": self.model, "max_tokens": _ANSWER_TOKENS, "temperature": 0, **prompt}
        answer = self._json(path, body, self.seconds)
        try:
            choice = cast("list[Mapping[str, object]]", answer["choices"])[0]
            message = cast("Mapping[str, object]", choice.get("message") or {})
            return str(choice.get("text") or message.get("content") or "")
        except (LookupError, TypeError, AttributeError) as error:
            raise Refused(f"{path} gave no answer: {_short(json.dumps(answer))}") from error

    def _json(self, path: str, body: Mapping[str, object] | None, seconds: float) -> Mapping[str, object]:
        text = self._send(path, body, seconds)
        try:
            answer = cast("object", json.loads(text))
        except ValueError as error:
            raise Refused(f"{path} gave no JSON: {_short(text)}") from error
        if not isinstance(answer, dict):
            raise Refused(f"{path} gave no JSON object: {_short(text)}")
        return cast("Mapping[str, object]", answer)

    def _send(self, path: str, body: Mapping[str, object] | None, seconds: float) -> str:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}{path}", data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=seconds) as answer:
                return cast("bytes", answer.read()).decode("utf-8", "replace")
        except urllib.error.HTTPError as error:
            try:
                with error:
                    said = error.read().decode("utf-8", "replace")
            except _CUT_OFF:
                said = "nothing more, the connection broke off"
            raise Refused(f"{path} answered {error.code}: {_short(said)}", error.code) from error
        except _CUT_OFF as error:  # refused, timed out, cut off before or within the answer, no address
            raise Refused(f"{path}: {getattr(error, 'reason', None) or error}") from error


_CUT_OFF: Final = (OSError, ValueError, http.client.HTTPException)


def holds(answer: str, expected: str) -> bool:
    """Whether the expected word stands in the answer, as a word, whatever its case."""
    return re.search(rf"(?<!\w){re.escape(expected)}(?!\w)", answer, re.IGNORECASE) is not None


def _short(text: str) -> str:
    one = " ".join(text.split())
    return one if len(one) <= 200 else f"{one[:200]} ..."
