"""References of a request to what is stored: `previous_response_id`, and items by their ids."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from pydantic import TypeAdapter

from server.dialects.responses.storage.store import ResponseStore
from server.dialects.responses.storage.stored import Conversation, StoredItem
from server.errors import ApiError, invalid
from server.schemas.responses.items import ConversationItem, ItemReference
from server.schemas.responses.request import InputTokensRequest
from server.transport.body import MAX_NODES, count_nodes

_ITEMS = TypeAdapter(list[ConversationItem])


@dataclass(frozen=True, slots=True)
class ResolvedInput:
    """A request's conversation, each reference replaced by what it refers to."""

    before: Conversation | None  # the previous response with all before it, as stored ...
    earlier: Sequence[ConversationItem]  # ... and its items
    items: Sequence[ConversationItem]  # the request's own


def referenced_bytes(body: InputTokensRequest, store: ResponseStore, owner: str) -> int:
    """About how many bytes of stored items the body refers to."""
    previous = store.get(owner, body.previous_response_id or "")
    before = previous.conversation.total_bytes if previous else 0
    times = Counter(reference.id for _, reference in _references(body))
    return before + sum(n * store.item_bytes(owner, id) for id, n in times.items())


def resolved_input(
    body: InputTokensRequest, store: ResponseStore, owner: str, max_bytes: int
) -> ResolvedInput:
    """Raises ApiError (400) for references to what is not stored, and for more than `max_bytes`: a
    short body can refer to long items, and to each of them often.
    """
    before = _previous(body.previous_response_id, store, owner)
    stored = list(before or ())
    referenced = _referenced(body, store, owner)
    _check_length([*stored, *referenced], max_bytes, "previous_response_id" if stored else "input")
    parsed = iter(_ITEMS.validate_json(_json([*stored, *referenced])))
    earlier = list(islice(parsed, len(stored)))
    items = [next(parsed) if isinstance(item, ItemReference) else item for item in body.input]
    return ResolvedInput(before, earlier, items)


def _previous(id: str | None, store: ResponseStore, owner: str) -> Conversation | None:
    if id is None:
        return None
    previous = store.get(owner, id)
    if previous is None:
        raise ApiError(
            400,
            f"Previous response with id '{id}' not found.",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    return previous.conversation


def _referenced(body: InputTokensRequest, store: ResponseStore, owner: str) -> list[StoredItem]:
    """The items that the references refer to, in their order."""
    stored = store.items(owner, (reference.id for _, reference in _references(body)))
    for index, reference in _references(body):
        if reference.id not in stored:
            message = f"input[{index}].id: Item with id '{reference.id}' not found."
            raise invalid(message, f"input[{index}].id")
    return [stored[reference.id] for _, reference in _references(body)]


def _references(body: InputTokensRequest) -> Iterator[tuple[int, ItemReference]]:
    """Each with its index in the input."""
    for index, item in enumerate(body.input):
        if isinstance(item, ItemReference):
            yield index, item


def _check_length(stored: Sequence[StoredItem], max_bytes: int, param: str) -> None:
    if sum(len(item.json) for item in stored) > max_bytes:
        limit = f"at most {max_bytes} bytes (max_body_bytes)"
    elif count_nodes(_json(stored)) > MAX_NODES:
        limit = f"at most {MAX_NODES} objects, lists and members of objects"
    else:
        return
    raise invalid(f"{param}: the items that it stands for are too long: {limit}", param)


def _json(stored: Sequence[StoredItem]) -> bytes:
    return b"[" + b",".join(item.json for item in stored) + b"]"
