"""The Hub as huggingface_hub reaches it: one client, its faults in our words, a snapshot in its cache.

HF_TOKEN, HF_ENDPOINT, HF_HOME, HF_HUB_OFFLINE and proxies hold as for any user of `hf`. No token is ever handled here:
the library finds it, and whatever it says about a failed request passes through `redact` before anyone reads it.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from glob import escape
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from requant.convert.private import redact
from requant.manifests.errors import EnvironmentFault, PublishError, RequantError, SourceError

__all__ = [
    "AGAIN",
    "fault_chain",
    "fetch",
    "hub_api",
    "hub_faults",
    "is_offline",
    "network_errors",
    "retry_after",
    "status_of_fault",
]

AGAIN: Final = "run the same command again: what is there already is not transferred twice"
_UNUSED: Final = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.onnx", "*.h5", "*.msgpack", "original/*", "metal/*")
"""What no conversion reads: pickles, and the producer's second copies of the weights."""
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


class _Redacted(logging.Filter):
    """Takes signatures out of the addresses that huggingface_hub warns about."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Rewrite the message; every record passes."""
        record.msg, record.args = redact(record.getMessage()), ()
        return True


def hub_api() -> Any:
    """The client; its warnings are made safe to show."""
    hub: Any = import_module("huggingface_hub")  # its signatures are only partly typed
    for handler in logging.getLogger("huggingface_hub").handlers:
        if not any(isinstance(known, _Redacted) for known in handler.filters):
            handler.addFilter(_Redacted())
    endpoint = os.environ.get("HF_ENDPOINT") or None
    return hub.HfApi(endpoint=endpoint, library_name="requant", library_version=version("requant"))


def is_offline() -> bool:
    """Whether HF_HUB_OFFLINE forbids the network."""
    constants: Any = import_module("huggingface_hub.constants")
    return bool(constants.is_offline_mode())


def fetch(repo: str, revision: str, files: Iterable[str] | None = None) -> tuple[Path, str]:
    """(snapshot folder, commit) of `repo` at `revision` in the Hub's own cache; `files`: only these.

    SourceError if repository, revision or file is not there, EnvironmentFault if network or disk fail.
    """
    allowed = None if files is None else [escape(file) for file in files]
    api = hub_api()
    with hub_faults(repo, "the download", revision=revision):
        folder = Path(
            api.snapshot_download(repo, revision=revision, allow_patterns=allowed, ignore_patterns=list(_UNUSED))
        )
    return folder, folder.name


@contextmanager
def hub_faults(repo: str, doing: str, *, revision: str = "", publishing: bool = False) -> Generator[None]:
    """Turn what huggingface_hub raises into SourceError, EnvironmentFault or, while publishing, PublishError."""
    try:
        yield
    except RequantError:
        raise
    except (*network_errors(), RuntimeError, ValueError) as error:  # ValueError: an LFS batch or a name it refuses
        # `from None`: the chain holds requests, and these hold headers
        raise _fault(error, repo, doing, revision, publishing=publishing) from None


def network_errors() -> tuple[type[Exception], ...]:
    """What a request raises that got no answer, or a bad one."""
    from huggingface_hub.errors import HfHubHTTPError

    return (HfHubHTTPError.__bases__[0], OSError)  # the former: the base class of the HTTP library's errors


def retry_after(error: BaseException) -> float | None:
    """Seconds that the Hub asks to wait, or None."""
    for step in fault_chain(error):
        said = getattr(getattr(step, "response", None), "headers", {}).get("retry-after", "")
        if said.isdigit():
            return float(said)
    return None


def fault_chain(error: BaseException) -> Sequence[BaseException]:
    """An error with what it came from, outermost first."""
    found: list[BaseException] = []
    step: BaseException | None = error
    while step is not None and step not in found:
        found.append(step)
        step = step.__cause__ or step.__context__
    return found


def status_of_fault(error: BaseException) -> int | None:
    """HTTP status of what went wrong, or None if no answer came."""
    for step in fault_chain(error):
        response = getattr(step, "response", None)
        if response is not None:
            return int(response.status_code)
    return None


def _fault(error: BaseException, repo: str, doing: str, revision: str, *, publishing: bool) -> RequantError:
    """The error of ours that says the same."""
    from huggingface_hub import errors

    chain = fault_chain(error)

    def among(kind: type[BaseException]) -> bool:
        return any(isinstance(step, kind) for step in chain)

    def made(kind: type[RequantError], message: str, hint: str) -> RequantError:
        return (PublishError if publishing else kind)(message, where=repo, hint=hint)

    status = status_of_fault(error)
    said = next((str(m) for step in chain if (m := getattr(step, "server_message", None))), "")
    if among(errors.OfflineModeIsEnabled) and not among(errors.LocalEntryNotFoundError):
        return made(EnvironmentFault, "offline mode is on", "unset HF_HUB_OFFLINE, or give source.path")
    if among(errors.GatedRepoError):
        return made(SourceError, "is gated", "accept its terms on the Hub and log in with `hf auth login` or HF_TOKEN")
    if status == 401 and not among(errors.RepositoryNotFoundError):
        return made(
            SourceError,
            "the Hub does not accept the token: it is wrong, expired or revoked",
            "make a new one on the Hub and log in with `hf auth login` or HF_TOKEN",
        )
    if among(errors.RepositoryNotFoundError):
        return made(
            SourceError,
            "repository not found, or private and no valid token",
            "check the name; `hf auth whoami` says who you are",
        )
    if among(errors.RevisionNotFoundError):
        return made(
            SourceError,
            f"has no revision {revision}" if revision else "the revision is not there any more",
            "name a branch, tag or commit that exists; a commit that was planned with may have been deleted since",
        )
    if among(errors.RemoteEntryNotFoundError):
        return made(SourceError, f"a file is gone: {redact(said) or 'not found'}", "plan again")
    return _answered(status, redact(said), made) or _unanswered(error, chain, doing, made)


def _answered(status: int | None, said: str, made: Any) -> RequantError | None:
    """Errors that only the status tells apart."""
    if status is None:
        return None
    if status in (402, 403, 413, 507):
        return made(
            SourceError,
            f"the Hub refuses: {said or f'status {status}'}",
            "the token must be allowed to do this, and the account must have the space for it",
        )
    if status in (409, 412):
        return made(EnvironmentFault, "someone else changed the revision at the same time", AGAIN)
    if status == 429:
        return made(EnvironmentFault, "the Hub limits the rate of requests and did not relent", f"wait, then {AGAIN}")
    return made(EnvironmentFault, f"the Hub answers with status {status}{f': {said}' if said else ''}", AGAIN)


def _unanswered(error: BaseException, chain: Sequence[BaseException], doing: str, made: Any) -> RequantError:
    """No answer came: disk, cache or network."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    if any(isinstance(step, OSError) and step.errno in _FULL for step in chain):
        return EnvironmentFault("the disk is full", where=doing, hint=f"free some space, then {AGAIN}")
    if any(isinstance(step, LocalEntryNotFoundError) for step in chain):
        return made(
            EnvironmentFault,
            "the Hub cannot be reached and the cache does not hold the checkpoint",
            "check the network, HF_ENDPOINT and HF_HUB_OFFLINE, or give source.path",
        )
    root = redact(str(chain[-1]) or str(error)).partition("\n")[0]
    return made(EnvironmentFault, f"{doing} broke off: {root}", AGAIN)
