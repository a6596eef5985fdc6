"""KV events as routers read them: their format, and that a router knows what is cached."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from threading import Event

import pytest
import zmq
from msgspec import msgpack

from engine.api import ModelError
from engine.kv_events.events import CLEARED, PublishedBlocks, batches, block_hash
from engine.kv_events.publisher import KVEventPublisher
from engine.values.settings import KVEventsConfig
from kvstore.node import BlockEvent
from kvstore.store import KVStore
from kvstore.tokens import TOKEN_BYTES, Tokens, block_digests, content_ids, unpacked
from kvstore.types import Namespace
from tests.kv_event_reader import Batch, Block, Cached, Subscriber, replayed
from tests.polling import until
from tests.unit.kv_helpers import BLOCK, NS, make_store, run_of, serve, tree_of, walk
from tests.unit.random_store import RandomStore

A, B = run_of(1000, 16), run_of(2000, 16)
ADAPTERS = {"sql": "query"}
LOOPBACK = "tcp://127.0.0.1:0"


def published_of(store: KVStore) -> dict[int, Block]:
    """What routers should know: the tree's whole blocks, without prompts that have a salt."""
    found: dict[int, Block] = {}
    for namespace, path, _ in walk(tree_of(store)):
        if namespace.cache_salt:
            continue
        parent = None
        lora_name = ADAPTERS[namespace.adapter] if namespace.adapter else None
        for index, digest in enumerate(block_digests(namespace, path, BLOCK)):
            start = index * BLOCK * TOKEN_BYTES
            ids = unpacked(path[start : start + BLOCK * TOKEN_BYTES])
            found[block_hash(digest)] = Block(parent, tuple(ids), lora_name)
            parent = block_hash(digest)
    return found


def facts_of(store: KVStore) -> list[BlockEvent]:
    """The facts that the tree notes from now on."""
    facts = tree_of(store).block_events = list[BlockEvent]()
    return facts


class Published:
    """A store, its publisher, and the calls that this posts to the engine thread."""

    def __init__(
        self, config: KVEventsConfig, store: KVStore, adapters: dict[str, str], most_blocks: int
    ) -> None:
        self.store = store
        self.posted: list[Callable[[], None]] = []
        self.publisher = KVEventPublisher(
            config, tree_of(store), BLOCK, adapters, most_blocks, self.posted.append
        )
        self.endpoint = self.publisher.source.endpoint

    @property
    def replay_endpoint(self) -> str:
        assert self.publisher.source.replay_endpoint is not None
        return self.publisher.source.replay_endpoint

    @property
    def expected(self) -> dict[int, Block]:
        return published_of(self.store)

    def serve(self, *prompts: list[int], namespace: Namespace = NS) -> None:
        """Each in a turn of its own."""
        for prompt in prompts:
            serve(self.store, prompt, namespace=namespace)
            self.publisher.publish()

    def evict(self) -> None:
        tree_of(self.store).evict()
        self.publisher.publish()


@contextmanager
def publishing(
    store: KVStore | None = None,
    adapters: dict[str, str] = ADAPTERS,
    most_blocks: int = 1000,
    **config: int | str,
) -> Iterator[Published]:
    given = {"endpoint": LOOPBACK, "replay_endpoint": LOOPBACK, **config}
    published = Published(
        KVEventsConfig(**given),  # type: ignore[arg-type]
        store or make_store(64),
        adapters,
        most_blocks,
    )
    with closing(published.publisher):
        yield published


class TestFormat:
    def test_stored(self) -> None:
        store = make_store(16)
        facts = facts_of(store)
        namespace = Namespace(model="m", adapter="sql")
        serve(store, [7, 200, 70_000, 2**32 - 1, *A[:6]], namespace=namespace)
        blocks = PublishedBlocks(BLOCK, ADAPTERS)
        (payload,) = batches(blocks.events(facts, []), 1.5)
        first, second = published_of(store)
        assert msgpack.decode(payload) == [
            1.5,
            [
                {
                    "type": "BlockStored",
                    "block_hashes": [first, second],
                    "parent_block_hash": None,
                    "token_ids": [7, 200, 70_000, 2**32 - 1, *A[:4]],
                    "block_size": BLOCK,
                    "lora_id": None,
                    "medium": "GPU",
                    "lora_name": "query",
                    "extra_keys": [None, None],
                    "group_idx": 0,
                    "kv_cache_spec_kind": "full_attention",
                }
            ],
            0,
        ]

    def test_removed(self) -> None:
        store = make_store(16)
        serve(store, A[:8])
        facts = facts_of(store)
        _, second = published_of(store)
        tree_of(store).evict()
        (payload,) = batches(PublishedBlocks(BLOCK, {}).events(facts, []), 0)
        (event,) = msgpack.decode(payload)[1]
        assert event == {
            "type": "BlockRemoved",
            "block_hashes": [second],
            "medium": "GPU",
            "group_idx": 0,
        }

    def test_cleared(self) -> None:
        (payload,) = batches([CLEARED], 0)
        assert msgpack.decode(payload)[1] == [{"type": "AllBlocksCleared"}]

    def test_a_hash_is_63_bits_of_the_digest(self) -> None:
        (digest,) = block_digests(NS, Tokens(A[:4]).packed(0, 4), BLOCK)
        assert block_hash(digest) == int.from_bytes(digest[:8], "big") >> 1 < 2**63

    def test_long_chains_are_parts_that_continue_each_other(self) -> None:
        store = make_store(1100)
        facts = facts_of(store)
        serve(store, run_of(0, 4096))
        payloads = [*batches(PublishedBlocks(BLOCK, {}).events(facts, []), 0)]
        cached = Cached()
        for payload in payloads:
            assert len(payload) < 80_000
            cached.apply(msgpack.decode(payload)[1])
        assert cached.orphans == 0
        assert cached.blocks == published_of(store)


@pytest.mark.parametrize("seed", range(4))
def test_a_router_knows_the_tree_after_each_of_10_000_operations(seed: int) -> None:
    driver = RandomStore(100 + seed)
    facts = facts_of(driver.store)
    blocks, router, n_blocks = PublishedBlocks(BLOCK, ADAPTERS), Cached(), 0
    for _ in range(2500):
        driver.operate()
        for payload in batches(blocks.events(facts, []), 0):
            router.apply(msgpack.decode(payload)[1])
        facts.clear()
        assert router.blocks == published_of(driver.store)
        n_blocks = max(n_blocks, len(router.blocks))
    assert n_blocks > 10
    assert router.clears > 1
    assert router.orphans == 0
    again = Cached()
    for payload in batches(blocks.stored_events(blocks.hashes()), 0):
        again.apply(msgpack.decode(payload)[1])
    assert (again.blocks, again.orphans) == (router.blocks, 0)


def test_a_block_with_an_image_has_the_ids_of_its_prompt_and_a_key_of_its_own() -> None:
    store = make_store(64)
    facts = facts_of(store)
    names = content_ids(bytes(32), 3), content_ids(bytes(31) + b"1", 3)
    for own in names:
        serve(store, [1, 2, 3, 4, 5, 6, *own, 7, 8, 9, 10, 11, 12])
    payloads = batches(PublishedBlocks(BLOCK, {}, 99).events(facts, []), 0)
    events = [event for payload in payloads for event in msgpack.decode(payload)[1]]
    ids = [token_id for event in events for token_id in event["token_ids"]]
    keys = [key for event in events for key in event["extra_keys"]]
    after_text = [5, 6, 99, 99, 99, 7, 8, 9]
    assert ids == [1, 2, 3, 4, *after_text, *after_text]
    assert keys[0] is None
    assert keys[1] != keys[3]
    assert {len(key) for key in keys if key is not None} == {1}


class TestSubscribers:
    def test_one_that_is_there_sees_each_turn(self) -> None:
        with publishing() as published, Subscriber(published.endpoint) as subscriber:
            assert subscriber.receive().events == [{"type": "AllBlocksCleared"}]
            published.serve(A, [*A[:4], *B[:8]])
            subscriber.receive_until({*published.expected})
            published.evict()
            subscriber.receive_until({*published.expected})
            assert subscriber.cached.blocks == published.expected

    def test_a_late_one_is_told_of_all_and_begins_empty(self) -> None:
        with publishing() as published:
            published.serve(A, [*A[:4], *B[:8]])
            published.serve(B, namespace=Namespace(model="m", adapter="sql"))
            published.serve(B, namespace=Namespace(model="m", cache_salt="tenant"))
            until(lambda: published.publisher.stats().batches == 3)  # or it might not be late
            with Subscriber(published.endpoint) as subscriber:
                subscriber.receive_until({*published.expected})
                assert subscriber.cached.blocks == published.expected
                assert subscriber.cached.orphans == 0
                assert subscriber.batches[0].events[0] == {"type": "AllBlocksCleared"}

    def test_many_at_once_are_told_together(self) -> None:
        with publishing() as published:
            published.serve(A)
            subscribers = [Subscriber(published.endpoint) for _ in range(8)]
            for subscriber in subscribers:
                with subscriber:
                    subscriber.receive_until({*published.expected})
            until(lambda: published.publisher.stats().subscribers == 0)
            assert published.publisher.stats().published_again < 4

    def test_what_changes_while_all_is_published_again_is_known(self) -> None:
        with publishing(make_store(7000), most_blocks=10**9) as published:
            published.serve(*(run_of(10_000 * n, 8000) for n in range(3)))
            for more in range(3):
                with Subscriber(published.endpoint) as subscriber:
                    for _ in range(300):
                        published.evict()
                    published.serve(run_of(100_000 * (more + 1), 50))
                    subscriber.receive_until({*published.expected})
                    assert subscriber.cached.blocks == published.expected

    @pytest.mark.parametrize("config", [{"buffer_steps": 4}, {"replay_endpoint": ""}], ids=str)
    def test_one_that_was_away_forgets_what_it_was_not_told(
        self, config: dict[str, int | str]
    ) -> None:
        with publishing(**config) as published:  # type: ignore[arg-type]
            published.serve(A, B)
            with Subscriber(published.endpoint) as first:
                first.receive_until({*published.expected})
                known = first.cached
            for _ in range(6):
                published.evict()
            published.serve([*A[:4], *B[:8]])
            with Subscriber(published.endpoint) as back:
                back.cached = known
                back.receive_until({*published.expected})
                assert back.cached.blocks == published.expected

    def test_a_gap_of_100_messages_is_replayed(self) -> None:
        with publishing(make_store(256)) as published, Subscriber(published.endpoint) as subscriber:
            last = subscriber.receive()
            published.serve(*(run_of(10 * n, 5) for n in range(101)))
            lost = [Batch.of(*subscriber.frames()[1:]) for _ in range(100)]
            seen = subscriber.receive()
            assert seen.number == last.number + 101
            assert subscriber.cached.blocks != published.expected
            again = [*replayed(published.replay_endpoint, last.number + 1)]
            assert again == [*lost, seen]
            for batch in again:
                subscriber.cached.apply(batch.events)
            assert subscriber.cached.blocks == published.expected

    def test_a_slow_one_loses_messages_and_sees_it(self) -> None:
        """It is told of all again when it subscribes again."""
        store = make_store(2500)
        with publishing(store, hwm=20, most_blocks=10**9) as published:
            with Subscriber(published.endpoint, hwm=1, buffer_bytes=4096) as slow:
                slow.receive()
                facts = facts_of(store)
                serve(store, run_of(0, 8000))
                for _ in range(200):  # far more than sockets have room for
                    tree_of(store).block_events = facts
                    published.publisher.publish()
                until(lambda: published.publisher.stats().batches >= 400)
                store.clear()
                published.publisher.publish()
                facts = facts_of(store)
                published.serve(A)
                slow.receive()
                while slow.receive().number == slow.batches[-2].number + 1:
                    tree_of(store).block_events = facts
                    published.publisher.publish()
            with Subscriber(published.endpoint) as again:
                again.receive_until({*published.expected})

    def test_a_topic_is_that_of_the_settings(self) -> None:
        with publishing(topic="kv@one") as published:
            published.serve(A)
            with Subscriber(published.endpoint, "kv@one") as subscriber:
                subscriber.receive_until({*published.expected})
            with Subscriber(published.endpoint, "other") as other, pytest.raises(zmq.Again):
                other.frames(300)
            until(lambda: published.publisher.stats().subscribers == 0)

    def test_the_end_is_a_clear(self) -> None:
        with publishing() as published, Subscriber(published.endpoint) as subscriber:
            published.serve(A)
            subscriber.receive_until({*published.expected})
            published.publisher.close()
            assert subscriber.receive().events == [{"type": "AllBlocksCleared"}]

    def test_a_clear_of_everything_is_one_event(self) -> None:
        with publishing() as published, Subscriber(published.endpoint) as subscriber:
            published.serve(A)
            subscriber.receive_until({*published.expected})
            published.store.clear()
            published.publisher.publish()
            assert subscriber.receive().events == [{"type": "AllBlocksCleared"}]

    def test_two_models_publish_apart(self) -> None:
        with publishing() as one, publishing() as two:
            assert one.endpoint != two.endpoint
            one.serve(A)
            two.serve(B)
            with Subscriber(one.endpoint) as first, Subscriber(two.endpoint) as second:
                first.receive_until({*one.expected})
                second.receive_until({*two.expected})


class TestNumbers:
    def test_they_follow_each_other_from_the_time_on(self) -> None:
        before = time.time_ns() // 1000
        with publishing() as published, Subscriber(published.endpoint) as subscriber:
            published.serve(A, B)
            subscriber.receive_until({*published.expected})
            numbers = [batch.number for batch in subscriber.batches]
            assert numbers == [*range(numbers[0], numbers[0] + len(numbers))]
            assert numbers[0] >= before

    def test_a_later_engine_has_higher_ones(self) -> None:
        last = 0
        for _ in range(2):
            with publishing() as published, Subscriber(published.endpoint) as subscriber:
                assert subscriber.receive().number > last
                last = subscriber.batches[-1].number


class TestReplay:
    def test_what_is_kept_is_bounded(self) -> None:
        with publishing(buffer_steps=3) as published:
            published.serve(*(run_of(10 * n, 5) for n in range(9)))
            until(lambda: published.publisher.stats().batches == 9)
            assert len([*replayed(published.replay_endpoint, 0)]) == 3

    @pytest.mark.parametrize("first", [2**64 - 1, 2**63])
    def test_of_nothing_ends_at_once(self, first: int) -> None:
        with publishing() as published:
            published.serve(A)
            assert [*replayed(published.replay_endpoint, first)] == []

    def test_one_that_is_long_is_whole(self) -> None:
        with publishing(make_store(16), most_blocks=10**9) as published:
            published.serve(*(run_of(10 * n, 5) for n in range(2000)))
            until(lambda: published.publisher.stats().batches == 2000)
            found = [*replayed(published.replay_endpoint, 0)]
            assert [batch.number - found[0].number for batch in found] == [*range(2000)]

    def test_who_does_not_read_it_stops_nobody(self) -> None:
        with publishing(make_store(16), most_blocks=10**9) as published, zmq.Context() as context:
            published.serve(*(run_of(10 * n, 5) for n in range(2000)))
            context.linger = 0
            silent = [context.socket(zmq.DEALER) for _ in range(100)]
            for each in silent:
                each.setsockopt(zmq.RCVHWM, 1)
                each.connect(published.replay_endpoint)
                each.send_multipart((b"", bytes(8)))
            until(lambda: published.publisher.stats().replays >= 64)
            with Subscriber(published.endpoint) as subscriber:
                subscriber.receive_until({*published.expected})
            for each in silent:
                each.close()
            until(lambda: len([*replayed(published.replay_endpoint, 0)]) >= 2000)


class TestFailures:
    def test_a_port_in_use_is_named(self) -> None:
        with (
            publishing() as published,
            pytest.raises(ModelError, match=r"at tcp://127.0.0.1:\d+: Address already in use"),
            publishing(endpoint=published.endpoint),
        ):
            pass

    def test_a_replay_port_in_use_frees_the_other(self) -> None:
        with publishing() as published:
            with publishing() as other:
                free = other.endpoint
            with (
                pytest.raises(ModelError, match="Address already in use"),
                publishing(endpoint=free, replay_endpoint=published.endpoint),
            ):
                pass
            with publishing(endpoint=free):
                pass

    def test_too_much_at_once_is_published_anew(self) -> None:
        with (
            publishing(most_blocks=6) as published,
            Subscriber(published.endpoint) as subscriber,
        ):
            subscriber.receive()
            published.serve([*A[:4]], run_of(3000, 40), A)
            subscriber.receive_until({*published.expected})
            assert subscriber.cached.blocks == published.expected
            assert subscriber.cached.clears > 1
            assert published.publisher.stats().dropped_blocks >= 10

    def test_the_engine_does_not_wait_for_a_thread_that_hangs(self) -> None:
        gate = Event()

        class Slow(dict[str, str]):
            def __getitem__(self, key: str) -> str:
                gate.wait()
                return super().__getitem__(key)

        with (
            publishing(adapters=Slow(ADAPTERS), most_blocks=20) as published,
            Subscriber(published.endpoint) as subscriber,
        ):
            subscriber.receive()
            published.serve(A, namespace=Namespace(model="m", adapter="sql"))
            published.serve(*(run_of(10 * n, 9) for n in range(60)))
            assert published.publisher.stats().dropped_blocks > 20
            gate.set()
            subscriber.receive_until({*published.expected})
            assert subscriber.cached.blocks == published.expected

    def test_after_an_error_all_is_published_anew(self, caplog: pytest.LogCaptureFixture) -> None:
        adapters = dict[str, str]()  # without a name: what is published raises a KeyError
        with (
            publishing(adapters=adapters) as published,
            Subscriber(published.endpoint) as subscriber,
            caplog.at_level(logging.ERROR),
        ):
            subscriber.receive()
            published.serve(A)
            published.serve(B, namespace=Namespace(model="m", adapter="sql"))
            until(lambda: bool(published.posted))
            adapters["sql"] = ADAPTERS["sql"]
            published.posted.pop()()
            subscriber.receive_until({*published.expected})
            assert subscriber.cached.blocks == published.expected
        assert "published anew after an error" in caplog.text

    @pytest.mark.parametrize("kind", [zmq.XSUB, zmq.DEALER])
    def test_hostile_frames_change_nothing(self, kind: int) -> None:
        frames = (
            [b""],
            [b"\x01" * 4, b"more"],
            [b"\x02other"],
            [b"", b""],
            [b"", bytes(7)],
            [b"", bytes(9)],
            [b"", bytes(8), b"more"],
            [b"x", bytes(8)],
            [b"\0" * 1024],
            [b"\x01" + b"\xff" * 4000],
            [b"", b"\xff" * 100_000],
        )
        with publishing() as published, zmq.Context() as context:
            published.serve(A)
            context.linger = 0
            address = published.endpoint if kind == zmq.XSUB else published.replay_endpoint
            peers = [context.socket(kind) for _ in frames]
            for peer, hostile in zip(peers, frames, strict=True):
                peer.connect(address)
                peer.send_multipart(hostile)
            with Subscriber(published.endpoint) as subscriber:
                subscriber.receive_until({*published.expected})
            assert [*replayed(published.replay_endpoint, 0)]
            assert published.publisher.stats().replays == 1
            for peer in peers:
                peer.close()
