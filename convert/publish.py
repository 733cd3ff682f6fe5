"""Send a signed-off checkpoint to the Hub: one pull request (or branch), one commit, nothing that was not judged.

    folder -> what to send, what stays, what to delete     (compare: by git or sha256 name, against the revision's head)
           -> large files first, each by itself            (an upload that broke off finds them there the next time)
           -> one commit on the head that was compared     (if the head moved: compare again)
           -> compare once more                            (a lost answer is no lost commit)

The pull request is opened before the first byte is sent and remembered in `.requant-local/publish.json`, so that a
second attempt goes into the same one; without that file it is found by its title. Deleted is only what the lock that
stands in the repository lists as written by requant. The model card is merged (card.py).
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Literal, cast

from requant.convert.card import CardFacts, make_card
from requant.convert.checkpoint import read_json
from requant.convert.finished import manifest_of
from requant.convert.hub import AGAIN, hub_api, hub_faults, network_errors, retry_after, status_of_fault
from requant.convert.pipeline import LOCK_FILE
from requant.convert.private import LOCAL_FOLDER
from requant.convert.uploads import Uploaded, read_uploaded, uploaded_operation
from requant.manifests.errors import PublishError, SourceError
from requant.manifests.schema import Manifest
from requant.manifests.schema import Publish as PublishSection
from requant.validate.hashing import judged_files
from requant.validate.signoff import load_signoff, verify_signoff
from requant.validate.verdict import SignOff

__all__ = ["Changes", "Publication", "Via", "check_ready", "publish", "publish_settings", "upload_target"]

Via = Literal["pull_request", "branch", "main"]
Say = Callable[[str], None]

CARD: Final = "README.md"
STATE_FILE: Final = f"{LOCAL_FOLDER}/publish.json"
COMMIT_TRIES: Final = 5
"""Attempts at the one commit; the library itself retries uploads and reads, but not this."""
TRANSIENT: Final = (None, 408, 409, 412, 429, 500, 502, 503, 504)
"""Answers (None: no answer) after which the revision is looked at again, and the commit sent again if it is missing."""
SCANNED_BYTES: Final = 4 * 2**20
"""Text files up to this size are searched for access tokens before they are sent."""
_TOKEN: Final = re.compile(rb"\bhf_[A-Za-z0-9]{30,}\b")
_UNFINISHED: Final = (".part", ".partial", ".incomplete", ".new", ".lock", ".log")


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
class Publication:
    """What came of it. revision: branch or refs/pr/N. commit: "" for a dry run."""

    repo: str
    revision: str
    url: str
    commit: str
    changes: Changes
    dry_run: bool

    def to_json(self) -> dict[str, Any]:
        """As json.dumps takes it."""
        return {
            "repo": self.repo,
            "revision": self.revision,
            "url": self.url,
            "commit": self.commit or None,
            "dry_run": self.dry_run,
            "sent": dict(self.changes.send),
            "unchanged": list(self.changes.keep),
            "deleted": list(self.changes.delete),
        }

    def text(self) -> str:
        """For a terminal."""
        would = "would " if self.dry_run else ""
        size = sum(self.changes.send.values())
        lines = [f"{would}send   {name} ({nbytes:,} bytes)" for name, nbytes in self.changes.send.items()]
        lines += [f"{would}delete {name}" for name in self.changes.delete]
        lines.append(
            f"{len(self.changes.send)} files, {size:,} bytes {would}go to {self.repo} ({self.revision}); "
            f"{len(self.changes.keep)} are there already"
        )
        if not self.dry_run:
            lines.append(self.url)
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class _Item:
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


# --- what may be published --------------------------------------------------------------------------------------------


def publish_settings(
    manifest: Manifest, *, repo: str | None = None, via: Via | None = None, private: bool | None = None
) -> PublishSection:
    """The manifest's section with the command line's words in it. PublishError if no repository is named."""
    section = manifest.publish
    name = repo or (section.repo if section else None)
    if name is None:
        raise PublishError(
            "no repository is named",
            where="publish.repo",
            hint="say --repo owner/name, or add publish: to the manifest",
        )
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise PublishError("is not owner/name", where=name, hint="name a repository as the Hub does")
    if name == manifest.source.repo:
        raise PublishError("is the repository of the source", where=name, hint="publish into another one")
    given: PublishSection = section or PublishSection(repo=name)
    return PublishSection(repo=name, via=via or given.via, private=given.private if private is None else private)


def check_ready() -> None:
    """PublishError unless a token is there at all: asked before hours of work, not after."""
    hub: Any = import_module("huggingface_hub")
    if hub.get_token() is None:
        raise PublishError(
            "there is no access token", where="the Hub", hint="log in with `hf auth login`, or set HF_TOKEN"
        )


def _standing(output: Path, uploaded: Mapping[str, Uploaded], force_unsigned: bool) -> tuple[SignOff | None, str]:
    """(sign-off, why it does not hold or ""). PublishError if it does not and nobody insists."""
    try:
        signoff = load_signoff(output)
        covered = {file.name: file.sha256 for file in signoff.files}
        freed = {name for name, shard in uploaded.items() if covered.get(name) == shard.sha256}
        stale = [line for line in verify_signoff(output) if line.partition(": ")[0] not in freed]
    except SourceError as error:
        signoff, stale, why = None, list[str](), error.message
    else:
        why = f"the files are not those that were judged ({stale[0]})" if stale else ""
        if not why and not signoff.signed_off:
            unmet = "; ".join(f"{gate.name} {gate.status.value}" for gate in signoff.unmet)
            why = f"required gates did not pass ({unmet})"
    if why and not force_unsigned:
        more = f", and {len(stale) - 1} more" if len(stale) > 1 else ""
        raise PublishError(
            f"is not published: {why}{more}",
            where=output.name,
            hint=f"run `requant validate {output}`; --force-unsigned publishes all the same and says so in the card",
        )
    return signoff, why


def _items(output: Path, known: Mapping[str, str], uploaded: Mapping[str, Uploaded]) -> list[_Item]:
    """Every file to publish but the card. known: sha256 of files just hashed. PublishError for what must not leave."""
    root = output.resolve()
    own = sorted(path.name for path in output.glob("requant.signoff.*") if path.is_file())
    items = [_Item(name, shard, shard.size, shard.sha256) for name, shard in uploaded.items()]
    for name in [*judged_files(output), *own]:
        if name in uploaded:
            continue
        path = output / name
        if not path.resolve().is_relative_to(root):
            raise PublishError("is a link that leads out of the folder", where=name, hint="replace it by the file")
        if name.endswith(_UNFINISHED):
            raise PublishError("looks like an unfinished file or a log", where=name, hint="remove it from the folder")
        _refuse_secrets(path, name)
        digest = known.get(name) or _sha256(path)
        items.append(_Item(name, path, path.stat().st_size, digest))
    return items


def _refuse_secrets(path: Path, name: str) -> None:
    if path.stat().st_size > SCANNED_BYTES:
        return
    data = path.read_bytes()
    hub: Any = import_module("huggingface_hub")
    token = hub.get_token()
    if _TOKEN.search(data) or (token and str(token).encode() in data):
        raise PublishError("holds an access token", where=name, hint="remove it, revoke it, and validate again")


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


# --- where it goes ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Target:
    """A revision to commit to. exists: False only in a dry run. pull: number of the pull request, or 0."""

    repo: str
    revision: str
    pull: int
    exists: bool


def upload_target(settings: PublishSection, name: str) -> Callable[[Path], tuple[str, str]]:
    """For an upload that begins before the output is finished: folder -> (repository, revision), made if need be."""

    def opened(partial: Path) -> tuple[str, str]:
        with hub_faults(settings.repo, "the upload", publishing=True):
            target = _target(hub_api(), partial, settings, name, dry_run=False)
        return target.repo, target.revision

    return opened


def _state(output: Path) -> dict[str, Any]:
    try:
        found: object = json.loads((output / STATE_FILE).read_text())
    except (OSError, ValueError):
        return {}
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}


def _remember(output: Path, target: _Target) -> None:
    path = output / STATE_FILE
    path.parent.mkdir(mode=0o700, exist_ok=True)
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps({"repo": target.repo, "revision": target.revision, "pull": target.pull}))
    temporary.replace(path)


def _target(api: Any, output: Path, settings: PublishSection, name: str, dry_run: bool) -> _Target:
    """The revision to write to, made if need be: the one of the attempt before, if it is still open."""
    exists = bool(api.repo_exists(settings.repo))
    if not exists:
        if dry_run:
            return _Target(settings.repo, "main", 0, exists=False)
        api.create_repo(settings.repo, private=settings.private, exist_ok=True)
    if settings.via == "main":
        return _Target(settings.repo, "main", 0, exists=True)
    if settings.via == "branch":
        branch = f"requant-{name}"
        if not dry_run:
            api.create_branch(settings.repo, branch=branch, exist_ok=True)
        known = {ref.name for ref in api.list_repo_refs(settings.repo).branches}
        return _Target(settings.repo, branch if branch in known else "main", 0, exists=True)
    title = f"requant: {name}"
    number = _open_pull(api, settings.repo, _state(output), title)
    if number is None:
        if dry_run:
            return _Target(settings.repo, "main", 0, exists=True)
        number = int(api.create_pull_request(settings.repo, title=title, description=_DESCRIPTION).num)
    target = _Target(settings.repo, f"refs/pr/{number}", number, exists=True)
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
class _Head:
    """A revision as it stands: its commit, and per file sha256 (large files) or git's name of its content."""

    commit: str
    files: Mapping[str, str]


def _head(api: Any, target: _Target) -> _Head:
    if not target.exists:
        return _Head("", {})
    commit = str(api.repo_info(target.repo, revision=target.revision).sha)
    tree = api.list_repo_tree(target.repo, revision=commit, recursive=True)
    files = {str(f.path): str(f.lfs.sha256 if f.lfs else f.blob_id) for f in tree if hasattr(f, "blob_id")}
    return _Head(commit, files)


def _is_there(item: _Item, head: _Head) -> bool:
    known = head.files.get(item.name)
    if known is None:
        return False
    return known == (item.sha256 if len(known) == 64 else item.git_oid())


def _changes(items: Sequence[_Item], head: _Head, written_before: Sequence[str]) -> Changes:
    wanted = {item.name for item in items}
    send = {item.name: item.size for item in items if not _is_there(item, head)}
    delete = sorted(n for n in set(written_before) - wanted if n in head.files and n not in (CARD, ".gitattributes"))
    return Changes(send, tuple(sorted(wanted - send.keys())), tuple(delete))


def _text_at(api: Any, target: _Target, head: _Head, name: str) -> str | None:
    """A small text file of the revision, or None if it has none."""
    if name not in head.files:
        return None
    path = api.hf_hub_download(target.repo, name, revision=head.commit)
    return Path(path).read_text(encoding="utf-8", errors="replace")


def _written_before(api: Any, target: _Target, head: _Head) -> list[str]:
    """The files that the lock in the repository lists as written by requant."""
    text = _text_at(api, target, head, LOCK_FILE)
    try:
        outputs: object = json.loads(text or "{}").get("outputs", [])
    except (ValueError, AttributeError):
        return []  # not a lock of ours: then nothing there is ours to delete
    return [n for n in cast("list[object]", outputs) if isinstance(n, str)] if isinstance(outputs, list) else []


# --- sending ----------------------------------------------------------------------------------------------------------


def publish(
    output: Path,
    settings: PublishSection,
    *,
    dry_run: bool = False,
    force_unsigned: bool = False,
    say: Say = lambda _: None,
) -> Publication:
    """Publish the finished folder `output`. say: called with a line about each step.

    PublishError if the sign-off does not cover the files, if a file must not leave, or if the Hub refuses; running the
    same command again goes on where it stopped.
    """
    uploaded = read_uploaded(output)
    signoff, unsigned = _standing(output, uploaded, force_unsigned)
    lock = read_json(output / LOCK_FILE, LOCK_FILE)
    manifest = manifest_of(output)
    known = {file.name: file.sha256 for file in signoff.files} if signoff and not unsigned else {}
    items = _items(output, known, uploaded)
    check_ready()
    api = hub_api()
    with hub_faults(settings.repo, "the upload", publishing=True):
        target = _target(api, output, settings, manifest.name, dry_run)
        say(f"publishing to {target.repo} ({target.revision})")
        facts = CardFacts(settings.repo, manifest, lock, signoff, unsigned, [item.name for item in items])

        def compare() -> tuple[_Head, list[_Item], Changes]:
            head = _head(api, target)
            card = make_card(facts, _text_at(api, target, head, CARD), _source_card(output)).encode()
            whole = [*items, _Item(CARD, card, len(card), hashlib.sha256(card).hexdigest())]
            return head, whole, _changes(whole, head, _written_before(api, target, head))

        head, _, changes = compare()
        if not dry_run:
            head = _bring_up_to_date(api, target, manifest.name, compare)
            if target.pull:
                _mark_open(api, target)
            for name in uploaded:  # hollow: nobody is to take it for a shard
                (output / name).unlink(missing_ok=True)
        url = f"{api.endpoint}/{target.repo}"
        url += f"/discussions/{target.pull}" if target.pull else f"/tree/{target.revision}"
    return Publication(target.repo, target.revision, url, "" if dry_run else head.commit, changes, dry_run)


def _source_card(output: Path) -> str | None:
    path = output / CARD
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else None


Compare = Callable[[], tuple[_Head, list[_Item], Changes]]


def _bring_up_to_date(api: Any, target: _Target, name: str, compare: Compare) -> _Head:
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


def _send(api: Any, target: _Target, head: _Head, items: Sequence[_Item], changes: Changes, name: str) -> None:
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


def _operation(hub: Any, item: _Item) -> Any:
    if isinstance(item.content, Uploaded):
        return uploaded_operation(item.name, item.content)
    return hub.CommitOperationAdd(item.name, item.content if isinstance(item.content, bytes) else str(item.content))


def _verify(api: Any, target: _Target, items: Sequence[_Item]) -> _Head:
    """The new head, which must hold every file as it was sent."""
    head = _head(api, target)
    wrong = [item.name for item in items if not _is_there(item, head)]
    if wrong:
        raise PublishError(
            f"does not hold what was sent: {', '.join(wrong[:5])}", where=f"{target.repo} {target.revision}", hint=AGAIN
        )
    return head


def _mark_open(api: Any, target: _Target) -> None:
    """A pull request made through the API is a draft; it becomes one to review when everything is in it."""
    if api.get_discussion_details(target.repo, target.pull).status == "draft":
        api.change_discussion_status(target.repo, target.pull, "open")
