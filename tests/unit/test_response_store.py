"""The responses that are kept: whose they are, and which are forgotten."""

import tracemalloc

import pytest

from server.dialects.responses.kept.store import ResponseStore, StoredItem, StoredResponse

MANY = 1 << 30


def response(id: str, n_bytes: int = 10, *items: str) -> StoredResponse:
    stored = tuple(StoredItem(item, b"{}") for item in items)
    return StoredResponse(b"x" * n_bytes, (), stored)


def kept(store: ResponseStore, *ids: str) -> list[bool]:
    """In an order that leaves the first of them the oldest."""
    return [store.get("", id) is not None for id in ids]


def test_it_is_found_by_its_owner_alone() -> None:
    store = ResponseStore(10, MANY)
    own = response("a", 10, "item")
    store.put("one", "a", own)
    assert store.get("one", "a") is own
    assert store.get("two", "a") is None
    assert store.item("two", "item") is None
    assert not store.delete("two", "a")
    assert store.item("one", "item") == own.output[0]


def test_the_one_that_was_not_asked_for_longest_makes_room() -> None:
    store = ResponseStore(2, MANY)
    for id in ("a", "b"):
        store.put("", id, response(id))
    store.get("", "a")
    store.put("", "c", response("c"))
    assert kept(store, "a", "b", "c") == [True, False, True]


def test_asking_for_an_item_is_asking_for_its_response() -> None:
    store = ResponseStore(2, MANY)
    store.put("", "a", response("a", 10, "item"))
    store.put("", "b", response("b"))
    assert store.item("", "item") is not None
    store.put("", "c", response("c"))
    assert kept(store, "a", "b", "c") == [True, False, True]


def test_bytes_are_counted_with_all_items() -> None:
    one = response("a", 1000)
    store = ResponseStore(10, 2 * one.n_bytes)
    for id in ("a", "b", "c"):
        store.put("", id, response(id, 1000))
    assert kept(store, "a", "b", "c") == [False, True, True]
    store.put("", "d", response("d", 1000, "item"))
    assert kept(store, "b", "c", "d") == [False, False, True]
    assert one.n_bytes > 1000


def test_what_is_too_large_alone_is_not_kept_and_takes_nobodys_place() -> None:
    store = ResponseStore(10, 1000)
    store.put("", "a", response("a", 100))
    store.put("", "b", response("b", 2000))
    assert kept(store, "a", "b") == [True, False]
    store.put("", "a", response("a", 2000))
    assert kept(store, "a") == [False], "nor what it was before"
    store.put("", "c", response("c"))
    assert kept(store, "c") == [True], "what was forgotten is not counted any more"


def test_putting_again_replaces() -> None:
    store = ResponseStore(2, MANY)
    store.put("", "a", response("a", 10, "old"))
    again = response("a", 20, "new")
    store.put("", "a", again)
    assert store.get("", "a") is again
    assert store.item("", "old") is None
    assert store.item("", "new") is not None


@pytest.mark.parametrize(("first", "second"), ["ab", "ba"])
def test_an_item_that_two_have_stays_with_the_one_that_is_left(first: str, second: str) -> None:
    store = ResponseStore(10, MANY)
    for id in ("a", "b"):
        store.put("", id, response(id, 10, "item"))
    store.delete("", first)
    assert store.item("", "item") is not None
    store.delete("", second)
    assert store.item("", "item") is None


def test_asking_for_an_item_that_two_have_is_asking_for_the_later() -> None:
    store = ResponseStore(2, MANY)
    for id in ("a", "b"):
        store.put("", id, response(id, 10, "item"))
    store.get("", "a")
    assert store.item("", "item") is not None
    store.put("", "c", response("c"))
    assert kept(store, "a", "b", "c") == [False, True, True]


def test_nothing_is_kept_where_nothing_may_be() -> None:
    store = ResponseStore(0, MANY)
    store.put("", "a", response("a"))
    assert kept(store, "a") == [False]


@pytest.mark.parametrize(("n_responses", "n_items"), [(11_000, 0), (6_000, 1), (1, 11_000)])
def test_no_more_memory_is_held_than_is_counted(n_responses: int, n_items: int) -> None:
    """Also where the tables have just grown."""
    counted = 0
    tracemalloc.start()
    try:
        store = ResponseStore(MANY, MANY)
        for number in range(n_responses):
            id = f"resp_{number:032x}"
            made = response(id, 500 + number % 2, *(f"{id}i{index:x}" for index in range(n_items)))
            store.put("", id, made)
            counted += made.n_bytes
        del made
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held <= counted
