"""Stored responses: what they take, recounted from scratch, and whose is forgotten."""

from hypothesis import given
from hypothesis import strategies as st

from server.dialects.responses.store import (
    ResponseStore,
    StoredConversation,
    StoredItem,
    StoredResponse,
)

MAX_RESPONSES, MAX_BYTES = 8, 20_000
CLIENTS = ("one", "two", "three")

PUTS = st.tuples(
    st.sampled_from(CLIENTS),
    st.integers(0, 30),  # which one it continues, of all that there were; else none
    st.lists(st.integers(0, 3000), max_size=3),  # the sizes of its items
    st.integers(0, 3000),  # its own
)
STEPS = st.lists(PUTS | st.integers(0, 30), max_size=40)  # a number: to delete that one

Made = tuple[str, str, StoredResponse]  # a client, the response's id, and itself


def taken(made: list[Made]) -> int:
    """What these take together: of what several continue, one copy for each client."""
    runs: set[tuple[str, StoredConversation]] = set()
    for client, _, response in made:
        run: StoredConversation | None = response.conversation
        while run is not None:
            runs.add((client, run))
            run = run.before
    return sum(run.n_bytes for _, run in runs) + sum(response.n_bytes for *_, response in made)


def of(client: str, made: list[Made]) -> list[Made]:
    return [one for one in made if one[0] == client]


@given(STEPS)
def test_bytes_are_as_counted_and_who_is_within_its_share_loses_nothing(
    steps: list[tuple[str, int, list[int], int] | int],
) -> None:
    store = ResponseStore(MAX_RESPONSES, MAX_BYTES)
    made: list[Made] = []
    said = dict[str, list[str]]()  # the items of each conversation from its beginning

    def there() -> list[Made]:
        return [one for one in made if store.get("", one[1]) is not None]

    for number, step in enumerate(steps):
        before = there()
        if isinstance(step, int):
            if step < len(made):
                store.delete("", made[step][1])
        else:
            client, continued, sizes, n_bytes = step
            previous = made[continued][2].conversation if continued < len(made) else None
            before_it = said[made[continued][1]] if continued < len(made) else []
            items = [StoredItem(f"{number}-{size}", b"x" * size) for size in sizes]
            asked = StoredConversation(items[:1], previous)
            whole = StoredConversation(items[1:], asked)
            made.append((client, str(number), StoredResponse(b"x" * n_bytes, asked, whole)))
            said[str(number)] = [*before_it, *(item.id for item in items)]
            store.put(client, "", str(number), made[-1][2])
            for other in {*CLIENTS} - {client}:
                own = of(other, before)
                if len(of(other, there())) < len(own):
                    shares = len({one[0] for one in [*before, made[-1]]})
                    assert len(own) > MAX_RESPONSES / shares or taken(own) > MAX_BYTES / shares
        assert len(there()) <= MAX_RESPONSES
        assert store.n_bytes == taken(there()) <= MAX_BYTES
        for _, id, response in there():
            assert [item.id for item in response.conversation] == said[id]
            for item in response.conversation:
                assert store.items("", [item.id])[item.id].id == item.id
    for _, id, _ in made:
        store.delete("", id)
    assert store.n_bytes == 0
    for _, _, response in made:
        assert store.items("", [item.id for item in response.conversation]) == {}
