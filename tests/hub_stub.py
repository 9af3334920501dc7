"""The part of the Hugging Face Hub that saving and loading a classifier needs, on a port of this machine."""

import base64
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """Repositories in memory: files by name, one commit each."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}
        self.requests: list[str] = []
        self.private: dict[str, bool] = {}
        self.address = ""

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Any, dict[str, str]]:
        parts = unquote(urlsplit(path).path).strip("/").split("/")
        if path.endswith("/api/repos/create"):
            data = json.loads(body)
            name = f"{data['organization']}/{data['name']}"
            self.files.setdefault(name, {})
            self.private[name] = bool(data.get("private")) or data.get("visibility") == "private"
            return 200, {"url": f"{self.address}/{name}", "name": name}, {}
        if parts[:2] == ["api", "validate-yaml"]:
            return 200, {"errors": [], "warnings": []}, {}
        if parts[:2] == ["api", "models"] and "preupload" in parts:
            given = [file["path"] for file in json.loads(body)["files"]]
            files = [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in given]
            return 200, {"files": files}, {}
        if parts[:2] == ["api", "models"] and "commit" in parts:
            repository = "/".join(parts[2:4])
            for line in body.splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    value = entry["value"]
                    self.files[repository][value["path"]] = base64.b64decode(value["content"])
            address = f"{self.address}/{repository}/commit/{COMMIT}"
            return 200, {"commitUrl": address, "commitOid": COMMIT, "success": True}, {}
        repository = "/".join(parts[2:4]) if parts[0] == "api" else "/".join(parts[:2])
        if repository not in self.files:
            return 404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"}
        files = self.files[repository]
        if parts[0] == "api" and "tree" in parts:
            listed = [
                {"type": "file", "path": name, "size": len(data), "oid": _sha(data)} for name, data in files.items()
            ]
            return 200, listed, {}
        if parts[0] == "api":
            siblings = [{"rfilename": name} for name in files]
            return 200, {"id": repository, "modelId": repository, "sha": COMMIT, "siblings": siblings, "tags": []}, {}
        if parts[2] == "resolve" and "/".join(parts[4:]) in files:
            data = files["/".join(parts[4:])]
            return 200, data, {"ETag": f'"{_sha(data)}"', "X-Repo-Commit": COMMIT}
        return 404, {"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound"}


def _sha(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@contextmanager
def running_hub() -> Iterator[Hub]:
    """A hub on a free port of the loopback interface."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def respond(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            hub.requests.append(f"{self.command} {self.path}")
            status, content, headers = hub.answer(self.command, self.path, body)
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        do_GET = do_POST = do_HEAD = respond  # noqa: N815 - the names of http.server

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
