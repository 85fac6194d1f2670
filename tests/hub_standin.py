"""A stand-in for the Hub on loopback: enough of its HTTP API for `push_to_hub` and `from_pretrained`."""

import base64
import hashlib
import json
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import yaml


Files = dict[str, tuple[bytes, str | None]]  # name -> content, and the sha256 of a large file


@dataclass
class Branch:
    """Its files at its last commit, and the messages of all commits."""

    revision: str = "0" * 40
    files: Files = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)


class Repository:
    """Branches by name; `files` and `revision` are those of main."""

    def __init__(self, private: bool = False, files: Files | None = None):
        self.private = private
        self.branches = {"main": Branch(files={".gitattributes": (b"", None), **(files or {})})}

    @property
    def files(self) -> Files:
        return self.branches["main"].files

    @property
    def revision(self) -> str:
        return self.branches["main"].revision

    def find(self, revision: str | None) -> Branch | None:
        """By the name of a branch, or by its last commit."""
        commits = {branch.revision: branch for branch in self.branches.values()}
        return self.branches.get(revision or "main") or commits.get(revision)


class Hub(ThreadingHTTPServer):
    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories: dict[str, Repository] = {}
        self.large_files: dict[str, bytes] = {}
        self.tokens: set[str | None] = set()  # all that were seen
        self.url = f"http://127.0.0.1:{self.server_port}"

    def environment(self, home: Path) -> dict[str, str]:
        """Of a process that takes this for the Hub, and keeps its cache in a folder."""
        own = {"HF_ENDPOINT": self.url, "HF_TOKEN": "hf_test", "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
        return {**os.environ, **own, "HF_HOME": str(home)}


@contextmanager
def serve() -> Iterator[Hub]:
    hub = Hub()
    thread = threading.Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *args):
        pass

    def answer(self):
        path, body = unquote(urlsplit(self.path).path), self._body()
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
        self.server.tokens.add(token)
        for pattern, handle in ROUTES:
            if match := re.fullmatch(pattern, path):
                repository = self.server.repositories.get(match[1]) if match.groups() else None
                writes = handle in (Handler.create, Handler.whoami, Handler.commit, Handler.branch)
                if token is None and (writes or (repository and repository.private)):
                    return self._unauthorized()
                return handle(self, body, *match.groups())
        return self._missing("EntryNotFound")

    do_GET = do_POST = do_PUT = do_HEAD = answer

    def whoami(self, body):
        """The token hf_read may only read; hf_unknown is not valid."""
        given = self.headers["Authorization"].removeprefix("Bearer ")
        if given == "hf_unknown":
            return self._unauthorized()
        token = {"displayName": "test", "role": "read" if given == "hf_read" else "write"}
        orgs = [{"name": "lab", "roleInOrg": "write"}, {"name": "library", "roleInOrg": "read"}]
        auth = {"type": "access_token", "accessToken": token}
        self._json({"type": "user", "name": "me", "fullname": "me", "orgs": orgs, "auth": auth})

    def may_write(self, body, repo_id):
        """Whether a token may write to a repository that exists: to those of others nobody may."""
        if repo_id not in self.server.repositories:
            return self._missing("RepoNotFound")
        return self._json({}) if repo_id.startswith(("me/", "lab/")) else self._send(403, b"{}")

    def create(self, body):
        request = json.loads(body)
        repo_id = f"{request.get('organization') or 'me'}/{request['name']}"
        exists = repo_id in self.server.repositories
        private = bool(request.get("private") or request.get("visibility") == "private")
        self.server.repositories.setdefault(repo_id, Repository(private))
        self._json({"url": f"{self.server.url}/{repo_id}", "name": repo_id, "id": repo_id}, 409 if exists else 200)

    def validate(self, body):
        """The Hub's check of a card's metadata, which accepts everything here."""
        self._json({"errors": [], "warnings": []})

    def branch(self, body, repo_id, name):
        branches = self.server.repositories[repo_id].branches
        exists = name in branches
        if not exists:
            main = branches["main"]
            branches[name] = Branch(main.revision, dict(main.files), list(main.messages))
        self._json({}, 409 if exists else 200)

    def preupload(self, body, repo_id, revision):
        large = (".safetensors", ".bin", "tokenizer.json")
        files = [
            {"path": f["path"], "uploadMode": "lfs" if f["path"].endswith(large) else "regular", "shouldIgnore": False}
            for f in json.loads(body)["files"]
        ]
        self._json({"files": files})

    def commit(self, body, repo_id, revision):
        branch = self.server.repositories[repo_id].find(revision)
        if branch is None:
            return self._missing("RevisionNotFound")
        for line in body.decode().splitlines():
            operation = json.loads(line)
            key, value = operation["key"], operation["value"]
            if key == "header":
                branch.messages.append(value["summary"])
            elif key == "file":
                branch.files[value["path"]] = base64.b64decode(value["content"]), None
            elif key == "lfsFile":
                branch.files[value["path"]] = self.server.large_files[value["oid"]], value["oid"]
            elif key == "deletedFile":
                del branch.files[value["path"]]
            else:
                raise ValueError(key)
        branch.revision = hashlib.sha1(body + branch.revision.encode()).hexdigest()
        url = f"{self.server.url}/{repo_id}/commit/{branch.revision}"
        self._json({"success": True, "commitOid": branch.revision, "commitUrl": url, "hookOutput": ""})

    def large_file_batch(self, body, repo_id):
        objects = []
        for wanted in json.loads(body)["objects"]:
            oid = wanted["oid"]
            upload = {"actions": {"upload": {"href": f"{self.server.url}/_lfs/{oid}"}}}
            objects.append({"oid": oid, "size": wanted["size"], **({} if oid in self.server.large_files else upload)})
        self._json({"transfer": "basic", "objects": objects})

    def store_large_file(self, body, oid):
        assert hashlib.sha256(body).hexdigest() == oid
        self.server.large_files[oid] = body
        self._send(200, b"")

    def info(self, body, repo_id, revision=None):
        branch = self._branch(repo_id, revision)
        if branch is None:
            return None
        siblings = [{"rfilename": name} for name in branch.files]
        private = self.server.repositories[repo_id].private
        common = {"private": private, "gated": False, "disabled": False, "downloads": 0, "likes": 0}
        card = re.match(r"---\n(.*?)\n---\n", branch.files.get("README.md", (b"",))[0].decode(), re.S)
        common["cardData"] = yaml.safe_load(card[1]) if card else None
        self._json({"_id": "1", "id": repo_id, "sha": branch.revision, "tags": [], "siblings": siblings, **common})

    def tree(self, body, repo_id, revision):
        branch = self.server.repositories[repo_id].find(revision)
        if branch is None:  # REVISION/FOLDER: tokenizers ask for one that no repository here has
            return self._missing("EntryNotFound" if "/" in revision else "RevisionNotFound")
        files = []
        for name, (content, oid) in branch.files.items():
            large = {"lfs": {"oid": oid, "size": len(content), "pointerSize": 130}} if oid else {}
            sha = hashlib.sha1(content).hexdigest()
            files.append({"type": "file", "path": name, "size": len(content), "oid": sha, **large})
        self._json(files)

    def resolve(self, body, repo_id, revision, name):
        branch = self._branch(repo_id, revision)
        if branch is None:
            return None
        if name not in branch.files:
            return self._missing("EntryNotFound", {"X-Repo-Commit": branch.revision})
        content, oid = branch.files[name]
        tag = oid or hashlib.sha1(content).hexdigest()
        headers = {"X-Repo-Commit": branch.revision, "ETag": f'"{tag}"', "Accept-Ranges": "bytes"}
        if oid:
            headers |= {"X-Linked-Etag": f'"{oid}"', "X-Linked-Size": str(len(content))}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if not wanted:
            return self._send(200, content, headers)
        first, last = int(wanted[1]), int(wanted[2] or len(content) - 1)
        headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
        self._send(206, content[first : last + 1], headers)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _json(self, value, code: int = 200) -> None:
        self._send(code, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _unauthorized(self) -> None:
        """What the Hub answers without a token: it does not say whether the repository exists."""
        headers = {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Invalid username or password."}
        self._send(401, b"{}", headers)

    def _branch(self, repo_id: str, revision: str | None) -> Branch | None:
        """A branch of a repository; None, after the answer that it does not exist."""
        repository = self.server.repositories.get(repo_id)
        if repository is None:
            return self._missing("RepoNotFound")
        return repository.find(revision) or self._missing("RevisionNotFound")

    def _missing(self, code: str, headers: dict | None = None) -> None:
        self._send(404, b"{}", {"X-Error-Code": code, "X-Error-Message": code, **(headers or {})})

    def _send(self, code: int, content: bytes, headers: dict | None = None) -> None:
        self.send_response(code)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


ID = r"([^/]+/[^/]+)"
ROUTES = [
    (r"/api/whoami-v2", Handler.whoami),
    (r"/api/repos/create", Handler.create),
    (r"/api/validate-yaml", Handler.validate),
    (rf"/api/models/{ID}/auth-check/write", Handler.may_write),
    (rf"/api/models/{ID}/preupload/(.+)", Handler.preupload),
    (rf"/api/models/{ID}/commit/(.+)", Handler.commit),
    (rf"/api/models/{ID}/branch/(.+)", Handler.branch),
    (rf"/api/models/{ID}/tree/(.+)", Handler.tree),
    (rf"/api/models/{ID}(?:/revision/(.+))?", Handler.info),
    (rf"/{ID}\.git/info/lfs/objects/batch", Handler.large_file_batch),
    (r"/_lfs/([0-9a-f]{64})", Handler.store_large_file),
    (rf"/{ID}/resolve/([^/]+)/(.+)", Handler.resolve),
]
