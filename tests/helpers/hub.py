"""A stand-in of the hub's API on this machine: takes what HfApi sends to make a repository, a branch and a commit.

with hub.served() as (address, received): ...
received.files["config.json"]          # bytes, as they were committed
"""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_stand_in"


@dataclass
class Received:
    """What was asked of the hub."""

    repo: dict[str, Any] = field(default_factory=dict)
    branches: list[str] = field(default_factory=list)
    revision: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    commits: int = 0
    there: list[str] = field(default_factory=list)  # files of the repository before
    deleted: list[str] = field(default_factory=list)


class _Handler(BaseHTTPRequestHandler):
    received: Received
    refuses = False

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def answer(self, values: Any, code: int = 200) -> None:
        text = json.dumps(values).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def do_GET(self) -> None:
        if self.refuses:
            self.answer({"error": "Repository not found"}, 404)
            return
        if self.path.split("/")[5:6] == ["tree"]:
            self.answer([{"type": "file", "path": name, "size": 1, "oid": "0" * 40} for name in self.received.there])
            return
        self.answer({"id": "me/model", "sha": "0" * 40, "siblings": [], "private": False, "tags": []})

    def do_POST(self) -> None:
        body, parts = self.body(), self.path.partition("?")[0].strip("/").split("/")
        if self.refuses or self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.answer({"error": "You don't have the rights to create a model"}, 403)
        elif self.path == "/api/repos/create":
            self.received.repo = json.loads(body)
            self.answer({"url": f"http://{self.headers['Host']}/me/model", "name": "me/model", "id": "1"})
        elif len(parts) < 6:  # a question whether the card is valid
            self.answer({"errors": [], "warnings": []})
        elif parts[4] == "branch":
            self.received.branches.append(parts[5])
            self.answer({})
        elif parts[4] == "preupload":
            files = json.loads(body)["files"]
            said = {"uploadMode": "regular", "shouldIgnore": False, "oid": None}  # into the commit itself, not LFS
            self.answer({"files": [{**file, **said} for file in files]})
        else:
            self.commit(parts[5], [json.loads(line) for line in body.splitlines()])

    def commit(self, revision: str, lines: list[dict[str, Any]]) -> None:
        self.received.revision, self.received.commits = revision, self.received.commits + 1
        for line in lines:
            if line["key"] == "file":
                self.received.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            elif line["key"] == "deletedFile":
                self.received.deleted.append(line["value"]["path"])
        url = f"http://{self.headers['Host']}/me/model/commit/{'1' * 40}"
        self.answer({"commitUrl": url, "commitOid": "1" * 40, "success": True})


@contextmanager
def served(refuses: bool = False) -> Iterator[tuple[str, Received]]:
    """Serve on a free port; yield its address and what it receives. `refuses`: answer 403."""
    received = Received()
    handler = type("Handler", (_Handler,), {"received": received, "refuses": refuses})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", received
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
