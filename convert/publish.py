"""Send a signed-off checkpoint to the Hub: one pull request (or branch), one commit, nothing that was not judged.

The pull request is opened before the first byte is sent and remembered in `.requant-local/publish.json`, so that a
second attempt goes into the same one; without that file it is found by its title. Deleted is only what the lock that
stands in the repository lists as written by requant. The model card is merged (card.py).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Literal

from requant.convert.card import CardFacts, make_card
from requant.convert.checkpoint import read_json
from requant.convert.finished import manifest_of
from requant.convert.hub import hub_api, hub_faults
from requant.convert.pipeline import LOCK_FILE
from requant.convert.repository import (
    CARD,
    Changes,
    Compared,
    Item,
    bring_up_to_date,
    changes_to,
    head_of,
    mark_open,
    target_of,
    text_at,
    written_before,
)
from requant.convert.sinks import Uploaded
from requant.convert.uploads import read_uploaded
from requant.manifests.errors import PublishError, SourceError
from requant.manifests.schema import Manifest
from requant.manifests.schema import Publish as PublishSection
from requant.validate.hashing import judged_files
from requant.validate.signoff import load_signoff, verify_signoff
from requant.validate.verdict import SignOff

__all__ = ["Changes", "Publication", "Via", "check_ready", "publish", "publish_settings"]

Via = Literal["pull_request", "branch", "main"]
Say = Callable[[str], None]

SCANNED_BYTES: Final = 4 * 2**20
"""Text files up to this size are searched for access tokens before they are sent."""
_TOKEN: Final = re.compile(rb"\bhf_[A-Za-z0-9]{30,}\b")
_UNFINISHED: Final = (".part", ".partial", ".incomplete", ".new", ".lock", ".log")


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


def _items(output: Path, known: Mapping[str, str], uploaded: Mapping[str, Uploaded]) -> list[Item]:
    """Every file to publish but the card. known: sha256 of files just hashed. PublishError for what must not leave."""
    root = output.resolve()
    own = sorted(path.name for path in output.glob("requant.signoff.*") if path.is_file())
    items = [Item(name, shard, shard.size, shard.sha256) for name, shard in uploaded.items()]
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
        items.append(Item(name, path, path.stat().st_size, digest))
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
        target = target_of(api, output, settings, manifest.name, dry_run)
        say(f"publishing to {target.repo} ({target.revision})")
        facts = CardFacts(settings.repo, manifest, lock, signoff, unsigned, [item.name for item in items])

        def compare() -> Compared:
            head = head_of(api, target)
            card = make_card(facts, text_at(api, target, head, CARD), _source_card(output)).encode()
            whole = [*items, Item(CARD, card, len(card), hashlib.sha256(card).hexdigest())]
            return head, whole, changes_to(whole, head, written_before(api, target, head))

        head, _, changes = compare()
        if not dry_run:
            head = bring_up_to_date(api, target, manifest.name, compare)
            if target.pull:
                mark_open(api, target)
            for name in uploaded:  # hollow: nobody is to take it for a shard
                (output / name).unlink(missing_ok=True)
        url = f"{api.endpoint}/{target.repo}"
        url += f"/discussions/{target.pull}" if target.pull else f"/tree/{target.revision}"
    return Publication(target.repo, target.revision, url, "" if dry_run else head.commit, changes, dry_run)


def _source_card(output: Path) -> str | None:
    path = output / CARD
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else None
