"""Facts from the installed program of an agent: its flags, and Codex's own instructions."""

import json
import os
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory

SECONDS = 20  # for a program that shows its help, or sends a first request
MAX_REQUEST_BYTES = 4 << 20
CODEX_OUTPUT_BYTES = 10_000  # of a tool's output, as Codex has it for models that it does not know


def knows_flag(program: str, flag: str) -> bool:
    """Whether the program's `--help` names the flag."""
    return flag in _run([program, "--help"]).stdout.split()


def codex_catalog(program: str, model: str, context_tokens: int | None) -> str | None:
    """A catalog for Codex's `model_catalog_json` with this model alone. None where this version of
    Codex does not take it.

    Codex warns of a model without an entry, and an entry must contain instructions. Those are what
    the program itself sends for a model that it does not know.
    Format: https://github.com/openai/codex/blob/main/codex-rs/protocol/src/openai_models.rs
    """
    with TemporaryDirectory() as home:
        instructions = _codex_instructions(program, model, home)
        if not instructions:
            return None
        catalog = json.dumps({"models": [_codex_entry(model, context_tokens, instructions)]})
        file = Path(home, "catalog.json")
        file.write_text(catalog)
        read = ("-c", f"model_catalog_json={json.dumps(str(file))}")
        is_taken = _run([program, "debug", "models", *read], CODEX_HOME=home).returncode == 0
    return catalog if is_taken else None


def _codex_entry(model: str, context_tokens: int | None, instructions: str) -> dict[str, object]:
    """The catalog entry that Codex uses for unknown models, with the real context and without
    images.
    """
    entry: dict[str, object] = {
        "slug": model,
        "display_name": model,
        "base_instructions": instructions,
        "shell_type": "default",
        "visibility": "list",
        "supported_in_api": True,
        "priority": 0,
        "supported_reasoning_levels": [],
        "supports_reasoning_summaries": False,
        "supports_parallel_tool_calls": True,
        "support_verbosity": False,
        "truncation_policy": {"mode": "bytes", "limit": CODEX_OUTPUT_BYTES},
        "experimental_supported_tools": [],
        "input_modalities": ["text"],
    }
    if context_tokens is not None:
        entry |= {"context_window": context_tokens, "max_context_window": context_tokens}
    return entry


def _codex_instructions(program: str, model: str, home: str) -> str:
    """The instructions in the first request of a session, "" if none is sent. The session has a
    home of its own, and its request is refused.
    """
    with _refusing_server() as server:
        provider = {"name": "Recorder", "base_url": server.url, "wire_api": "responses"}
        config = {"model": model, "model_provider": "recorder"}
        config |= {f"model_providers.recorder.{name}": value for name, value in provider.items()}
        flags = [
            argument
            for name, value in config.items()
            for argument in ("-c", f"{name}={json.dumps(value, ensure_ascii=False)}")
        ]
        _run(
            [program, "exec", "--skip-git-repo-check", "-C", home, *flags, "hello"],
            CODEX_HOME=home,
            NO_PROXY="127.0.0.1",
            no_proxy="127.0.0.1",
        )
        return server.instructions


class _RefusingServer(ThreadingHTTPServer):
    """Refuses every request, and keeps the instructions of the last one that had some: a field of
    their own, or the first message of the input, as newer versions of Codex send them.
    """

    instructions = ""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class _Handler(BaseHTTPRequestHandler):
    server: _RefusingServer

    def do_GET(self) -> None:
        self.send_error(404)

    def do_POST(self) -> None:
        size = min(int(self.headers["Content-Length"] or 0), MAX_REQUEST_BYTES)
        with suppress(ValueError):  # a body that is compressed, or cut off
            match json.loads(self.rfile.read(size)):
                case {"instructions": str(text)} | {
                    "input": [{"role": "developer", "content": [{"text": str(text)}]}, *_]
                }:
                    self.server.instructions = text
        self.send_error(400)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def _refusing_server() -> Iterator[_RefusingServer]:
    with _RefusingServer(("127.0.0.1", 0), _Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def _run(command: Sequence[str], **variables: str) -> "subprocess.CompletedProcess[str]":
    """Run the command with its output captured. If it cannot start or takes longer than SECONDS,
    the output is empty and the status 1.
    """
    try:
        return subprocess.run(
            command,
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            text=True,
            errors="replace",
            timeout=SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired):
        return subprocess.CompletedProcess(command, 1, "", "")
