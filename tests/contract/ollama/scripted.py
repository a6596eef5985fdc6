"""Ollama's client before a scripted model."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from engine.mlx_backend.loading.checkpoint import DEFAULT_CHECKPOINT
from tests.contract.scripted import USER, Daemon


class OllamaDaemon(Daemon):
    def chat(self, *messages: Mapping[str, Any], **fields: Any) -> Any:
        return self.ollama.chat("bytes", messages or (USER,), **fields)

    def post(self, path: str = "/api/chat", **fields: Any) -> httpx.Response:
        """As a client that knows no types. Whole, unless it asks for a stream."""
        asked = {"messages": [USER]} if path == "/api/chat" else {"prompt": "Hi"}
        return self.http.post(path, json={"model": "bytes", "stream": False, **asked, **fields})

    def lines(self, path: str = "/api/chat", **fields: Any) -> list[dict[str, Any]]:
        """A stream's, each of which must be JSON."""
        answer = self.post(path, stream=True, **fields)
        assert answer.headers["content-type"] == "application/x-ndjson"
        return [json.loads(line) for line in answer.text.removesuffix("\n").split("\n")]


def write_checkpoint(parent: Path, template: str) -> Path:
    """A copy of the embedded model with another chat template, and with sampling defaults."""
    checkpoint = parent / "checkpoint"
    shutil.copytree(DEFAULT_CHECKPOINT, checkpoint)
    (checkpoint / "chat_template.jinja").write_text(template, "utf-8")
    (checkpoint / "generation_config.json").write_text('{"temperature": 0.5}', "utf-8")
    return checkpoint
