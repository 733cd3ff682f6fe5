"""The API of the Hub of hub_server.py: repositories, trees, commits, branches and pull requests."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import urllib.parse
from collections.abc import Callable
from typing import Any

from hub_files import Files
from hub_state import LARGE, USER, Entry, PullRequest, Repo, git_oid, now


class Handler(Files):
    """The routes, and the API of repositories, commits and pull requests."""

    def _dispatch(self) -> None:
        un = urllib.parse.unquote
        path = self.route
        if path == "/api/whoami-v2":
            return self._whoami()
        if path == "/api/validate-yaml":
            return self.reply(200, {"errors": [], "warnings": []})
        if path == "/api/repos/create":
            return self._create()
        if found := re.fullmatch(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", path):
            return self._lfs_batch(found[1])
        if found := re.fullmatch(r"/lfs/(put|part|complete|verify)/([0-9a-f]*)(?:/(\d+))?", path):
            return self._lfs(found[1], found[2], found[3])
        if found := re.fullmatch(r"/cdn/([^/]+/[^/]+)/([0-9a-f]{40})/(.+)", path):
            repo = self.hub.repos[found[1]]
            return self._send_file(repo, found[2], un(found[3]), {})
        if found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            return self._resolve(found[1], un(found[2]), un(found[3]))
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/([^/]+))?(?:/(.*))?", path):
            return self._api(un(found[1]), found[2] or "", found[3] or "")
        return self.error(404, "", f"unknown route {path}")

    def _whoami(self) -> None:
        if self.user is None:
            return self.error(401, "", "Invalid credentials in Authorization header")
        role = "write" if self.user == USER else "read"
        auth = {"type": "access_token", "accessToken": {"role": role, "displayName": "t"}}
        return self.reply(200, {"type": "user", "id": "1", "name": self.user, "orgs": [], "auth": auth})

    def _create(self) -> None:
        asked = json.loads(self.body())
        if not self.may_write():
            return None
        name = f"{asked.get('organization') or USER}/{asked['name']}"
        url = f"{self.hub.url}/{name}"
        with self.hub.lock:
            if name in self.hub.repos:
                note = "You already created this model repo"
                return self.reply(409, {"error": note, "url": url}, X_Error_Message=note)
            private = asked.get("private") or asked.get("visibility") == "private"
            self.hub.new_repo(name, private=bool(private))
        return self.reply(200, {"url": url, "name": name, "id": name})

    # LFS

    def _api(self, name: str, verb: str, rest: str) -> None:
        repo = self.visible(name)
        if repo is None:
            return None
        first, _, tail = rest.partition("/")
        revision, un = urllib.parse.unquote(first) or "main", urllib.parse.unquote
        routes: dict[tuple[str, str], Callable[[], None]] = {
            ("GET", ""): lambda: self._info(name, repo, "main"),
            ("GET", "revision"): lambda: self._info(name, repo, revision),
            ("GET", "tree"): lambda: self._tree(repo, revision, un(tail)),
            ("POST", "paths-info"): lambda: self._paths_info(repo, revision),
            ("GET", "refs"): lambda: self._refs(repo),
            ("GET", "commits"): lambda: self._commits(repo, revision),
            ("POST", "preupload"): lambda: self._preupload(repo, revision),
            ("POST", "commit"): lambda: self._commit(name, repo, revision),
            ("POST", "branch"): lambda: self._branch(repo, revision),
            ("GET", "discussions"): lambda: self._discussions(name, repo, rest),
            ("POST", "discussions"): lambda: self._discuss(name, repo, first, tail),
            ("GET", "xet-write-token"): self._xet_token,
            ("GET", "xet-read-token"): self._xet_token,
        }
        route = routes.get((self.command if self.command != "HEAD" else "GET", verb))
        return route() if route else self.error(404, "", f"unknown route {self.command} {self.route}")

    def _entry_json(self, path: str, entry: Entry) -> dict[str, Any]:
        found: dict[str, Any] = {"type": "file", "oid": entry.oid, "size": entry.size, "path": path}
        if entry.lfs:
            found["lfs"] = {"oid": entry.lfs, "size": entry.size, "pointerSize": 130}
        if entry.xet:
            found["xetHash"] = entry.xet
        return found

    def _info(self, name: str, repo: Repo, revision: str) -> None:
        oid = self.commit_of(repo, revision)
        if oid is None:
            return None
        siblings: list[dict[str, Any]] = []
        for path, entry in sorted(repo.commits[oid].tree.items()):
            sibling: dict[str, Any] = {"rfilename": path}
            if "blobs" in self.query:
                sibling |= {"size": entry.size, "blobId": entry.oid}
                if entry.lfs:
                    sibling["lfs"] = {"sha256": entry.lfs, "size": entry.size, "pointerSize": 130}
            siblings.append(sibling)
        facts = {
            "_id": "0",
            "id": name,
            "modelId": name,
            "author": name.split("/", maxsplit=1)[0],
            "sha": oid,
            "tags": [],
        }
        facts |= {"private": repo.private, "gated": "auto" if repo.gated else False, "disabled": False}
        date = repo.commits[oid].date
        return self.reply(200, {**facts, "lastModified": date, "createdAt": date, "siblings": siblings})

    def _tree(self, repo: Repo, revision: str, folder: str) -> None:
        oid = self.commit_of(repo, revision)
        if oid is None:
            return None
        recursive = self.query.get("recursive", ["false"])[0].lower() in ("true", "1")
        found: dict[str, dict[str, Any]] = {}
        for path, entry in sorted(repo.commits[oid].tree.items()):
            if folder and not path.startswith(folder + "/"):
                continue
            parts = path[len(folder) + 1 if folder else 0 :].split("/")
            for depth in range(1, len(parts)):
                if depth == 1 or recursive:
                    name = "/".join(([folder] if folder else []) + parts[:depth])
                    found.setdefault(name, self._folder_json(name))
            if recursive or len(parts) == 1:
                found[path] = self._entry_json(path, entry)
        if folder and not found:
            return self.error(404, "EntryNotFound", f"{folder} does not exist")
        return self.reply(200, list(found.values()))

    def _folder_json(self, name: str) -> dict[str, Any]:
        return {"type": "directory", "oid": hashlib.sha1(name.encode()).hexdigest(), "size": 0, "path": name}

    def _paths_info(self, repo: Repo, revision: str) -> None:
        raw = self.body()
        oid = self.commit_of(repo, revision)
        if oid is None:
            return None
        asked = json.loads(raw) if raw[:1] == b"{" else urllib.parse.parse_qs(raw.decode())
        tree, found = repo.commits[oid].tree, []
        for path in asked.get("paths", []):
            if path in tree:
                found.append(self._entry_json(path, tree[path]))
            elif any(name.startswith(path + "/") for name in tree):
                found.append(self._folder_json(path))
        return self.reply(200, found)

    def _refs(self, repo: Repo) -> None:
        def listed(pulls: bool) -> list[dict[str, str]]:
            refs = {n: oid for n, oid in repo.refs.items() if n.startswith("refs/pr/") is pulls}
            return [
                {"name": n, "ref": n if pulls else f"refs/heads/{n}", "targetCommit": oid} for n, oid in refs.items()
            ]

        return self.reply(200, {"branches": listed(False), "pullRequests": listed(True), "tags": [], "converts": []})

    def _commits(self, repo: Repo, revision: str) -> None:
        oid, found = self.commit_of(repo, revision), []
        while oid:
            commit = repo.commits[oid]
            found.append({"id": oid, "title": commit.title, "message": "", "authors": [], "date": commit.date})
            oid = commit.parent
        return self.reply(200, found) if found else None

    # changes

    def _branch(self, repo: Repo, name: str) -> None:
        asked = json.loads(self.body() or b"{}")
        if not self.may_write():
            return None
        with self.hub.lock:
            if name in repo.refs:
                return self.error(409, "", "Reference already exists")
            start = self.commit_of(repo, asked.get("startingPoint") or "main")
            if start is None:
                return None
            repo.refs[name] = start
        return self.reply(201, {})

    def _preupload(self, repo: Repo, revision: str) -> None:
        asked = json.loads(self.body())
        if not self.may_write():
            return None
        oid = self.commit_of(repo, revision)
        if oid is None:
            return None
        answers: list[dict[str, Any]] = []
        for item in asked["files"]:
            large = item["size"] > 10 * 2**20 or LARGE.search(item["path"]) or b"\0" in base64.b64decode(item["sample"])
            answer = {"path": item["path"], "uploadMode": "lfs" if large else "regular", "shouldIgnore": False}
            if entry := repo.commits[oid].tree.get(item["path"]):
                answer["oid"] = entry.lfs or entry.oid
            answers.append(answer)
        return self.reply(200, {"files": answers})

    def _commit(self, name: str, repo: Repo, revision: str) -> None:
        lines = [json.loads(line) for line in self.body().splitlines() if line.strip()]
        if not self.may_write():
            return None
        head = lines[0]["value"]
        with self.hub.lock:
            current = repo.refs.get(revision)
            if current is None:
                return self.error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            if head.get("parentCommit") and not current.startswith(head["parentCommit"]):
                return self.error(412, "", "A commit has happened since. Please refresh and try again.")
            tree = dict(repo.commits[current].tree)
            for line in lines[1:]:
                if not self._apply(tree, line["key"], line["value"]):
                    return None
            oid = self.hub.commit(repo, revision, tree, head["summary"])
        answer = {"success": True, "commitOid": oid, "commitUrl": f"{self.hub.url}/{name}/commit/{oid}"}
        return self.reply(200, {**answer, "hookOutput": ""})

    def _apply(self, tree: dict[str, Entry], kind: str, value: dict[str, Any]) -> bool:
        """One operation of a commit; False once the refusal is sent."""
        path = value["path"]
        if kind == "file":
            data = base64.b64decode(value["content"])
            oid = git_oid(data)
            self.hub.blobs[oid] = data
            tree[path] = Entry(oid, len(data))
        elif kind == "lfsFile":
            stored, xet = self.hub.lfs_path(value["oid"]), self.hub.xet_of(value["oid"])
            if not stored.exists() and xet is None:
                self.error(400, "", "LFS pointer pointed to a file that does not exist")
                return False
            size = stored.stat().st_size if stored.exists() else xet[1]
            tree[path] = self.hub.large_entry(value["oid"], size, xet[0] if xet else None)
        elif kind == "deletedFile":
            if path not in tree:
                self.error(404, "EntryNotFound", "A file with this name doesn't exist")
                return False
            del tree[path]
        return True

    # pull requests

    def _pull_json(self, name: str, pull: PullRequest) -> dict[str, Any]:
        facts = {"num": pull.num, "title": pull.title, "author": {"name": USER}, "status": pull.status}
        facts |= {"repo": {"name": name, "type": "model"}, "isPullRequest": True, "createdAt": pull.created}
        return facts

    def _discussions(self, name: str, repo: Repo, number: str) -> None:
        if number:
            pull = repo.pulls.get(int(number))
            if pull is None:
                return self.error(404, "", "no such discussion")
            event = {"id": "0", "type": "comment", "createdAt": pull.created, "author": {"name": USER}}
            data = {"latest": {"raw": pull.description, "html": "", "updatedAt": pull.created}, "edited": False}
            more = {"changes": {"base": "refs/heads/main"}, "filesWithConflicts": [], "diff": ""}
            data |= {"hidden": False, "history": []}
            return self.reply(200, {**self._pull_json(name, pull), **more, "events": [{**event, "data": data}]})
        asked = self.query.get("status", [""])[0]
        shown = [p for p in repo.pulls.values() if asked != "open" or p.status in ("open", "draft")]
        found = [self._pull_json(name, pull) for pull in reversed(shown)]
        return self.reply(
            200, {"discussions": found if self.query.get("p", ["0"])[0] == "0" else [], "count": len(found), "start": 0}
        )

    def _discuss(self, name: str, repo: Repo, number: str, what: str) -> None:
        asked = json.loads(self.body() or b"{}")
        if not self.may_write():
            return None
        with self.hub.lock:
            if not number:
                num = len(repo.pulls) + 1
                repo.pulls[num] = PullRequest(num, asked["title"], asked.get("description", ""), created=now())
                repo.refs[f"refs/pr/{num}"] = repo.refs["main"]
                return self.reply(200, {"num": num, "url": f"{self.hub.url}/{name}/discussions/{num}"})
            pull = repo.pulls[int(number)]
            event = {"id": "1", "type": "status-change", "createdAt": now(), "author": {"name": USER}}
            if what == "status":
                pull.status = asked["status"]
                return self.reply(200, {"newStatus": {**event, "data": {"status": pull.status}}})
            if what == "merge":
                repo.refs["main"] = repo.refs[f"refs/pr/{number}"]
                pull.status = "merged"
                return self.reply(200, {"success": True})
        return self.error(404, "", f"unknown route {self.route}")
