"""Object stores as fsspec reaches them: list, read a range, write an object, and their faults in our words.

`s3://`, `gs://` and whatever else fsspec knows; credentials, endpoints and proxies come from where each store's own
library finds them (AWS_*, GOOGLE_APPLICATION_CREDENTIALS, FSSPEC_*), and never pass through here. Whatever a library
says about a failed request goes through `redact` before anyone reads it.

An object of a store becomes visible when its upload is complete, and not before: that is what "under its final name"
means here. Stores that show half-written files (sftp, smb) get a name of their own first and a rename.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from requant.convert.hub import fault_chain
from requant.convert.private import redact
from requant.convert.remote import FILE_LIMIT, RemoteFile, check_name
from requant.manifests.errors import EnvironmentFault, IncompleteError, RequantError, SourceError

__all__ = ["RECORDS", "Store"]

RECORDS: Final = ".requant/"
"""Objects that belong to a run and not to the checkpoint."""
READ_BYTES: Final = 16 * 2**20
"""Of one ranged read: eight of them are in memory at a time."""
PART_BYTES: Final = 16 * 2**20
"""Of one part of a multipart upload: 10,000 parts (S3's limit) are 160 GB, and PARTS_AT_ONCE of them are in memory."""
PARTS_AT_ONCE: Final = 4
TRIES: Final = 5
"""Attempts at a request, each after the library's own, with waits of 1, 2, 4 and 8 s."""
WHOLE_OR_NOTHING: Final = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oss", "oci", "memory"})
"""Stores in which an object appears at once."""
_S3: Final = ("s3", "s3a")
_VERSION_KEYS: Final = ("ETag", "etag", "generation", "md5Hash", "LastModified", "last_modified", "mtime", "created")
_LIBRARIES: Final = ("botocore", "aiobotocore", "aiohttp", "s3fs", "gcsfs", "google", "fsspec", "requests", "azure")
"""Packages whose exceptions speak of the store; others are bugs."""

T = TypeVar("T")


@cache
def _filesystem(scheme: str) -> Any:
    """fsspec's file system; EnvironmentFault where a package is missing."""
    hint = "pip install 'requant[objects]' (s3://, gs://), or the package that fsspec names"
    try:
        fsspec: Any = import_module("fsspec")
        return fsspec.filesystem(scheme, skip_instance_cache=True, use_listings_cache=False)
    except ImportError as error:
        what = str(error).partition("\n")[0] or "a package is missing"
        raise EnvironmentFault(f"cannot be reached: {what}", where=f"{scheme}://", hint=hint) from None
    except ValueError as error:
        raise EnvironmentFault(f"no such store: {redact(str(error))}", where=f"{scheme}://", hint=hint) from None


@dataclass(frozen=True, slots=True)
class Store:
    """A prefix of an object store. writing: it is our output, and its faults are not those of a source."""

    url: str
    writing: bool = False

    @property
    def scheme(self) -> str:
        """s3, gs, ..."""
        return self.url.partition("://")[0].lower()

    def _path(self, name: str = "") -> str:
        return f"{self.url}/{name}" if name else self.url

    def listing(self) -> dict[str, RemoteFile]:
        """All objects below the prefix, by name. SourceError for names that lead elsewhere."""

        def listed() -> Mapping[str, Mapping[str, Any]]:
            fs = _filesystem(self.scheme)
            fs.invalidate_cache()
            return cast("Mapping[str, Mapping[str, Any]]", fs.find(self.url, detail=True))

        raw = self._try("listing", listed)
        root = str(_filesystem(self.scheme)._strip_protocol(self.url)).rstrip("/") + "/"
        found: dict[str, RemoteFile] = {}
        for path, info in raw.items():
            name = path.removeprefix(root)
            if name == path or name.endswith("/"):
                continue  # the prefix itself, or an empty "folder" that a console made
            check_name(self.url, name)
            size = int(info.get("size") or 0)
            if not 0 <= size <= FILE_LIMIT:
                raise SourceError(f"says that {name} has {size:,} bytes", where=self.url, hint="do not use it")
            found[name] = RemoteFile(name, size, None, _version(info))
        return found

    def read(self, name: str, begin: int, end: int, write: Callable[[bytes, int], object]) -> None:
        """Bytes begin..end of an object, handed to write(data, offset). SourceError if it ends before."""
        fs = _filesystem(self.scheme)
        for at in range(begin, end, READ_BYTES):
            until = min(at + READ_BYTES, end)
            data = self._try(f"reading {name}", lambda a=at, u=until: fs.cat_file(self._path(name), start=a, end=u))
            if len(data) != until - at:
                raise SourceError(
                    f"ends at byte {at + len(data):,}, {until - at - len(data):,} bytes short",
                    where=f"{self.url}/{name}",
                    hint="the object changed while it was read: plan again",
                )
            write(data, at)

    def stat(self, name: str) -> RemoteFile | None:
        """One object as the listing has it, or None if there is none."""
        fs = _filesystem(self.scheme)

        def asked() -> Mapping[str, Any] | None:
            try:
                fs.invalidate_cache()
                return cast("Mapping[str, Any]", fs.info(self._path(name)))
            except FileNotFoundError:
                return None

        info = self._try(f"looking at {name}", asked)
        return None if info is None else RemoteFile(name, int(info.get("size") or 0), None, _version(info))

    def text(self, name: str) -> bytes | None:
        """A small object whole, or None if there is none."""
        fs = _filesystem(self.scheme)

        def asked() -> bytes | None:
            try:
                return cast("bytes", fs.cat_file(self._path(name)))
            except FileNotFoundError:
                return None

        return self._try(f"reading {name}", asked)

    def put(self, name: str, content: Path | bytes) -> None:
        """Write an object; it is visible when it is whole. A file of some size goes in parts."""
        fs = _filesystem(self.scheme)
        whole = self.scheme in WHOLE_OR_NOTHING
        path = self._path(name) if whole else self._path(f"{RECORDS}{name.replace('/', '_')}.part")
        parts = {"chunksize": PART_BYTES, "max_concurrency": PARTS_AT_ONCE} if self.scheme in _S3 else {}

        def sent() -> None:
            if not whole:
                fs.makedirs(fs._parent(path), exist_ok=True)
                fs.makedirs(fs._parent(self._path(name)), exist_ok=True)
            if isinstance(content, bytes):
                fs.pipe_file(path, content)
            else:
                fs.put_file(str(content), path, **parts)
            if not whole:
                fs.mv(path, self._path(name))

        self._try(f"writing {name}", sent)

    def delete(self, names: Iterable[str]) -> None:
        """Remove objects; one that is gone already is no fault."""
        fs = _filesystem(self.scheme)
        for name in names:

            def gone(name: str = name) -> None:
                try:
                    fs.rm_file(self._path(name))
                except FileNotFoundError:
                    return

            self._try(f"deleting {name}", gone)

    def abort_uploads(self, names: Iterable[str]) -> int:
        """End multipart uploads of these objects that a killed run left: invisible, and paid for. How many there were.

        Only S3 shows them; other stores forget them by themselves.
        """
        if self.scheme not in _S3:
            return 0
        fs = _filesystem(self.scheme)
        bucket, prefix, _ = fs.split_path(self.url)
        wanted = {f"{prefix}/{name}" for name in names}

        def listed() -> list[Mapping[str, str]]:
            said = cast("dict[str, Any]", fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=f"{prefix}/"))
            return cast("list[Mapping[str, str]]", said.get("Uploads") or [])

        stale = [entry for entry in self._try("listing uploads", listed) if entry["Key"] in wanted]
        for entry in stale:
            args = {"Bucket": bucket, "Key": entry["Key"], "UploadId": entry["UploadId"]}

            def aborted(args: dict[str, str] = args) -> None:
                try:
                    fs.call_s3("abort_multipart_upload", **args)
                except FileNotFoundError:
                    return

            self._try("ending an upload", aborted)
        return len(stale)

    def _try(self, doing: str, action: Callable[[], T]) -> T:
        """The result of `action`, tried again while the fault may pass."""
        for attempt in range(TRIES):
            with self._faults(doing, last=attempt == TRIES - 1):
                return action()
            time.sleep(2**attempt)
        raise AssertionError  # the last attempt returned or raised

    @contextmanager
    def _faults(self, doing: str, *, last: bool) -> Generator[None]:
        """Swallow a fault that may pass, unless it is the last attempt; others become errors of ours."""
        try:
            yield
        except RequantError:
            raise
        except Exception as error:
            chain = fault_chain(error)
            if not any(_of_the_store(step) for step in chain):
                raise
            fault = self._lasting(chain, doing)
            if fault is None and last:
                kind = IncompleteError if self.writing else EnvironmentFault
                said = redact(str(error) or type(error).__name__).partition("\n")[0]
                fault = kind(
                    f"{doing} failed {TRIES} times: {said}",
                    where=self.url,
                    hint="run the same command again: it goes on where it stopped",
                )
            if fault is not None:
                raise fault from None  # the chain holds requests, and these hold signatures

    def _lasting(self, chain: Sequence[BaseException], doing: str) -> RequantError | None:
        """The error that waiting does not mend, or None."""
        kind = EnvironmentFault if self.writing else SourceError
        names = {type(step).__name__ for step in chain}
        said = redact(str(chain[0])).partition("\n")[0]
        if names & {"NoCredentialsError", "PartialCredentialsError", "TokenRetrievalError", "DefaultCredentialsError"}:
            return kind(
                "no credentials for the store",
                where=self.url,
                hint="set them as its own tools take them (AWS_PROFILE or AWS_ACCESS_KEY_ID ..., gcloud auth)",
            )
        if any(isinstance(step, PermissionError) for step in chain):
            return kind(
                f"{doing} is refused: {said}",
                where=self.url,
                hint="the credentials must be valid and allowed to list, read and write there",
            )
        if any(isinstance(step, FileNotFoundError) for step in chain):
            what = "the bucket" if "bucket" in said.lower() else "it"
            return kind(
                f"{doing}: {what} is not there", where=self.url, hint="check the address; nothing is made there"
            )
        return None


def _version(info: Mapping[str, Any]) -> str:
    """What a store changes whenever it changes an object."""
    found = next((info[key] for key in _VERSION_KEYS if info.get(key)), "")
    return str(found.timestamp() if isinstance(found, datetime) else found)


def _of_the_store(error: BaseException) -> bool:
    return isinstance(error, OSError) or type(error).__module__.partition(".")[0] in _LIBRARIES
