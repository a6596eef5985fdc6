"""Chat templates and tokenization, in the worker threads."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import TypeVar

from engine.api import PromptTooLong
from engine.values.model import NO_REPLAYS, ModelCard, Replay, Tokenizer
from server.errors import invalid
from server.generation.completion_request import Prompt
from server.generation.conversation import Message
from server.generation.engine_requests import check_token_ids, too_long
from server.generation.history import (
    WriteArguments,
    as_object,
    as_text,
    has_thought_preamble,
    preamble_as_thought,
    template_messages,
)
from server.generation.roles import Roles, roles_of
from server.record import RequestRecord
from server.workers import Workers

T = TypeVar("T")

FindReplays = Callable[[], Mapping[int, Replay]]
"""Finds the tokens of answers that this server wrote, by the index of their message. Called in a
worker thread."""


def no_replays() -> Mapping[int, Replay]:
    """The FindReplays of prompts without a history."""
    return NO_REPLAYS


def no_arguments() -> Mapping[str, object]:
    """No arguments of a template but the messages."""
    return {}


class PromptEncoder:
    """Turns what clients send into token ids, in the worker threads."""

    def __init__(self, tokenizer: Tokenizer, card: ModelCard, workers: Workers) -> None:
        self._tokenizer = tokenizer
        self._card = card
        self._workers = workers

    @cached_property
    def roles(self) -> Roles:
        """The roles of the model's template, tried out at first use."""
        return roles_of(self._tokenizer)

    async def chat(
        self,
        record: RequestRecord,
        messages: Sequence[Message],
        arguments: Callable[[], Mapping[str, object]] = no_arguments,
        replays: FindReplays = no_replays,
    ) -> tuple[int, ...]:
        """The conversation, ready for the assistant's turn; `arguments` makes the template's.

        Raises ApiError (400) with the template's words when it refuses the messages, and when they
        have more tokens than a sequence may have.
        """

        def encode() -> list[int]:
            fitted, known = self._fitted(messages), replays()
            try:
                return render(fitted, known, as_object)
            except ValueError:
                if not any(message.calls for message in messages):
                    raise
                return render(fitted, known, as_text)

        def render(
            messages: Sequence[Message], known: Mapping[int, Replay], written: WriteArguments
        ) -> list[int]:
            conversation = template_messages(messages, written)
            return self._tokenizer.apply_chat_template(conversation, known, **arguments())

        return await self._encode(record, encode, "messages")

    def _fitted(self, messages: Sequence[Message]) -> Sequence[Message]:
        """The messages, with texts before calls moved to where the template renders them."""
        if any(map(has_thought_preamble, messages)) and self.roles.preambles == "reasoning":
            return [preamble_as_thought(message) for message in messages]
        return messages

    async def text(
        self,
        record: RequestRecord,
        prompt: Prompt,
        *,
        add_special_tokens: bool = True,
        param: str = "prompt",
    ) -> tuple[int, ...]:
        """A bare prompt, or another text, of the field `param`; token ids are taken as they are.

        Raises ApiError (400) for one of more tokens than a sequence may have.
        """
        if not isinstance(prompt, str):
            return await self._run(record, partial(self._bounded, prompt, param))
        return await self._encode(
            record,
            lambda: self._tokenizer.encode(prompt, add_special_tokens=add_special_tokens),
            param,
        )

    async def echo(self, record: RequestRecord, prompt: Prompt) -> str:
        """A bare prompt as text."""
        if isinstance(prompt, str):
            return prompt
        return await self._run(record, lambda: self._tokenizer.decode(prompt))

    async def decode(self, record: RequestRecord, tokens: Sequence[int], param: str) -> str:
        """Text of tokens from a client, special tokens included.

        Raises ApiError (400) for more than a sequence may have, and for some that are none.
        """

        def decode() -> str:
            bounded = self._bounded(tokens, param)
            check_token_ids(bounded, self._card, param)
            return self._tokenizer.decode(bounded)

        return await self._run(record, decode)

    def bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The tokens of each of `bad_words`, as at the beginning of a text and, as vLLM has it,
        after a space. White space before a word does not count, unless it is the word. Called in
        a worker thread.

        Raises ApiError (400) for a word without tokens, or with one that the model does not have.
        """
        texts = [text for word in words for text in _beginning_and_middle(word)]
        encoded = [tuple(self._tokenizer.encode(text, add_special_tokens=False)) for text in texts]
        for text, tokens in zip(texts, encoded, strict=True):
            if not tokens:
                raise invalid(f"bad_words: {text!r} has no tokens", "bad_words")
            check_token_ids(tokens, self._card, "bad_words")
        return tuple(dict.fromkeys(encoded))

    async def _run(self, record: RequestRecord, function: Callable[[], T]) -> T:
        return await self._workers.prepare(record, function)

    async def _encode(
        self, record: RequestRecord, encode: Callable[[], list[int]], param: str
    ) -> tuple[int, ...]:
        try:
            return await self._run(record, lambda: self._bounded(encode(), param))
        except PromptTooLong as error:
            raise too_long(f"at least {error.at_least_tokens}", self._card, param) from error
        except ValueError as error:
            raise invalid(f"{param} cannot be turned into a prompt: {error}", param) from error

    def _bounded(self, prompt: Sequence[int], param: str) -> tuple[int, ...]:
        if len(prompt) > self._card.max_sequence_tokens:
            raise too_long(str(len(prompt)), self._card, param)
        return tuple(prompt)


def _beginning_and_middle(word: str) -> tuple[str, ...]:
    """A bad word's text where it begins an output, and where it is in the midst of one."""
    bare = word.lstrip()
    return (bare, f" {bare}") if bare else (word,)
