"""Distinguishes control tokens of the chat template from control tokens in text of callers."""

import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, models

from engine.values.model import RenderedChat

_MARKS = [chr(code) for code in range(0xE0100, 0xE01F0)]
"""Variation selectors: they survive `strip`, JSON and `repr`, and no text has all of them."""

_NAMED_AS_CONTROL = re.compile(r"<[|｜].+[|｜]>", re.DOTALL)
_EDGE = "\U0010fffd"  # a private-use character around stand-ins


class ControlTokens:
    """Encodes rendered conversations: only the chat template can write control tokens.

    Before rendering, a mark is put after each character of a control token in callers' strings.
    Marks stay with the text, whatever the template does with it. After rendering, the control
    tokens without marks are the template's: stand-ins replace them, the marks are removed, and a
    tokenizer that knows the stand-ins instead of the control tokens encodes the text. So the text
    is split where the template wrote a token and nowhere else, in one call of the tokenizer.

    `replay` is the stand-in for an answer whose tokens are known already, `image` that for an image
    in a message's text. The `placeholder` that a template writes for an image is a control token,
    whatever its name.

    Safe in several threads: nothing changes after the constructor.
    """

    def __init__(self, backend: Tokenizer, placeholder: int | None = None) -> None:
        added: dict[int, AddedToken] = backend.get_added_tokens_decoder()
        control = {
            token_id: token
            for token_id, token in added.items()
            if is_control(token) or token_id == placeholder
        }
        nonce = secrets.token_hex(8)  # no caller can write a stand-in
        replaced = {
            token_id: AddedToken(
                f"{_EDGE}{nonce}.{token_id}{_EDGE}",
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                normalized=False,
            )
            for token_id, token in control.items()
        }
        self._finder = _finder(backend, added.values())
        replay = AddedToken(f"{_EDGE}{nonce}.replay{_EDGE}", special=True, normalized=False)
        image = AddedToken(f"{_EDGE}{nonce}.image{_EDGE}", special=True, normalized=False)
        self._encoder = _encoder(backend, [*{**added, **replaced}.values(), replay, image], nonce)
        self.replay = replay.content
        self.image = image.content
        self._replay_id = self._encoder.token_to_id(self.replay)
        self._image_ids = {self._encoder.token_to_id(self.image)}
        if placeholder in replaced:
            self._image_ids.add(self._encoder.token_to_id(replaced[placeholder].content))
        self._stand_ins: dict[int | None, AddedToken] = {
            self._finder.token_to_id(token.content): replaced[token_id]
            for token_id, token in control.items()
        }
        self._ids: dict[int | None, list[int]] = {
            self._encoder.token_to_id(token.content): [token_id]
            for token_id, token in {**added, **replaced}.items()
        }
        self._ids |= _spelled_out(backend.model, control)

    def written_in(self, strings: Sequence[str]) -> list[str]:
        """The strings that contain control tokens."""
        found = self._finder.encode_batch_fast(strings, add_special_tokens=False)
        return [
            text
            for text, encoding in zip(strings, found, strict=True)
            if not self._stand_ins.keys().isdisjoint(encoding.ids)
        ]

    def marked(self, text: str, mark: str) -> str:
        """The text with the mark after each character of its control tokens."""
        parts, end = [], 0
        for start, stop, _ in self._find(text):
            parts += [text[end:start], *(character + mark for character in text[start:stop])]
            end = stop
        return "".join([*parts, text[end:]])

    def encode(self, rendered: str, mark: str, replays: Iterable[Sequence[int]] = ()) -> list[int]:
        """Token ids of a rendered conversation. Control tokens with marks in them are text.

        `replays` has the tokens for each occurrence of `replay`, in order.
        """
        known = iter(replays)
        return [
            token_id
            for own in self._own_ids(rendered, mark)
            for token_id in (next(known) if own == self._replay_id else self._ids.get(own, (own,)))
        ]

    def encode_with_images(
        self,
        rendered: str,
        mark: str,
        replays: Iterable[Sequence[int]],
        images: Sequence[Sequence[int]],
    ) -> RenderedChat:
        """Token ids as `encode` makes them, with the tokens of each image in its place. Raises
        ValueError where the template has written another number of images.
        """
        own_ids = self._own_ids(rendered, mark)
        n_written = sum(own in self._image_ids for own in own_ids)
        if n_written != len(images):
            raise ValueError(f"the chat template writes {n_written} of {len(images)} images")
        known, waiting = iter(replays), iter(images)
        tokens, positions = list[int](), list[int]()
        for own in own_ids:
            if own in self._image_ids:
                positions.append(len(tokens))
                tokens += next(waiting)
            else:
                tokens += next(known) if own == self._replay_id else self._ids.get(own, (own,))
        return RenderedChat(tokens, positions)

    def _own_ids(self, rendered: str, mark: str) -> list[int]:
        """The ids of the tokenizer that knows stand-ins."""
        parts, end = [], 0
        for start, stop, stand_in in self._find(rendered):
            if mark not in rendered[start : max(stop, start + 2)]:
                parts += [rendered[end:start], stand_in.content]
                end = stop
        text = "".join([*parts, rendered[end:]]).replace(mark, "")
        ids: list[int] = self._encoder.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def _find(self, text: str) -> Iterator[tuple[int, int, AddedToken]]:
        """The start and end, in characters, and the stand-in of each control token in the text."""
        encoding = self._finder.encode_batch([text], add_special_tokens=False)[0]
        for (start, stop), found_id in zip(encoding.offsets, encoding.ids, strict=True):
            stand_in = self._stand_ins.get(found_id)
            if stand_in is not None:
                found = text[start:stop]  # with the white space that the token includes
                left = len(found) - len(found.lstrip()) if stand_in.lstrip else 0
                right = len(found) - len(found.rstrip()) if stand_in.rstrip else 0
                yield start + left, stop - right, stand_in


def is_control(token: AddedToken) -> bool:
    """Whether the token is special or named `<|...|>`: callers may not write it.

    Some tokenizers (DeepSeek's) do not mark the tokens that begin a turn as special. Callers may
    write other added tokens, such as `<think>` and `<tool_call>`.
    """
    if token.content.isspace():
        return False
    return token.special or _NAMED_AS_CONTROL.fullmatch(token.content) is not None


def new_mark(strings: Iterable[str]) -> str:
    """A character that none of the strings has. Raises ValueError if they have all candidates."""
    used = set().union(*strings)
    for mark in _MARKS:
        if mark not in used:
            return mark
    raise ValueError("there is every variation selector in them")


def _finder(backend: Tokenizer, added: Iterable[AddedToken]) -> Tokenizer:
    """A tokenizer that finds the same added tokens, and makes one token of the text between them.

    Unlike Python's `re`, it lets other threads run and takes time in proportion to the text.
    """
    finder = Tokenizer(models.WordLevel({_EDGE: 0}, unk_token=_EDGE))
    finder.normalizer = backend.normalizer
    finder.add_tokens(list(added))
    return finder


def _encoder(backend: Tokenizer, added: list[AddedToken], nonce: str) -> Tokenizer:
    """A tokenizer with the backend's model, which it shares, and with other added tokens."""
    encoder = Tokenizer(backend.model)
    encoder.normalizer = backend.normalizer
    encoder.pre_tokenizer = backend.pre_tokenizer
    vocabulary = backend.get_vocab(with_added_tokens=False)
    holes = max(vocabulary.values(), default=-1) + 1 - len(vocabulary)  # new ids begin at its size
    encoder.add_tokens([AddedToken(f"{_EDGE}{nonce}{hole}", special=True) for hole in range(holes)])
    encoder.add_tokens(added)
    return encoder


def _spelled_out(model: Any, control: Mapping[int, AddedToken]) -> dict[int | None, list[int]]:
    """Smaller pieces for each control token that is in the model's own vocabulary as well: a
    Unigram model would put it together from its characters.
    """
    unknown = {token.id for token in model.tokenize(_EDGE)}
    return {
        token_id: [
            piece.id
            for part in (token.content[:1], token.content[1:])
            for piece in model.tokenize(part)
        ]
        for token_id, token in control.items()
        if model.id_to_token(token_id) == token.content and token_id not in unknown
    }
