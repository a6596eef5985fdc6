"""How long a first token waits for its grammar: `python -m load_tests.bench.grammar_wait`.

In process, on the demonstration model. Milliseconds from the request to its first token:

- with a new JSON schema of 10 KB each time, and with one that is known;
- of a client with a new small schema, alone, and next to two clients whose new schemas take about
  two seconds of processor time each.
"""

import asyncio
import itertools
import json
import statistics
import time
from typing import Any

from engine.api import Engine
from engine.launch import launch
from engine.mlx_backend.loading.checkpoint import DEFAULT_CHECKPOINT
from engine.values.request import Constraint, Grammar, GrammarKind, Request, SamplingParams
from engine.values.settings import EngineConfig
from load_tests.events import events_of

ROUNDS = 9
SMALL_BYTES, LARGE_BYTES = 300, 10_000
COSTLY_SECONDS = 1.8
COSTLY_BYTES_AT_FIRST = 150_000


class Requests:
    """Sends requests of one output token, whose schemas are all different."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._numbers = itertools.count()

    def schema(self, n_bytes: int) -> str:
        """A new schema of an object, of about `n_bytes`."""
        number = next(self._numbers)
        properties: dict[str, Any] = {}
        size = 0
        while size < n_bytes:
            name = f"field_{number}_{len(properties)}"
            kinds: list[dict[str, Any]] = [
                {"enum": [f"{name}_a", f"{name}_b"]},
                {"type": "array", "items": {"type": "integer"}},
                {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
            ]
            properties[name] = kinds[len(properties) % len(kinds)]
            size += len(json.dumps({name: properties[name]})) + len(name) + 4
        told = {"type": "object", "properties": properties, "required": list(properties)}
        return json.dumps({**told, "additionalProperties": False})

    async def seconds(self, client: str, schema: str) -> float:
        """From the request to its first token."""
        number = next(self._numbers)
        request = Request(
            str(number),
            (5, 6, 7, number % 500),
            1,
            SamplingParams(seed=number),
            ignore_eos=True,
            constraint=Constraint(Grammar(GrammarKind.JSON_SCHEMA, schema), "response_format"),
            client=client,
        )
        started = time.perf_counter()
        async for _ in events_of(self._engine, request):
            break
        return time.perf_counter() - started


async def costly_bytes(requests: Requests) -> int:
    """The size of a schema that takes about COSTLY_SECONDS here, and is not refused."""
    n_bytes = COSTLY_BYTES_AT_FIRST
    seconds = await requests.seconds("sizing", requests.schema(n_bytes))
    most_bytes = 250_000  # longer ones are refused
    return min(most_bytes, int(n_bytes * (COSTLY_SECONDS / seconds) ** 0.5))


async def main() -> None:
    config = EngineConfig(model=str(DEFAULT_CHECKPOINT), kv_cache_bytes=64 << 20)
    engine = await launch(config, lambda line: None)
    requests = Requests(engine)
    await requests.seconds("first", requests.schema(SMALL_BYTES))  # processes start with it
    n_bytes = await costly_bytes(requests)
    found: dict[str, list[float]] = {}
    costly_seconds = list[float]()
    for _ in range(ROUNDS):
        large = requests.schema(LARGE_BYTES)
        for kind in ("10 KB, new", "10 KB, known"):
            found.setdefault(kind, []).append(await requests.seconds("a", large))
        small = requests.schema(SMALL_BYTES)
        found.setdefault("small, alone", []).append(await requests.seconds("c", small))
        schemas = [requests.schema(n_bytes) for _ in range(2)]
        others = [
            asyncio.ensure_future(requests.seconds(client, schema))
            for client, schema in zip("de", schemas, strict=True)
        ]
        await asyncio.sleep(0.3)  # they are being compiled
        small = requests.schema(SMALL_BYTES)
        found.setdefault("small, next to two", []).append(await requests.seconds("c", small))
        costly_seconds += await asyncio.gather(*others)
    await engine.drain(0.0)
    print(f"costly schemas of {n_bytes:,} bytes took {statistics.median(costly_seconds):.2f} s")
    for kind, seconds in found.items():
        middle, most = 1e3 * statistics.median(seconds), 1e3 * max(seconds)
        print(f"{kind}: {middle:.0f} ms in the middle of {ROUNDS}, {most:.0f} ms at most")


if __name__ == "__main__":
    asyncio.run(main())
