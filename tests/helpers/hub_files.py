"""Files of the Hub of hub_server.py: sent as LFS or Xet objects, and read by `resolve`."""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
import urllib.parse
from collections.abc import Iterator
from typing import Any

from hub_http import Transport
from hub_state import Repo


class Files(Transport):
    """Large files go in and out: LFS (basic and multipart), resolve with Range, Xet's tokens."""

    def _lfs_batch(self, name: str) -> None:
        asked = json.loads(self.body())
        if not self.may_write():
            return None
        hub, objects = self.hub, []
        for item in asked["objects"]:
            oid, size = item["oid"], item["size"]
            if hub.quota is not None and size > hub.quota:
                return self.error(403, "", "Storage quota exceeded: upgrade your plan to store more private data.")
            if hub.lfs_path(oid).exists():
                objects.append({"oid": oid, "size": size})
                continue
            verify = {"href": f"{hub.url}/lfs/verify/"}
            upload: dict[str, Any] = {"href": f"{hub.url}/lfs/put/{oid}?X-Amz-Signature=SECRETSIGNATURE", "header": {}}
            if hub.multipart and size > hub.multipart and "multipart" in asked.get("transfers", []):
                count = -(-size // hub.multipart)
                parts = {f"{i + 1:05d}": f"{hub.url}/lfs/part/{oid}/{i + 1}" for i in range(count)}
                header = {"chunk_size": str(hub.multipart), **parts}
                upload = {"href": f"{hub.url}/lfs/complete/{oid}", "header": header}
            objects.append(
                {"oid": oid, "size": size, "authenticated": True, "actions": {"upload": upload, "verify": verify}}
            )
        transfer = "multipart" if hub.multipart else "basic"
        return self.reply(200, {"transfer": transfer, "objects": objects}, "application/vnd.git-lfs+json")

    def _lfs(self, what: str, oid: str, part: str | None) -> None:
        hub = self.hub
        if what == "verify":
            asked = json.loads(self.body())
            path = hub.lfs_path(asked["oid"])
            good = path.exists() and path.stat().st_size == asked["size"]
            return self.reply(200, {"success": True}) if good else self.error(404, "", "not uploaded")
        if what == "complete":
            asked = json.loads(self.body())
            numbers = sorted(entry["partNumber"] for entry in asked["parts"])
            return self._store(oid, ((hub.root / "parts" / f"{oid}.{n}").read_bytes() for n in numbers))
        if what == "part":
            data = b"".join(self.chunks())
            (hub.root / "parts" / f"{oid}.{part}").write_bytes(data)
            return self.reply(200, b"", ETag=f'"{hashlib.md5(data).hexdigest()}"')
        return self._store(oid, self.chunks())

    def _store(self, oid: str, pieces: Iterator[bytes]) -> None:
        """A large file gets its name only when it is whole and is what it was said to be."""
        digest, target = hashlib.sha256(), self.hub.lfs_path(oid)
        temporary = target.with_name(f"{oid}.{threading.get_ident()}.tmp")
        try:
            with temporary.open("wb") as stream:
                for data in pieces:
                    digest.update(data)
                    stream.write(data)
            if digest.hexdigest() != oid:
                return self.error(400, "", "the content is not that of the oid")
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
        return self.reply(200, {"success": True}, ETag='"0"')

    # downloads

    def _resolve(self, name: str, revision: str, path: str) -> None:
        repo = self.visible(name, content=True)
        if repo is None:
            return None
        oid = self.commit_of(repo, revision)
        if oid is None:
            return None
        entry = repo.commits[oid].tree.get(path)
        if entry is None:
            headers = {"X_Error_Code": "EntryNotFound", "X_Error_Message": "Entry not found", "X_Repo_Commit": oid}
            return self.reply(404, b"Entry not found", "text/plain", **headers)
        extra: dict[str, Any] = {"X_Repo_Commit": oid}
        if entry.lfs:
            extra |= {"X_Linked_Size": entry.size, "X_Linked_Etag": f'"{entry.lfs}"'}
        if entry.xet:
            refresh = f"{self.hub.url}/api/models/{name}/xet-read-token/{oid}"
            extra |= {"X_Xet_Hash": entry.xet, "X_Xet_Refresh_Route": refresh}
        if self.hub.cdn and entry.lfs:
            where = f"{self.hub.other_host}/cdn/{name}/{oid}/{urllib.parse.quote(path)}?Signature=SECRETSIGNATURE"
            return self.reply(302, b"", Location=where, **extra)
        return self._send_file(repo, oid, path, extra)

    def _send_file(self, repo: Repo, oid: str, path: str, extra: dict[str, Any]) -> None:
        entry = repo.commits[oid].tree[path]
        headers = {"ETag": f'"{entry.lfs or entry.oid}"', "Accept_Ranges": "bytes", **extra}
        begin, end, code = 0, entry.size, 200
        asked = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range") or "")
        if asked and entry.size:
            if asked[1]:
                begin, end = int(asked[1]), min(int(asked[2] or entry.size - 1), entry.size - 1) + 1
            else:
                begin = max(0, entry.size - int(asked[2]))
            if begin >= entry.size:
                return self.reply(416, b"", Content_Range=f"bytes */{entry.size}")
            code = 206
            headers["Content_Range"] = f"bytes {begin}-{end - 1}/{entry.size}"
        pieces = self.hub.read(entry, begin, end) if self.command != "HEAD" else iter(())
        return self.stream(code, pieces, end - begin, "application/octet-stream", **headers)

    # the API of one repository

    def _xet_token(self) -> None:
        if self.hub.xet is None:
            return self.error(404, "", "this server has no Xet store")
        expiry = int(time.time()) + 3600
        facts = {"casUrl": f"local://{self.hub.xet}", "exp": expiry, "accessToken": "x"}
        headers = {"X_Xet_Cas_Url": facts["casUrl"], "X_Xet_Token_Expiration": expiry, "X_Xet_Access_Token": "x"}
        return self.reply(200, facts, **headers)
