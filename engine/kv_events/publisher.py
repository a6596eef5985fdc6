"""The publisher of KV events: a thread that encodes what the tree has noted, and sends it.

The engine thread hands over facts and waits for nobody. Subscribers need nothing of it either: the
publisher keeps all published blocks, states them again for each that subscribes, and keeps the
latest batches for those that have lost some.
"""

import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count, islice

import zmq

from engine.api import EngineStopped, ModelError
from engine.kv_events.events import CLEARED, EVENT_TOKENS, PublishedBlocks, batches
from engine.kv_events.memory import REPLAY_BYTES
from engine.values.model import KVEventSource
from engine.values.settings import KVEventsConfig
from engine.values.stats import KVEventStats
from kvstore.node import BlockEvent, BlocksStored
from kvstore.tree import RadixTree

logger = logging.getLogger(__name__)

END_OF_REPLAY = b"\xff" * 8

MOST_REPLAYS = 64
"""How many replays go on at a time. Further requests are not answered."""

REPLAY_AHEAD = 16
"""Batches of a replay that wait for their reader; the rest is sent as it reads."""

REPLAY_SECONDS = 10.0
"""A replay ends when nothing of it has been read for this long."""

MOST_RECEIVED_BYTES = 1024
"""The longest frame that is read. A peer that sends a longer one is disconnected."""

AGAIN_SECONDS = 1.0
"""The shortest time between the beginnings of two publications of all blocks."""

AGAIN_EVENTS = 8
"""How many events of such a publication are sent before live ones get their turn."""

PAUSE_MS = 1
"""The pause after each part of something long, in which other threads may run."""

CLOSE_SECONDS = 2.0
LINGER_MS = 500
"""How long the last batches may take to leave when the engine ends."""


@dataclass(slots=True)
class _Facts:
    """Facts on their way to the publisher's thread: the engine thread appends, the other takes.
    Each writes one of the counters.
    """

    waiting: deque[tuple[float, list[BlockEvent]]] = field(default_factory=deque)
    begins_anew: bool = False  # the first facts are of all that is indexed
    n_appended: int = 0
    n_taken: int = 0


@dataclass(slots=True)
class _Replay:
    """A peer that is sent the batches from `number` on."""

    number: int
    since_seconds: float  # when something of it was last sent


class KVEventPublisher:
    """Publishes the `block_events` of a tree. `publish`, `publish_anew` and `close` are for the
    engine thread.
    """

    def __init__(
        self,
        config: KVEventsConfig,
        tree: RadixTree,
        block_size: int,
        adapters: Mapping[str, str],
        most_blocks: int,
        post: Callable[[Callable[[], None]], object],
        image_part: int | None = None,
    ) -> None:
        """`adapters`: names by the adapters of namespaces. Facts on at most `most_blocks` blocks
        wait to be sent. `post` has a function called on the engine thread. `image_part`: see
        `PublishedBlocks`.

        Raises ModelError if an address cannot be used.
        """
        self._tree = tree
        self._block_size = block_size
        self._most_blocks = most_blocks
        self._post = post
        self._topic = config.topic.encode()
        self._facts = _Facts()
        self._blocks = PublishedBlocks(block_size, adapters, image_part)
        self._numbers = count(time.time_ns() // 1000)  # a later engine numbers its batches higher
        self._sent = deque[tuple[int, bytes]]()
        self._sent_bytes = 0
        # Nobody can request what is kept without an address for it.
        self._buffer_steps = config.buffer_steps if config.replay_endpoint else 0
        self._needs_clear = True  # subscribers may know blocks that are no longer cached
        self._again: deque[int] | None = None  # blocks that are still to be published again
        self._again_due = False
        self._again_seconds = 0.0
        self._replays = dict[bytes, _Replay]()
        self._stats = KVEventStats()
        self._stopping = False
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        try:
            self._publish_socket = self._bound(
                zmq.XPUB, zmq.XPUB_VERBOSER, config.endpoint, config.hwm
            )
            self._replay_socket: zmq.Socket[bytes] | None = None
            if config.replay_endpoint:
                self._replay_socket = self._bound(
                    zmq.ROUTER, zmq.ROUTER_MANDATORY, config.replay_endpoint, REPLAY_AHEAD
                )
        except BaseException:
            self._context.destroy(linger=0)
            raise
        replay = self._replay_socket
        self.source = KVEventSource(
            endpoint=_address(self._publish_socket),
            replay_endpoint=None if replay is None else _address(replay),
            topic=config.topic,
        )
        self._alarm, self._wake = socket.socketpair()
        self._alarm.setblocking(False)
        self._wake.setblocking(False)
        self._poller.register(self._alarm, zmq.POLLIN)
        tree.block_events = []
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def publish(self) -> None:
        """Hand over what the tree has noted since the last call. Never waits."""
        facts = self._tree.block_events
        if not facts:
            return
        self._tree.block_events = []
        queue = self._facts
        n_blocks = _n_blocks(facts)
        if queue.n_appended - queue.n_taken + n_blocks > self._most_blocks:
            self._stats.dropped_blocks += queue.n_appended - queue.n_taken + n_blocks
            self.publish_anew()
            return
        queue.n_appended += n_blocks
        queue.waiting.append((time.time(), facts))
        self._ring()

    def publish_anew(self) -> None:
        """Have all blocks of the tree published after a clear, in place of the facts that wait."""
        self._tree.block_events = []
        facts: list[BlockEvent] = [
            fact for node in self._tree.nodes() for fact in node.stored(self._block_size)
        ]
        self._facts = _Facts(deque([(time.time(), facts)]), begins_anew=True)
        self._ring()

    def stats(self) -> KVEventStats:
        """What has been published. On any thread."""
        return replace(self._stats, blocks=len(self._blocks))

    def close(self) -> None:
        """Publish what is left, and that nothing is cached any more."""
        self._stopping = True
        self._ring()
        self._thread.join(CLOSE_SECONDS)

    def _ring(self) -> None:
        with suppress(OSError):  # it is full, so the thread wakes up anyway; or it has ended
            self._wake.send(b"\0")

    def _bound(self, kind: int, option: int, address: str, hwm: int) -> "zmq.Socket[bytes]":
        found = self._context.socket(kind)
        found.setsockopt(option, 1)
        found.setsockopt(zmq.MAXMSGSIZE, MOST_RECEIVED_BYTES)
        found.setsockopt(zmq.SNDHWM, hwm)
        found.setsockopt(zmq.TCP_KEEPALIVE, 1)
        found.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 60)
        found.setsockopt(zmq.IPV6, "[" in address)
        try:
            found.bind(address)
        except zmq.ZMQError as error:
            raise ModelError(f"KV events cannot be published at {address}: {error}") from None
        self._poller.register(found, zmq.POLLIN)
        return found

    # From here on all is of the publisher's thread.

    def _run(self) -> None:
        try:
            while not self._stopping:
                try:
                    self._turn()
                except Exception:
                    logger.exception("KV events: all blocks are published anew after an error")
                    self._facts = _Facts()
                    with suppress(EngineStopped):
                        self._post(self.publish_anew)
                    time.sleep(AGAIN_SECONDS)
            self._send_facts()
            self._send([CLEARED], time.time())
        except Exception:
            logger.exception("KV events end with an error")
        finally:
            self._context.destroy(linger=LINGER_MS)
            self._alarm.close()
            self._wake.close()

    def _turn(self) -> None:
        ready = dict(self._poller.poll(self._wait_ms()))
        if self._alarm.fileno() in ready:
            with suppress(BlockingIOError):
                self._alarm.recv(4096)
        self._send_facts()
        self._read_subscriptions()
        self._publish_again()
        if self._replay_socket is not None:
            self._read_requests(self._replay_socket)
            self._send_replays(self._replay_socket)

    def _wait_ms(self) -> int | None:
        """How long there is nothing to do unless something arrives; None: for ever."""
        if self._again is not None or self._replays:
            return PAUSE_MS
        if self._again_due:
            left_seconds = self._again_seconds + AGAIN_SECONDS - time.monotonic()
            return max(PAUSE_MS, int(left_seconds * 1000))
        return None

    def _send_facts(self) -> None:
        """Send the facts that wait."""
        while (queue := self._facts).waiting:
            seconds, facts = queue.waiting.popleft()
            if queue.begins_anew:
                queue.begins_anew = False
                self._blocks.forget()
                self._send([CLEARED], seconds)
            else:
                queue.n_taken += _n_blocks(facts)
            stored = list[int]()
            self._send(self._blocks.events(facts, stored), seconds)
            if self._again is not None:  # later than their parents, which may not have been sent
                self._again += stored

    def _read_subscriptions(self) -> None:
        with suppress(zmq.Again):
            while True:
                frame, *more = self._publish_socket.recv_multipart(zmq.NOBLOCK)
                begins, topic = frame[:1], frame[1:]
                if more or begins not in (b"\0", b"\1") or not self._topic.startswith(topic):
                    continue
                self._stats.subscribers += 1 if begins == b"\1" else -1
                self._again_due = self._again_due or begins == b"\1"

    def _publish_again(self) -> None:
        """Begin or continue to state all blocks again, for a new subscriber."""
        now = time.monotonic()
        if self._again is None:
            if not self._again_due or now - self._again_seconds < AGAIN_SECONDS:
                return
            self._again_due, self._again_seconds = False, now
            self._again = deque(self._blocks.hashes())
            self._stats.published_again += 1
            if self._needs_clear:
                self._send([CLEARED], time.time())
                self._needs_clear = False
        n_blocks = max(EVENT_TOKENS // self._block_size, 1) * AGAIN_EVENTS
        part = [self._again.popleft() for _ in range(min(n_blocks, len(self._again)))]
        self._send(self._blocks.stored_events(part), time.time())
        if not self._again:
            self._again = None

    def _send(self, events: Iterable[bytes], seconds: float) -> None:
        """Publish events, and keep them for replays."""
        for payload in batches(events, seconds):
            number = next(self._numbers)
            self._publish_socket.send_multipart((self._topic, number.to_bytes(8, "big"), payload))
            self._stats.batches += 1
            self._sent.append((number, payload))
            self._sent_bytes += len(payload)
            while len(self._sent) > self._buffer_steps or self._sent_bytes > REPLAY_BYTES:
                self._sent_bytes -= len(self._sent.popleft()[1])
                self._needs_clear = True

    def _read_requests(self, requests: "zmq.Socket[bytes]") -> None:
        with suppress(zmq.Again):
            while True:
                match requests.recv_multipart(zmq.NOBLOCK):
                    case [peer, b"", start] if (
                        len(start) == 8 and len(self._replays) < MOST_REPLAYS
                    ):
                        number = int.from_bytes(start, "big")
                        self._replays[peer] = _Replay(number, time.monotonic())
                        self._stats.replays += 1

    def _send_replays(self, requests: "zmq.Socket[bytes]") -> None:
        """Send as much of each replay as its reader takes."""
        for peer, replay in list(self._replays.items()):
            now = time.monotonic()
            try:
                if not self._send_replay(requests, peer, replay):
                    continue
            except zmq.Again:
                if now - replay.since_seconds < REPLAY_SECONDS:
                    continue
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
            del self._replays[peer]

    def _send_replay(self, requests: "zmq.Socket[bytes]", peer: bytes, replay: _Replay) -> bool:
        """Send a part of a replay. Returns whether it has been sent to its end."""
        first = self._sent[0][0] if self._sent else 0
        skipped = min(max(replay.number - first, 0), len(self._sent))
        for number, payload in islice(self._sent, skipped, skipped + REPLAY_AHEAD):
            self._answer(requests, peer, number.to_bytes(8, "big"), payload)
            replay.number, replay.since_seconds = number + 1, time.monotonic()
        if skipped + REPLAY_AHEAD < len(self._sent):
            return False
        self._answer(requests, peer, END_OF_REPLAY, b"")
        return True

    def _answer(
        self, requests: "zmq.Socket[bytes]", peer: bytes, number: bytes, payload: bytes
    ) -> None:
        frames = (peer, b"", self._topic, number, payload)
        requests.send_multipart(frames, zmq.NOBLOCK)


def _n_blocks(facts: Iterable[BlockEvent]) -> int:
    """How many blocks facts have to do with, and one for each fact."""
    return sum(1 + len(fact.hashes) if isinstance(fact, BlocksStored) else 1 for fact in facts)


def _address(bound: "zmq.Socket[bytes]") -> str:
    """The address of a socket, with the port that was chosen for it."""
    return bound.getsockopt_string(zmq.LAST_ENDPOINT)
