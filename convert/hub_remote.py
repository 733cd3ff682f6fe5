"""A repository on the Hub as a remote checkpoint: at a commit, read by ranges, fetched into the Hub's cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Self

from requant.convert.hub import AGAIN, fetch, hub_api, hub_faults, network_errors
from requant.convert.remote import FILE_LIMIT, RemoteFile, check_name
from requant.manifests.errors import EnvironmentFault, SourceError

__all__ = ["HubRemote", "resolve"]

STUCK: Final = 3
"""Attempts at a ranged read that bring nothing, each after the library's own retries, before it is given up."""


@dataclass(frozen=True, slots=True)
class HubRemote:
    """A repository at a commit (40 hex digits), which `revision` stood for when it was asked."""

    repo: str
    revision: str
    commit: str
    files: Mapping[str, RemoteFile]

    @property
    def name(self) -> str:
        """The repository's."""
        return self.repo

    @property
    def folder(self) -> Path:
        """Where huggingface_hub's cache holds this commit, or will."""
        constants: Any = import_module("huggingface_hub.constants")
        name = "models--" + self.repo.replace("/", "--")
        return Path(constants.HF_HUB_CACHE) / name / "snapshots" / self.commit

    def only(self, names: Iterable[str]) -> Self:
        """As remote.Remote says."""
        return replace(self, files={name: self.files[name] for name in names})

    def read(self, name: str, begin: int, end: int, write: Callable[[bytes, int], object]) -> None:
        """As remote.Remote says; a broken connection is taken up at the byte."""
        at = begin
        with hub_faults(self.repo, f"reading {name}", revision=self.commit):
            stuck = 0
            while at < end:
                before = at
                try:
                    for data in _stream(self, name, at, end):
                        write(data, at)
                        at += len(data)
                except network_errors() as error:
                    if isinstance(error, OSError):  # an answer, or the disk: not a broken connection
                        raise
                    if stuck == STUCK:
                        raise
                stuck = 0 if at > before else stuck + 1
                if stuck > STUCK:
                    raise EnvironmentFault(f"{name} ends {end - at:,} bytes early", where=self.repo, hint=AGAIN)

    def fetch(self, names: Sequence[str], *, by_name: bool = False) -> Path:
        """The snapshot folder with these files in it. By the revision's name, the cache remembers what it stood for."""
        if by_name:
            folder, commit = fetch(self.repo, self.revision, names)
            if commit == self.commit:
                return folder
        return fetch(self.repo, self.commit, names)[0]

    def changed(self) -> list[str]:
        """Nothing: a commit does not change."""
        return []


def resolve(repo: str, revision: str) -> HubRemote:
    """The commit that `revision` stands for now, and its files. SourceError if it is not there or names are hostile."""
    with hub_faults(repo, "the request", revision=revision):
        info: Any = hub_api().model_info(repo, revision=revision, files_metadata=True)
    files: dict[str, RemoteFile] = {}
    for entry in info.siblings:
        check_name(repo, entry.rfilename)
        digest = str(entry.lfs.sha256) if entry.lfs else None
        size = int(entry.size or 0)
        if not 0 <= size <= FILE_LIMIT:
            raise SourceError(f"says that {entry.rfilename} has {size:,} bytes", where=repo, hint="do not use it")
        files[entry.rfilename] = RemoteFile(entry.rfilename, size, digest)
    return HubRemote(repo, revision, str(info.sha), files)


def _stream(remote: HubRemote, name: str, begin: int, end: int) -> Any:
    """The pieces of one ranged GET through huggingface_hub's session, at most end - begin bytes of them."""
    hub: Any = import_module("huggingface_hub")
    utils: Any = import_module("huggingface_hub.utils")
    api = hub_api()
    url = hub.hf_hub_url(remote.repo, name, revision=remote.commit, endpoint=api.endpoint)
    headers = {**utils.build_hf_headers(), "Range": f"bytes={begin}-{end - 1}", "Accept-Encoding": "identity"}
    wanted, broken = end - begin, None
    with utils.http_stream_backoff("GET", url, headers=headers, follow_redirects=True) as response:
        utils.hf_raise_for_status(response)
        skip = begin if response.status_code == 200 else 0  # a proxy that knows no ranges
        try:
            for piece in response.iter_raw():
                data = piece[skip:] if skip else piece
                skip = max(skip - len(piece), 0)
                if data:
                    yield data[:wanted]
                    wanted -= min(len(data), wanted)
                if not wanted:
                    break
        except network_errors() as error:  # not thrown into the library's retry loop, which would send all of it again
            broken = error
    if broken is not None:
        raise broken
