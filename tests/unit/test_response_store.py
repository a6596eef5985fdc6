"""The responses that are kept: whose they are, and which are forgotten."""

import tracemalloc

import pytest

from server.dialects.responses.store import (
    ResponseStore,
    StoredConversation,
    StoredItem,
    StoredResponse,
)

MANY = 1 << 30


def response(
    id: str, n_bytes: int = 10, *items: str, before: StoredResponse | None = None
) -> StoredResponse:
    """One that continues another, if any."""
    asked = StoredConversation((), before.conversation if before else None)
    whole = StoredConversation([StoredItem(item, b"{}") for item in items], asked)
    return StoredResponse(b"x" * n_bytes, asked, whole)


def item(store: ResponseStore, owner: str, id: str) -> StoredItem | None:
    return store.items(owner, [id]).get(id)


def total_bytes(response: StoredResponse) -> int:
    return response.n_bytes + response.conversation.total_bytes


def kept(store: ResponseStore, *ids: str) -> list[bool]:
    """In an order that leaves the first of them the oldest."""
    return [store.get("", id) is not None for id in ids]


class Counted(StoredConversation):
    """Counts how often one is looked up, or compared with another."""

    __slots__ = ()
    looked_at = 0

    def __hash__(self) -> int:
        Counted.looked_at += 1
        return super().__hash__()

    def __eq__(self, other: object) -> bool:
        Counted.looked_at += 1
        return self is other


@pytest.fixture(autouse=True)
def _nothing_looked_at() -> None:
    Counted.looked_at = 0


def test_it_is_found_by_its_owner_alone() -> None:
    store = ResponseStore(10, MANY)
    own = response("a", 10, "item")
    store.put("", "one", "a", own)
    assert store.get("one", "a") is own
    assert store.get("two", "a") is None
    assert item(store, "two", "item") is None
    assert not store.delete("two", "a")
    assert item(store, "one", "item") == own.conversation.items[0]


def test_the_one_that_was_not_asked_for_longest_makes_room() -> None:
    store = ResponseStore(2, MANY)
    for id in ("a", "b"):
        store.put("", "", id, response(id))
    store.get("", "a")
    store.put("", "", "c", response("c"))
    assert kept(store, "a", "b", "c") == [True, False, True]


def test_asking_for_an_item_is_asking_for_its_response() -> None:
    store = ResponseStore(2, MANY)
    store.put("", "", "a", response("a", 10, "item"))
    store.put("", "", "b", response("b"))
    assert item(store, "", "item") is not None
    store.put("", "", "c", response("c"))
    assert kept(store, "a", "b", "c") == [True, False, True]


def test_what_is_too_large_alone_is_not_kept_and_takes_nobodys_place() -> None:
    store = ResponseStore(10, 2000)
    store.put("", "", "a", response("a", 100))
    store.put("", "", "b", response("b", 2000))
    assert kept(store, "a", "b") == [True, False]
    store.put("", "", "a", response("a", 2000))
    assert kept(store, "a") == [False], "nor what it was before"
    store.put("", "", "c", response("c"))
    assert kept(store, "c") == [True], "what was forgotten is not counted any more"


def test_putting_again_replaces() -> None:
    store = ResponseStore(2, MANY)
    store.put("", "", "a", response("a", 10, "old"))
    again = response("a", 20, "new")
    store.put("", "", "a", again)
    assert store.get("", "a") is again
    assert item(store, "", "old") is None
    assert item(store, "", "new") is not None


@pytest.mark.parametrize(("first", "second"), ["ab", "ba"])
def test_an_item_that_two_have_stays_with_the_one_that_is_left(first: str, second: str) -> None:
    store = ResponseStore(10, MANY)
    for id in ("a", "b"):
        store.put("", "", id, response(id, 10, "item"))
    store.delete("", first)
    assert item(store, "", "item") is not None
    store.delete("", second)
    assert item(store, "", "item") is None


def test_asking_for_an_item_that_two_have_is_asking_for_the_later() -> None:
    store = ResponseStore(2, MANY)
    for id in ("a", "b"):
        store.put("", "", id, response(id, 10, "item"))
    store.get("", "a")
    assert item(store, "", "item") is not None
    store.put("", "", "c", response("c"))
    assert kept(store, "a", "b", "c") == [False, True, True]


def test_of_items_with_one_id_the_last_that_was_said_is_found() -> None:
    store = ResponseStore(10, MANY)
    for id in ("a", "b"):
        said = StoredConversation(
            [StoredItem("item", f"{id}{place}".encode()) for place in range(3)]
        )
        store.put("", "", id, StoredResponse(b"{}", said, said))
    assert store.items("", ["item", "none", "item"]) == {"item": StoredItem("item", b"b2")}
    store.delete("", "b")
    assert store.items("", ["item"]) == {"item": StoredItem("item", b"a2")}
    store.delete("", "a")
    assert store.items("", ["item"]) == {}


@pytest.mark.parametrize("first", ["oldest", "newest"])
def test_forgetting_takes_work_by_what_is_forgotten(first: str) -> None:
    """Whatever else has items of the same id: clients choose those."""
    store, n_responses, n_items = ResponseStore(MANY, MANY), 50, 20
    for number in range(n_responses):
        said = Counted([StoredItem("item", b"{}")] * n_items)
        store.put("", "", str(number), StoredResponse(b"{}", said, said))
    order = range(n_responses) if first == "oldest" else reversed(range(n_responses))
    Counted.looked_at = 0
    for number in order:
        store.delete("", str(number))
    assert Counted.looked_at <= 10 * n_responses
    assert item(store, "", "item") is None


def test_so_does_forgetting_one_of_many_that_continue_one() -> None:
    store, n_responses = ResponseStore(MANY, MANY), 200
    said = StoredConversation([StoredItem("item", b"{}")])
    for number in range(n_responses):
        one = Counted((), said)
        store.put("", "", str(number), StoredResponse(b"{}", one, one))
    Counted.looked_at = 0
    for number in reversed(range(n_responses)):
        store.delete("", str(number))
    assert Counted.looked_at <= 10 * n_responses
    assert store.n_bytes == 0


def test_asking_for_many_items_goes_through_their_conversation_once() -> None:
    store, n_turns = ResponseStore(MANY, MANY), 200
    whole = None
    for turn in range(n_turns):
        whole = Counted([StoredItem(f"i{turn}", b"{}")], whole)
        store.put("", "", str(turn), StoredResponse(b"{}", whole, whole))
        store.delete("", str(turn - 1))  # so that the last one alone is asked for by each
    Counted.looked_at = 0
    ids = [f"i{turn}" for turn in range(n_turns)]
    assert list(store.items("", ids * 10)) == ids
    assert Counted.looked_at <= 10 * n_turns


def test_one_clients_flood_takes_no_others_place() -> None:
    store = ResponseStore(60, MANY)
    store.put("victim", "", "own", response("own"))
    for number in range(200):
        store.put("flood", "", f"r{number}", response(f"r{number}"))
    assert kept(store, "own", "r0", "r140", "r141", "r199") == [True, False, False, True, True]


@pytest.mark.slow
def test_a_long_conversation_can_be_let_go() -> None:
    """However many follow one another: nothing of it is recursive."""
    whole = None
    for _ in range(200_000):
        whole = StoredConversation((), whole)
    assert list(whole or ()) == []
    del whole


def test_nothing_is_kept_where_nothing_may_be() -> None:
    store = ResponseStore(0, MANY)
    store.put("", "", "a", response("a"))
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
            store.put("", "", id, made)
            counted += total_bytes(made)
        del made
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held <= counted
