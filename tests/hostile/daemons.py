"""Daemons with two keys, of two clients, what is sent to them, and their grammar processes."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil

from engine.mlx_backend.loading.checkpoint import DEFAULT_CHECKPOINT
from tests.hostile.cases import Case
from tests.restart.asking import PATIENCE
from tests.restart.living import SERVE, Daemon, living

HOSTILE, PROBE = "hostile", "probe"
KV_BYTES = 32 << 20
TAKEN = frozenset({httpx.codes.OK, httpx.codes.BAD_REQUEST})


@contextmanager
def daemon(folder: Path, *flags: str, program: tuple[str, ...] = SERVE) -> Iterator[Daemon]:
    """One with the demonstration model, until the context ends. Raises TargetError."""
    keys = folder / "keys.yaml"
    digests = {name: hashlib.sha256(name.encode()).hexdigest() for name in (HOSTILE, PROBE)}
    listed = [{"name": name, "sha256": digest, "role": "user"} for name, digest in digests.items()]
    keys.write_text(json.dumps(listed))
    set_by = ("--api-keys-file", str(keys), "--kv-cache-bytes", str(KV_BYTES), *flags)
    with living(DEFAULT_CHECKPOINT, folder / "log", *set_by, program=program) as found:
        yield found


def client(daemon: Daemon, name: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=daemon.url,
        headers={"Authorization": f"Bearer {name}"},
        timeout=PATIENCE,
        trust_env=False,
        limits=httpx.Limits(max_connections=None),
    )


def grammar_processes(daemon: Daemon) -> list[psutil.Process]:
    """Those of the daemon, as of now."""
    children = psutil.Process(daemon.process.pid).children(recursive=True)
    return [child for child in children if _is_grammar_process(child)]


def _is_grammar_process(process: psutil.Process) -> bool:
    try:
        return "engine.grammar.worker" in process.cmdline()
    except psutil.Error:  # it has ended meanwhile
        return False


async def send(http: httpx.AsyncClient, case: Case) -> int:
    """Its status. Anything but 200 and 400 is an AssertionError."""
    written = json.dumps(case.body)  # in ASCII, so that half a character is sent, too
    headers = {"Content-Type": "application/json"}
    answer = await http.post(case.path, content=written, headers=headers)
    assert answer.status_code in TAKEN, f"{case.name}: {answer.status_code} {answer.text[:400]}"
    return answer.status_code


async def is_alive(http: httpx.AsyncClient) -> bool:
    return (await http.get("/health")).status_code == httpx.codes.OK
