"""Replaces answers in a rendered conversation by the tokens that were generated for them."""

import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise, takewhile
from typing import Any, TypeAlias

from engine.values.model import Replay

TemplateMessage: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Placeholder:
    """The place of an answer in a rendered outline.

    `index` is the index of the message. `fields` are the words that were rendered, in order: `r`
    for reasoning, `c` for content.
    """

    index: int
    fields: str
    start: int
    end: int


class Outline:
    """A conversation in which each answer to be replayed is replaced by a random word.

    A template may render a tool call as different JSON than the model wrote. So the conversation
    and its outline are both rendered: an answer to replay is where they differ.
    """

    def __init__(self, messages: Sequence[TemplateMessage], replays: Mapping[int, Replay]) -> None:
        """The keys of `replays` are indices of messages."""
        nonce = secrets.token_hex(16)  # no caller can write the words
        self._replays = dict(sorted(replays.items()))
        self._words = re.compile(f"{nonce}x([0-9]+)x([rc])")
        self.messages: list[TemplateMessage] = [
            _outlined(message, replays[index], f"{nonce}x{index}x") if index in replays else message
            for index, message in enumerate(messages)
        ]

    def spliced(
        self, conversation: str, outline: str, messages: Sequence[TemplateMessage], stand_in: str
    ) -> tuple[str, list[tuple[int, ...]]]:
        """The rendered conversation with a stand-in for each answer, and the answers' tokens.

        The conversation was rendered from `messages`. An answer stays as the template wrote it if
        the outline does not show its place, if the template leaves out its reasoning, or if the
        text there differs from the message.
        """
        placeholders = list(self._placeholders(outline))
        if [one.index for one in placeholders] != list(self._replays):
            return conversation, []
        edges = [0, *(edge for one in placeholders for edge in (one.start, one.end)), len(outline)]
        pieces = [outline[start:end] for start, end in zip(edges[::2], edges[1::2], strict=True)]
        gaps = _gaps(conversation, _trimmed(pieces))
        if gaps is None:
            return conversation, []
        parts, replayed, end = [], [], 0
        for one, (before, after), gap in zip(placeholders, pairwise(pieces), gaps, strict=True):
            answer, replay = conversation[slice(*gap)], self._replays[one.index]
            if not (_says(answer, messages[one.index]) and _has_reasoning(answer, one, replay)):
                continue
            lead = _common(before[len(before.rstrip()) :], answer)
            trail = _common(after[: len(after) - len(after.lstrip())][::-1], answer[::-1])
            opening = _without(conversation[end : gap[0]] + lead, replay) + replay.opened
            parts += [opening, stand_in]
            replayed.append(replay.tokens)
            end = gap[1] - len(trail)
        return "".join([*parts, conversation[end:]]), replayed

    def _placeholders(self, outline: str) -> Iterator[_Placeholder]:
        words = self._words.finditer(outline)
        for index, group in groupby(words, key=lambda word: int(word[1])):
            own = list(group)
            fields = "".join(word[2] for word in own)
            yield _Placeholder(index, fields, own[0].start(), own[-1].end())


def _outlined(message: TemplateMessage, replay: Replay, word: str) -> TemplateMessage:
    """The message with random words as content and reasoning, and without its tool calls."""
    fields = {
        key: f"{word}r" if _is_reasoning(value, replay) else value
        for key, value in message.items()
        if key != "tool_calls"
    }
    said = f"{word}c"
    has_parts = isinstance(message.get("content"), list)
    return {**fields, "content": [{"type": "text", "text": said}] if has_parts else said}


def _is_reasoning(value: object, replay: Replay) -> bool:
    """Whether a field is the reasoning. Clients and templates have many names for it."""
    reasoning = replay.reasoning.strip()
    return isinstance(value, str) and bool(reasoning) and value.strip() == reasoning


def _trimmed(pieces: Sequence[str]) -> list[str]:
    """The pieces without the white space next to answers, which templates add around content."""
    first, *others = pieces
    *inner, last = others
    return [first.rstrip(), *(piece.strip() for piece in inner), last.lstrip()]


def _gaps(text: str, pieces: Sequence[str]) -> list[tuple[int, int]] | None:
    """The start and end of each gap between the pieces in the text. None if the pieces are not
    there in this order, or if there is more than one way to place them: then searching from the
    left and from the right finds different places.
    """
    first, *inner, last = pieces
    start, stop = len(first), len(text) - len(last)
    if start > stop or not text.startswith(first) or not text.endswith(last):
        return None
    forward, position = [], start
    for piece in inner:
        position = text.find(piece, position, stop)
        if position < 0:
            return None
        forward.append(position)
        position += len(piece)
    backward, position = [], stop
    for piece in reversed(inner):
        position = text.rfind(piece, start, position)
        backward.append(position)
    if forward != backward[::-1]:
        return None
    starts = [start, *(at + len(piece) for at, piece in zip(forward, inner, strict=True))]
    return list(zip(starts, [*forward, stop], strict=True))


def _common(one: str, other: str) -> str:
    """The longest common prefix of two texts."""
    pairs = zip(one, other, strict=False)
    return "".join(left for left, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _says(answer: str, message: TemplateMessage) -> bool:
    """Whether a rendered answer has the message's content and the names of its calls, in order."""
    position = 0
    for call in message.get("tool_calls") or ():
        name = call.get("function", call)["name"]
        position = answer.find(name, position)
        if position < 0:
            return False
        position += len(name)
    return all(_squeezed(text) in _squeezed(answer) for text in _texts(message))


def _texts(message: TemplateMessage) -> list[str]:
    """The texts of a message's content, which is one string or a list of parts."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return [content]
    return [part["text"] for part in content if "text" in part]


def _has_reasoning(answer: str, placeholder: _Placeholder, replay: Replay) -> bool:
    """Whether the rendered answer still has all of the reasoning, if there was any."""
    reasoning = replay.reasoning.strip()
    if not reasoning:
        return placeholder.fields == "c"
    return placeholder.fields == "rc" and _squeezed(reasoning) in _squeezed(answer)


def _without(text: str, replay: Replay) -> str:
    """The text without the markup at its end that the replayed answer begins with.

    Templates write the markers of reasoning in every answer. In a replay they are part of the
    generated tokens, or of what was opened before them.
    """
    markup = (replay.opened + replay.thinking).partition(replay.reasoning.strip() or "\0")[0]
    position = len(text)
    for character in reversed(_squeezed(markup)):
        while position and text[position - 1].isspace():
            position -= 1
        if not position or text[position - 1] != character:
            return text
        position -= 1
    if position == len(text):
        return text
    white = markup[: len(markup) - len(markup.lstrip())]
    return text[:position].removesuffix(white)


def _squeezed(text: str) -> str:
    """The text without white space, which templates add and strip."""
    return "".join(text.split())
