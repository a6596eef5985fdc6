"""The tokens with which calls begin in free text."""

import string
from dataclasses import dataclass

from engine.values.model import Tokenizer
from server.parsing.answer import ToolFormat


@dataclass(frozen=True, slots=True)
class CallMarker:
    """The tokens that begin calls and no other text, and the part of a call that they spell. The
    `spellings` are other tokens with that text at their end.
    """

    tokens: tuple[int, ...]
    text: str
    spellings: frozenset[tuple[int, ...]] = frozenset()


_BEFORE_CALLS = ("", *string.printable, *("\n\n", ".\n", ".\n\n", ":\n", ":\n\n", "```\n", '".'))
"""Texts before a marker, with which its first characters may be one token."""


def marker_of(tools: ToolFormat, tokenizer: Tokenizer) -> CallMarker | None:
    """What begins calls in free text. Text may be spelled in other tokens, so a marker has to begin
    with an added token, unless the format is found by its text. After the last added token, the
    last token may merge with the following text and does not count.
    """
    added = tokenizer.added_tokens
    for text in tools.begins:
        if text in added:
            return CallMarker((added[text],), text)
    if tools.found_by == "text":
        return _spelled_marker(tools.begins[0], tokenizer)
    ids = frozenset(added.values())
    for text in tools.begins:
        tokens = tokenizer.encode(text, add_special_tokens=False)
        first = next((at for at, token in enumerate(tokens) if token in ids), len(tokens))
        if run := tokens[first:] if tokens[-1] in ids else tokens[first:-1]:
            return CallMarker(tuple(run), tokenizer.decode(run))
    return None


def _spelled_marker(text: str, tokenizer: Tokenizer) -> CallMarker | None:
    """The marker without its last character, as the tokenizer spells it after any usual text. None
    if that character is always part of a longer token.
    """
    begin = text[:-1]
    runs = dict[tuple[int, ...], None]()
    for before in _BEFORE_CALLS:
        *tokens, _ = tokenizer.encode(before + text, add_special_tokens=False)
        for start in reversed(range(len(tokens))):
            if tokenizer.decode(tokens[start:]).endswith(begin):
                runs[tuple(tokens[start:])] = None
                break
    if not runs:
        return None
    first, *others = runs
    return CallMarker(first, begin, frozenset(others))
