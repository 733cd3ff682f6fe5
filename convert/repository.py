"""One revision of a repository on the Hub: where it is, how it stands, and how it is brought up to date.

- `target_of`: a branch, or our open pull request: remembered, found by its title, or opened.
- `head_of`: its commit, and what each of its files is, by git's name or sha256.
- `changes_to`: what it lacks, what it has, what of ours is to go.
- `bring_up_to_date`: large files one by one, then one commit on the head that was compared; if the answer is lost or
  the head moved, compare again; at the end every file must be there.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final, cast

from requant.convert.hub import AGAIN, hub_api, hub_faults, network_errors, retry_after, status_of_fault
from requant.convert.pipeline import LOCK_FILE
from requant.convert.private import LOCAL_FOLDER
from requant.convert.sinks import HubSink, Uploaded
from requant.convert.uploads import uploaded_operation
from requant.manifests.errors import PublishError
from requant.manifests.schema import Publish as PublishSection

__all__ = [
    "CARD",
    "Changes",
    "Compared",
    "Head",
    "Item",
    "Target",
    "bring_up_to_date",
    "changes_to",
    "head_of",
    "mark_open",
    "target_of",
    "text_at",
    "upload_target",
    "written_before",
]

CARD: Final = "README.md"
STATE_FILE: Final = f"{LOCAL_FOLDER}/publish.json"
COMMIT_TRIES: Final = 5
"""Attempts at the one commit; the library itself retries uploads and reads, but not this."""
TRANSIENT: Final = (None, 408, 409, 412, 429, 500, 502, 503, 504)
"""Answers (None: no answer) after which the revision is looked at again, and the commit sent again if it is missing."""


@dataclass(frozen=True, slots=True)
class Changes:
    """What a revision lacks. send: file -> bytes; keep: files equal there; delete: ours of old, not made any more."""

    send: Mapping[str, int]
    keep: tuple[str, ...]
    delete: tuple[str, ...]

    @property
    def none(self) -> bool:
        """The revision is as it should be."""
        return not self.send and not self.delete


@dataclass(frozen=True, slots=True)
class Item:
    """A file to have in the repository: its content, size and both names by which the Hub knows content."""

    name: str
    content: Path | bytes | Uploaded
    size: int
    sha256: str

    def git_oid(self) -> str:
        """git's name of a file that is no large one."""
        if isinstance(self.content, Uploaded):
            return ""
        data = self.content if isinstance(self.content, bytes) else self.content.read_bytes()
        return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


# --- where it goes ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Target:
    """A revision to commit to. exists: False only in a dry run. pull: number of the pull request, or 0."""

    repo: str
    revision: str
    pull: int
    exists: bool


def upload_target(settings: PublishSection, name: str) -> Callable[[Path], HubSink]:
    """For an upload that begins before the output is finished: folder -> its revision, made if need be."""

    def opened(partial: Path) -> HubSink:
        with hub_faults(settings.repo, "the upload", publishing=True):
            target = target_of(hub_api(), partial, settings, name, dry_run=False)
        return HubSink(target.repo, target.revision)

    return opened


def _state(output: Path) -> dict[str, Any]:
    try:
        found: object = json.loads((output / STATE_FILE).read_text())
    except (OSError, ValueError):
        return {}
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}


def _remember(output: Path, target: Target) -> None:
    path = output / STATE_FILE
    path.parent.mkdir(mode=0o700, exist_ok=True)
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps({"repo": target.repo, "revision": target.revision, "pull": target.pull}))
    temporary.replace(path)


def target_of(api: Any, output: Path, settings: PublishSection, name: str, dry_run: bool) -> Target:
    """The revision to write to, made if need be: the one of the attempt before, if it is still open."""
    exists = bool(api.repo_exists(settings.repo))
    if not exists:
        if dry_run:
            return Target(settings.repo, "main", 0, exists=False)
        api.create_repo(settings.repo, private=settings.private, exist_ok=True)
    if settings.via == "main":
        return Target(settings.repo, "main", 0, exists=True)
    if settings.via == "branch":
        branch = f"requant-{name}"
        if not dry_run:
            api.create_branch(settings.repo, branch=branch, exist_ok=True)
        known = {ref.name for ref in api.list_repo_refs(settings.repo).branches}
        return Target(settings.repo, branch if branch in known else "main", 0, exists=True)
    title = f"requant: {name}"
    number = _open_pull(api, settings.repo, _state(output), title)
    if number is None:
        if dry_run:
            return Target(settings.repo, "main", 0, exists=True)
        number = int(api.create_pull_request(settings.repo, title=title, description=_DESCRIPTION).num)
    target = Target(settings.repo, f"refs/pr/{number}", number, exists=True)
    if not dry_run:
        _remember(output, target)
    return target


_DESCRIPTION: Final = "A converted checkpoint with its sign-off. The files arrive in one commit when all are uploaded."


def _open_pull(api: Any, repo: str, state: Mapping[str, Any], title: str) -> int | None:
    """Number of our pull request that is neither merged nor closed, remembered or found by its title."""
    me = str(api.whoami()["name"])
    open_ones = {
        int(pull.num): str(pull.title)
        for pull in api.get_repo_discussions(repo, author=me, discussion_type="pull_request", discussion_status="open")
        if pull.is_pull_request and pull.status in ("open", "draft")
    }
    if state.get("repo") == repo and state.get("pull") in open_ones:
        return int(state["pull"])
    return next((number for number, found in sorted(open_ones.items()) if found == title), None)


# --- comparing --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Head:
    """A revision as it stands: its commit, and per file sha256 (large files) or git's name of its content."""

    commit: str
    files: Mapping[str, str]


def head_of(api: Any, target: Target) -> Head:
    if not target.exists:
        return Head("", {})
    commit = str(api.repo_info(target.repo, revision=target.revision).sha)
    tree = api.list_repo_tree(target.repo, revision=commit, recursive=True)
    files = {str(f.path): str(f.lfs.sha256 if f.lfs else f.blob_id) for f in tree if hasattr(f, "blob_id")}
    return Head(commit, files)


def _is_there(item: Item, head: Head) -> bool:
    known = head.files.get(item.name)
    if known is None:
        return False
    return known == (item.sha256 if len(known) == 64 else item.git_oid())


def changes_to(items: Sequence[Item], head: Head, written_before: Sequence[str]) -> Changes:
    wanted = {item.name for item in items}
    send = {item.name: item.size for item in items if not _is_there(item, head)}
    delete = sorted(n for n in set(written_before) - wanted if n in head.files and n not in (CARD, ".gitattributes"))
    return Changes(send, tuple(sorted(wanted - send.keys())), tuple(delete))


def text_at(api: Any, target: Target, head: Head, name: str) -> str | None:
    """A small text file of the revision, or None if it has none."""
    if name not in head.files:
        return None
    path = api.hf_hub_download(target.repo, name, revision=head.commit)
    return Path(path).read_text(encoding="utf-8", errors="replace")


def written_before(api: Any, target: Target, head: Head) -> list[str]:
    """The files that the lock in the repository lists as written by requant."""
    text = text_at(api, target, head, LOCK_FILE)
    try:
        outputs: object = json.loads(text or "{}").get("outputs", [])
    except (ValueError, AttributeError):
        return []  # not a lock of ours: then nothing there is ours to delete
    return [n for n in cast("list[object]", outputs) if isinstance(n, str)] if isinstance(outputs, list) else []


# --- sending ------------------------------------------------------------------------------------------------------


Compared = tuple[Head, list[Item], Changes]


def bring_up_to_date(api: Any, target: Target, name: str, compare: Callable[[], Compared]) -> Head:
    """Upload and commit until the revision holds everything; its head. The head is read anew before each attempt."""
    for left in range(COMMIT_TRIES - 1, -1, -1):
        head, items, changes = compare()
        if changes.none:
            return head
        try:
            _send(api, target, head, items, changes, name)
        except network_errors() as error:
            if not left or status_of_fault(error) not in TRANSIENT:
                raise
            time.sleep(retry_after(error) or 2 ** (COMMIT_TRIES - left - 1))
        else:
            return _verify(api, target, items)
    raise AssertionError  # the last attempt returned or raised


def _send(api: Any, target: Target, head: Head, items: Sequence[Item], changes: Changes, name: str) -> None:
    """Upload what is missing and commit it on `head`."""
    hub: Any = import_module("huggingface_hub")
    adds = [_operation(hub, item) for item in items if item.name in changes.send]
    for add in adds:  # one at a time: what is up stays up, whatever happens to the next
        api.preupload_lfs_files(target.repo, [add], revision=target.revision, free_memory=False)
    api.create_commit(
        target.repo,
        operations=[*adds, *(hub.CommitOperationDelete(old) for old in changes.delete)],
        commit_message=f"requant: {name}",
        revision=target.revision,
        parent_commit=head.commit,
    )


def _operation(hub: Any, item: Item) -> Any:
    if isinstance(item.content, Uploaded):
        return uploaded_operation(item.name, item.content)
    return hub.CommitOperationAdd(item.name, item.content if isinstance(item.content, bytes) else str(item.content))


def _verify(api: Any, target: Target, items: Sequence[Item]) -> Head:
    """The new head, which must hold every file as it was sent."""
    head = head_of(api, target)
    wrong = [item.name for item in items if not _is_there(item, head)]
    if wrong:
        raise PublishError(
            f"does not hold what was sent: {', '.join(wrong[:5])}", where=f"{target.repo} {target.revision}", hint=AGAIN
        )
    return head


def mark_open(api: Any, target: Target) -> None:
    """A pull request made through the API is a draft; it becomes one to review when everything is in it."""
    if api.get_discussion_details(target.repo, target.pull).status == "draft":
        api.change_discussion_status(target.repo, target.pull, "open")
