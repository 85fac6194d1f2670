"""A stand-in for the Hub on loopback: enough of its HTTP API for `push_to_hub` and `from_pretrained`."""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


@dataclass
class Repository:
    """Files as `name -> (content, sha256 of a large file or None)`, at one revision."""

    private: bool = False
    revision: str = "0" * 40
    files: dict[str, tuple[bytes, str | None]] = field(default_factory=dict)


class Hub(ThreadingHTTPServer):
    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories: dict[str, Repository] = {}
        self.large_files: dict[str, bytes] = {}
        self.url = f"http://127.0.0.1:{self.server_port}"


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
        for pattern, handle in ROUTES:
            if match := re.fullmatch(pattern, path):
                return handle(self, body, *match.groups())
        return self._missing("EntryNotFound")

    do_GET = do_POST = do_PUT = do_HEAD = answer

    def whoami(self, body):
        token = {"type": "access_token", "accessToken": {"displayName": "test", "role": "write"}}
        self._json({"type": "user", "name": "me", "fullname": "me", "orgs": [], "auth": token})

    def create(self, body):
        request = json.loads(body)
        repo_id = f"{request.get('organization') or 'me'}/{request['name']}"
        exists = repo_id in self.server.repositories
        private = bool(request.get("private") or request.get("visibility") == "private")
        self.server.repositories.setdefault(repo_id, Repository(private))
        self._json({"url": f"{self.server.url}/{repo_id}", "name": repo_id, "id": repo_id}, 409 if exists else 200)

    def validate(self, body):
        self._json({"errors": [], "warnings": []})

    def preupload(self, body, repo_id, revision):
        large = (".safetensors", ".bin")
        files = [
            {"path": f["path"], "uploadMode": "lfs" if f["path"].endswith(large) else "regular", "shouldIgnore": False}
            for f in json.loads(body)["files"]
        ]
        self._json({"files": files})

    def commit(self, body, repo_id, revision):
        repository = self.server.repositories[repo_id]
        for line in body.decode().splitlines():
            operation = json.loads(line)
            key, value = operation["key"], operation["value"]
            if key == "file":
                repository.files[value["path"]] = base64.b64decode(value["content"]), None
            elif key == "lfsFile":
                repository.files[value["path"]] = self.server.large_files[value["oid"]], value["oid"]
        repository.revision = hashlib.sha1(body + repository.revision.encode()).hexdigest()
        url = f"{self.server.url}/{repo_id}/commit/{repository.revision}"
        self._json({"success": True, "commitOid": repository.revision, "commitUrl": url, "hookOutput": ""})

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

    def info(self, body, repo_id, *_):
        repository = self.server.repositories.get(repo_id)
        if repository is None:
            return self._missing("RepoNotFound")
        siblings = [{"rfilename": name} for name in repository.files]
        common = {"private": repository.private, "gated": False, "disabled": False, "downloads": 0, "likes": 0}
        self._json({"_id": "1", "id": repo_id, "sha": repository.revision, "tags": [], "siblings": siblings, **common})

    def tree(self, body, repo_id, revision):
        files = []
        for name, (content, oid) in self.server.repositories[repo_id].files.items():
            large = {"lfs": {"oid": oid, "size": len(content), "pointerSize": 130}} if oid else {}
            sha = hashlib.sha1(content).hexdigest()
            files.append({"type": "file", "path": name, "size": len(content), "oid": sha, **large})
        self._json(files)

    def resolve(self, body, repo_id, revision, name):
        repository = self.server.repositories.get(repo_id)
        if repository is None:
            return self._missing("RepoNotFound")
        if name not in repository.files:
            return self._missing("EntryNotFound", {"X-Repo-Commit": repository.revision})
        content, oid = repository.files[name]
        tag = oid or hashlib.sha1(content).hexdigest()
        headers = {"X-Repo-Commit": repository.revision, "ETag": f'"{tag}"', "Accept-Ranges": "bytes"}
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
    (rf"/api/models/{ID}/preupload/(.+)", Handler.preupload),
    (rf"/api/models/{ID}/commit/(.+)", Handler.commit),
    (rf"/api/models/{ID}/tree/(.+)", Handler.tree),
    (rf"/api/models/{ID}(?:/revision/(.+))?", Handler.info),
    (rf"/{ID}\.git/info/lfs/objects/batch", Handler.large_file_batch),
    (r"/_lfs/([0-9a-f]{64})", Handler.store_large_file),
    (rf"/{ID}/resolve/([^/]+)/(.+)", Handler.resolve),
]
