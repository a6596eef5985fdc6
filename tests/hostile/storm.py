"""Attacks from a process of their own, so that making and sending them delays no probe."""

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context

from tests.hostile.attacks import Attack

CUT_OFF = 0
"""Stands for the status of a connection that the daemon has closed, or that takes too long."""

ANSWER_SECONDS = 60.0
TAKEN = frozenset({CUT_OFF, 200, 400, 401, 403, 404, 408, 410, 413, 429, 503})


@dataclass(frozen=True, slots=True)
class Target:
    """A daemon as one of its clients sees it."""

    port: int
    key: str


@contextmanager
def attacker() -> Iterator[ProcessPoolExecutor]:
    """The process, until the context ends."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        yield pool


async def strike(
    pool: ProcessPoolExecutor,
    target: Target,
    attack: Attack,
    answer_seconds: float = ANSWER_SECONDS,
) -> Sequence[int]:
    """Send all bodies of the attack at once. Returns the status of each, once all have been
    answered or cut off.

    Raises AssertionError for a status with which the daemon answers no client's mistake.
    """
    loop = asyncio.get_running_loop()
    statuses = await loop.run_in_executor(pool, _strike, target, attack, answer_seconds)
    assert set(statuses) <= TAKEN, f"{attack.name}: {statuses}"
    return statuses


def _strike(target: Target, attack: Attack, answer_seconds: float) -> Sequence[int]:
    async def all_at_once() -> Sequence[int]:
        posts = [_post(target, attack, body, answer_seconds) for body in attack.bodies()]
        return await asyncio.gather(*posts)

    return asyncio.run(all_at_once())


async def _post(target: Target, attack: Attack, body: bytes, answer_seconds: float) -> int:
    head = (
        f"{attack.method} {attack.route} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Authorization: Bearer {target.key}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    try:
        async with asyncio.timeout(answer_seconds):
            reader, writer = await asyncio.open_connection("127.0.0.1", target.port)
            try:
                writer.write(head.encode() + body)
                line = await reader.readline()
                while await reader.read(1 << 16):
                    pass
                return int(line.split()[1]) if line else CUT_OFF
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return CUT_OFF
