"""A subscriber of KV events as routers are: it reads vLLM's messages and knows what is cached."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Self

import zmq
from msgspec import msgpack

END = b"\xff" * 8
"""The number in the last answer to a request for a replay."""

PATIENCE_MS = 10_000


class Batch(NamedTuple):
    """A message: its number, when it was made, and its events."""

    number: int
    seconds: float
    events: list[dict[str, Any]]

    @classmethod
    def of(cls, number: bytes, payload: bytes) -> Self:
        seconds, events, rank = msgpack.decode(payload)
        assert rank == 0
        return cls(int.from_bytes(number, "big"), seconds, events)


class Block(NamedTuple):
    """A block as a router knows it."""

    parent: int | None
    token_ids: tuple[int, ...]
    lora_name: str | None


class Cached:
    """What a router believes to be cached. `orphans`: blocks whose parent it did not know."""

    def __init__(self) -> None:
        self.blocks: dict[int, Block] = {}
        self.orphans = 0
        self.clears = 0

    def apply(self, events: Sequence[dict[str, Any]]) -> None:
        for event in events:
            assert next(iter(event)) == "type"
            match event["type"]:
                case "BlockStored":
                    self._store(event)
                case "BlockRemoved":
                    for each in event["block_hashes"]:
                        self.blocks.pop(each, None)
                case "AllBlocksCleared":
                    self.clears += 1
                    self.blocks.clear()

    def _store(self, event: dict[str, Any]) -> None:
        hashes, size, ids = event["block_hashes"], event["block_size"], event["token_ids"]
        assert len(ids) == size * len(hashes) == size * len(event["extra_keys"])
        assert (event["medium"], event["group_idx"]) == ("GPU", 0)
        parent = event["parent_block_hash"]
        self.orphans += parent is not None and parent not in self.blocks
        for index, each in enumerate(hashes):
            tokens = tuple(ids[index * size : (index + 1) * size])
            self.blocks[each] = Block(parent, tokens, event["lora_name"])
            parent = each


class Subscriber:
    """Reads an engine's events. Must be closed."""

    def __init__(
        self, endpoint: str, topic: str = "", hwm: int = 1000, buffer_bytes: int = -1
    ) -> None:
        """`hwm` messages wait to be read, and `buffer_bytes` in the system; -1: as usual."""
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.RCVHWM, hwm)
        self._socket.setsockopt(zmq.RCVBUF, buffer_bytes)
        self._socket.subscribe(topic)
        self._socket.connect(endpoint)
        self.topic = topic.encode()
        self.cached = Cached()
        self.batches: list[Batch] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    def frames(self, patience_ms: int = PATIENCE_MS) -> list[bytes]:
        """The next message, which is not applied. Raises zmq.Again if there is none."""
        self._socket.setsockopt(zmq.RCVTIMEO, patience_ms)
        return self._socket.recv_multipart()

    def receive(self) -> Batch:
        """The next batch, which is applied. Waits for it."""
        topic, number, payload = self.frames()
        assert topic == self.topic
        batch = Batch.of(number, payload)
        self.batches.append(batch)
        self.cached.apply(batch.events)
        return batch

    def receive_until(self, blocks: set[int]) -> None:
        """Receive until exactly these blocks are cached."""
        while self.cached.blocks.keys() != blocks:
            self.receive()

    def receive_until_known(self, blocks: set[int]) -> None:
        """Receive until at least these blocks are cached."""
        while not blocks <= self.cached.blocks.keys():
            self.receive()


def replayed(endpoint: str, first: int) -> Iterator[Batch]:
    """The batches from a number on that a publisher still has."""
    context = zmq.Context()
    requests = context.socket(zmq.DEALER)
    try:
        requests.setsockopt(zmq.RCVTIMEO, PATIENCE_MS)
        requests.connect(endpoint)
        requests.send_multipart((b"", first.to_bytes(8, "big")))
        while True:
            empty, _, number, payload = requests.recv_multipart()
            assert empty == b""
            if number == END:
                assert payload == b""
                return
            yield Batch.of(number, payload)
    finally:
        context.destroy(linger=0)
