"""A Hugging Face hub of one repository on this machine, for processes that download."""

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

COMMIT = "a" * 40


@dataclass
class Hub:
    """Serves files at COMMIT of a repository. `requested` is set when a file's bytes are; until
    `may_send` is set, the file stops after its first half.
    """

    repository: str
    files: Mapping[str, bytes]
    requested: threading.Event = field(default_factory=threading.Event)
    may_send: threading.Event = field(default_factory=threading.Event)


class _Handler(BaseHTTPRequestHandler):
    hub: ClassVar[Hub]

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def log_message(self, format: str, *arguments: object) -> None:
        pass

    def _answer(self, *, with_body: bool) -> None:
        hub, path = self.hub, self.path.partition("?")[0]
        name = path.removeprefix(f"/{hub.repository}/resolve/{COMMIT}/")
        if path.startswith(f"/api/models/{hub.repository}/revision/"):
            siblings = [{"rfilename": name, "size": len(hub.files[name])} for name in hub.files]
            info = {"id": hub.repository, "sha": COMMIT, "siblings": siblings}
            self._send(json.dumps(info).encode(), with_body)
        elif path.startswith(f"/api/models/{hub.repository}/tree/"):
            tree = [
                {"type": "file", "path": name, "size": len(body), "oid": sha256(body).hexdigest()}
                for name, body in hub.files.items()
            ]
            self._send(json.dumps(tree).encode(), with_body)
        elif name in hub.files:
            self._send(hub.files[name], with_body, is_file=True)
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def _send(self, body: bytes, with_body: bool, is_file: bool = False) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{sha256(body).hexdigest()}"')
        self.end_headers()
        if with_body and is_file:
            half = len(body) // 2
            self.wfile.write(body[:half])
            self.wfile.flush()
            self.hub.requested.set()
            self.hub.may_send.wait()
            self.wfile.write(body[half:])
        elif with_body:
            self.wfile.write(body)


@contextmanager
def serving_hub(hub: Hub, cache: Path) -> Iterator[dict[str, str]]:
    """The environment of a process that downloads from the hub into the cache."""
    handler = type("Handler", (_Handler,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield {
                "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
                "HF_HUB_CACHE": str(cache),
                "HF_HUB_OFFLINE": "0",
                "HF_HUB_DISABLE_XET": "1",
                "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            }
        finally:
            hub.may_send.set()
            server.shutdown()


def checkpoint_files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}
