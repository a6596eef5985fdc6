"""Parts of a conversation that another server made: hosted tools' calls and results, and kinds of
which this server knows nothing.

No template has a form for them, so what they say becomes a text, and what says nothing to a model
is skipped. Every dialect reads them by this rule.
"""

import json
import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import pairwise

MAX_CHARACTERS = 4000
"""The longest text of one part: a search's results may be long pages."""

MAX_DEPTH = 16
OPAQUE_CHARACTERS = 256
"""An ASCII text as long as this without a space is data, as of an image, and no language: those
that are written without spaces have other letters."""

SILENT = frozenset(
    {
        "compaction_trigger",
        "container_upload",
        "fallback",
        "ghost_snapshot",
        "mcp_list_tools",
        "mcp_tool_listing",
    }
)
"""Kinds that say something to a server alone."""

HIDDEN = frozenset(
    {
        "annotations",
        "cache_control",
        "caller",
        "created_by",
        "encrypted_content",
        "execution",
        "fingerprint",
        "id",
        "pending_safety_checks",
        "signature",
        "status",
    }
)
"""Fields that say nothing to a model. So do those that end in `_id`."""

MAX_LOGGED = 8  # kinds, which are client input

log = logging.getLogger("rootstock.history")


class Note(str):
    """A text that is a paragraph of its own in what an assistant said."""

    __slots__ = ()


def joined(said: Iterable[str]) -> str:
    """What an assistant said, as one text, with empty lines around its notes."""
    pieces = ["", *filter(None, said)]
    return "".join(
        f"\n\n{text}" if before and Note in {type(before), type(text)} else text
        for before, text in pairwise(pieces)
    )


def foreign_note(kind: str, fields: Mapping[str, object]) -> Note | None:
    """What a part of this kind says to a model. None if it says nothing."""
    if kind in SILENT:
        return None
    told = _told({name: value for name, value in fields.items() if name != "type"}, MAX_DEPTH)
    if told is None:
        return None
    text = told if isinstance(told, str) else json.dumps(told, ensure_ascii=False)
    if len(text) > MAX_CHARACTERS:
        text = f"{text[:MAX_CHARACTERS]}... ({len(text) - MAX_CHARACTERS} more characters)"
    return Note(f"[{kind[:64]}: {text}]")


def log_foreign(kinds: Counter[str], request_id: str) -> None:
    """Log the number of parts of each of these kinds, which a request's history has."""
    if kinds:
        log.info("request %s: of other servers, in its history: %r", request_id, _most(kinds))


def log_dropped(kinds: Counter[str], request_id: str) -> None:
    """Log the number of tools of each of these kinds, which are not served."""
    if kinds:
        log.info("request %s: no such tools here: %r", request_id, _most(kinds))


def _most(kinds: Counter[str]) -> dict[str, int]:
    return {kind[:64]: n for kind, n in kinds.most_common(MAX_LOGGED)}


def _told(value: object, depth: int) -> object:
    """The value without what says nothing to a model; None if nothing is left."""
    match value:
        case str():
            is_opaque = value.startswith("data:") or _is_data(value)
            return None if is_opaque or not value.strip() else value
        case bool() | int() | float():
            return value
        case Mapping() if depth:
            found = {
                str(name): told
                for name, each in value.items()
                if not _is_hidden(str(name))
                and name != "type"
                and (told := _told(each, depth - 1)) is not None
            }
            if not found:
                return _told(value.get("type"), depth - 1)
            return found["text"] if found.keys() == {"text"} else found
        case list() if depth:
            return [told for each in value if (told := _told(each, depth - 1)) is not None] or None
        case _:
            return None


def _is_hidden(name: str) -> bool:
    return name in HIDDEN or name.endswith(("_id", "_ids"))


def _is_data(text: str) -> bool:
    head = text[:OPAQUE_CHARACTERS]
    return len(text) >= OPAQUE_CHARACTERS and head.isascii() and not any(map(str.isspace, head))
