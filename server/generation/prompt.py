"""Prompts: conversations as the arguments of a chat template, and text as tokens.

All of it is called in worker threads."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

from engine.api import PromptTooLong
from engine.values.images import Image
from engine.values.model import ModelCard, Replay, Tokenizer
from server.errors import ApiError, ContextTooLong, InvalidField
from server.generation.conversation import Conversation, Message, digests
from server.generation.efforts import Efforts
from server.generation.generic_tools import plain_conversation
from server.generation.history import AssistantTurn, Call, Replays
from server.generation.late_tools import (
    Declaration,
    ToolPlaces,
    description,
    read,
    with_late_tools,
)
from server.generation.plan import AnswerPlanner
from server.generation.request_fields import Prompt
from server.generation.template import (
    TemplateTraits,
    content_in_form,
    declared_tools,
    in_place,
    template_messages,
    traits_of,
    with_user_images,
)
from server.parsing.formats.json_calls import GENERIC

KEPT_DESCRIPTIONS = 64
"""Of late tools: a conversation sends its own with each turn."""


def template_arguments(body: Conversation, efforts: Efforts) -> dict[str, Any]:
    """The template's arguments besides the messages and the tools."""
    arguments: dict[str, Any] = {}
    if body.reasoning_effort is not None:
        arguments["reasoning_effort"] = efforts.told(body.reasoning_effort)
    if body.thinks is not None:
        arguments |= dict.fromkeys(efforts.switches, body.thinks)
    arguments |= body.chat_template_kwargs
    if body.continue_final_message:
        arguments |= {"continue_final_message": True, "add_generation_prompt": False}
    if not body.add_generation_prompt:
        arguments["add_generation_prompt"] = False
    return arguments


def found_replays(
    replays: Replays,
    messages: Sequence[Message],
    cache_salt: str,
    conversations: Iterable[bytes],
) -> dict[int, Replay]:
    """The tokens of answers that this server wrote, by the index of their message.
    `conversations` are the digests of what is before each message with calls.
    """
    found, before = {}, iter(conversations)
    for index, message in enumerate(messages):
        if not message.calls:
            continue
        conversation = next(before)
        if not replays.knows(cache_salt, conversation, [call.id for call in message.calls]):
            continue  # before the arguments are parsed
        replay = replays.find(cache_salt, _turn(message, conversation))
        if replay is not None:
            found[index] = replay
    return found


def _turn(message: Message, conversation: bytes) -> AssistantTurn:
    return AssistantTurn(
        [Call(call.id, call.name, _parsed(call.arguments)) for call in message.calls],
        message.text,
        message.reasoning,
        conversation,
    )


def _parsed(arguments: str) -> object:
    """The value of the JSON; text that is none stays as it is."""
    try:
        return json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments


class ChatPrompt(NamedTuple):
    """The tokens of a conversation, and the images that some of them stand for."""

    tokens: tuple[int, ...]
    images: tuple[Image, ...] = ()

    @property
    def image_tokens(self) -> int:
        """How many of the tokens stand for images."""
        return sum(image.n_tokens for image in self.images)


class _Rendering(NamedTuple):
    """The arguments of a chat template."""

    messages: Sequence[Mapping[str, object]]
    replays: Mapping[int, Replay]
    arguments: Mapping[str, Any]


class PromptEncoder:
    """Turns what clients send into token ids."""

    def __init__(self, tokenizer: Tokenizer, planner: AnswerPlanner, card: ModelCard) -> None:
        self._tokenizer = tokenizer
        self._planner = planner
        self._card = card
        self._image_text = tokenizer.image_stand_in if card.images is not None else ""
        self.traits = traits_of(tokenizer, takes_images=card.images is not None)
        """What the model's chat template takes."""
        self.efforts = Efforts(tokenizer.chat_template)
        self._describe = lru_cache(KEPT_DESCRIPTIONS)(partial(description, tokenizer, self.traits))

    def chat(
        self,
        conversation: Conversation,
        replays: Replays,
        cache_salt: str,
        param: str = "messages",
    ) -> ChatPrompt:
        """The conversation, which is in the field `param`, ready for the assistant's turn, with the
        tokens of answers that this server wrote under the same `cache_salt`. Its images are
        prepared.

        Raises ApiError (400) with the template's words when it refuses the messages, and when they
        have more tokens than a sequence may have.
        """
        images = conversation.images
        prepared = [part.prepared for part in images if part.prepared is not None]
        assert len(prepared) == len(images), "images are prepared before their prompt is made"
        positions = list[int]()

        def encode() -> Sequence[int]:
            messages, known, arguments = self._rendering(conversation, replays, cache_salt)
            if not prepared:
                return self._tokenizer.apply_chat_template(messages, known, **arguments)
            if self.traits.images == "none":
                raise ValueError("the chat template renders no images")
            shown = [image.tokens for image in prepared]
            rendered = self._tokenizer.render_with_images(messages, shown, known, **arguments)
            positions[:] = rendered.positions
            return rendered.tokens

        image_tokens = sum(image.image.n_tokens for image in prepared)
        tokens = bounded(encode, self._card, param, image_tokens)
        placed = zip(prepared, positions, strict=True)
        return ChatPrompt(tokens, tuple(image.at(position) for image, position in placed))

    def _rendering(
        self, conversation: Conversation, replays: Replays, cache_salt: str
    ) -> "_Rendering":
        """What the template is given."""
        given = conversation.messages
        tools, told = self._placed(conversation, replays.tool_places, cache_salt)
        is_about_tools = bool(tools) or any(message.is_about_calls for message in given)
        is_generic = self._planner.tools is GENERIC and is_about_tools
        traits = replace(self.traits, system="system") if is_generic else self.traits
        if traits.result_images == "user" and not is_generic:
            told = with_user_images(told)
        messages = in_place(told, traits)
        before = [
            digest for message, digest in zip(given, digests(given), strict=False) if message.calls
        ]
        known = found_replays(replays, messages, cache_salt, before)
        arguments = template_arguments(conversation, self.efforts)
        if is_generic:  # whose system turn has the tools, whatever its role
            return self._with_generic_tools(messages, tools, known, arguments)
        if tools:
            arguments["tools"] = declared_tools(map(read, tools), self.traits)
        shown = template_messages(messages, self.traits, self._image_text)
        return _Rendering(shown, known, arguments)

    def _placed(
        self, conversation: Conversation, places: ToolPlaces, cache_salt: str
    ) -> tuple[Sequence[Declaration], Sequence[Message]]:
        """The tools that the template renders, and the messages with the others. There are none to
        render where none may be called, and nothing that could be forbidden begins a call.
        """
        if not conversation.concerns_tools:
            return (), conversation.messages
        placed = places.place(conversation, cache_salt)
        may_call = self._planner.marker or conversation.callable_tools
        told = with_late_tools(conversation.messages, placed, self._describe)
        return placed.head if may_call else (), told

    def _with_generic_tools(
        self,
        messages: Sequence[Message],
        tools: Sequence[Declaration],
        replays: Mapping[int, Replay],
        arguments: Mapping[str, Any],
    ) -> "_Rendering":
        """The conversation for a template that has no tools. `replays` are by message."""
        strings, text = TemplateTraits(images="text"), self._image_text
        declared = declared_tools(map(read, tools), strings)
        shown = template_messages(messages, strings, text)
        plain = plain_conversation(shown, declared, self.traits.system)
        known = {plain.places[index]: replay for index, replay in replays.items()}
        rendered = [content_in_form(message, self.traits, text) for message in plain.messages]
        return _Rendering(rendered, known, arguments)

    def text(
        self, prompt: Prompt, *, add_special_tokens: bool = True, param: str = "prompt"
    ) -> tuple[int, ...]:
        """A bare prompt, or another text, of the field `param`; token ids are taken as they are.

        Raises ApiError (400) for one of more tokens than a sequence may have.
        """

        def encode() -> Sequence[int]:
            if not isinstance(prompt, str):
                return prompt
            return self._tokenizer.encode(prompt, add_special_tokens=add_special_tokens)

        return bounded(encode, self._card, param)

    def echo(self, prompt: Prompt) -> str:
        """A bare prompt as text."""
        return prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt)

    def decode(self, tokens: Sequence[int], param: str) -> str:
        """Text of tokens from a client, special tokens included.

        Raises ApiError (400) for more than a sequence may have, and for some that are none.
        """
        taken = bounded(lambda: tokens, self._card, param)
        check_token_ids(taken, self._card, param)
        return self._tokenizer.decode(taken)

    def bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The tokens of each of `bad_words`, as at the beginning of a text and, as vLLM has it,
        after a space. White space before a word does not count, unless it is the word.

        Raises ApiError (400) for a word without tokens, or with one that the model does not have.
        """
        texts = [text for word in words for text in _beginning_and_middle(word)]
        encoded = [tuple(self._tokenizer.encode(text, add_special_tokens=False)) for text in texts]
        for text, tokens in zip(texts, encoded, strict=True):
            if not tokens:
                raise InvalidField("bad_words", f"{text!r} has no tokens")
            check_token_ids(tokens, self._card, "bad_words")
        return tuple(dict.fromkeys(encoded))


def bounded(
    encode: Callable[[], Sequence[int]], card: ModelCard, param: str, image_tokens: int = 0
) -> tuple[int, ...]:
    """The tokens of the field `param`, which `encode` makes; `image_tokens` of them are of images.
    Raises ApiError (400) where they are more than a sequence may have, or none can be made.
    """
    try:
        tokens = tuple(encode())
    except PromptTooLong as error:
        raise too_long(f"at least {error.at_least_tokens}", card, param) from error
    except ValueError as error:
        raise InvalidField(param, f"cannot be turned into a prompt: {error}") from error
    if len(tokens) > card.max_sequence_tokens:
        raise too_long(str(len(tokens)), card, param, image_tokens)
    return tokens


def _beginning_and_middle(word: str) -> tuple[str, ...]:
    """A bad word's text where it begins an output, and where it is in the midst of one."""
    bare = word.lstrip()
    return (bare, f" {bare}") if bare else (word,)


def check_prompt(prompt: tuple[int, ...], card: ModelCard, param: str) -> None:
    """Raise ApiError (400) unless the prompt has tokens, all of them the model's."""
    if not prompt:
        raise InvalidField(param, "the prompt is empty")
    check_token_ids(prompt, card, param)


def check_token_ids(tokens: Sequence[int], card: ModelCard, param: str) -> None:
    """Raise ApiError (400) unless all of them are the model's."""
    if tokens and not 0 <= min(tokens) <= max(tokens) < card.vocab_size:
        raise InvalidField(param, f"token ids must be within 0 and {card.vocab_size - 1}")


def too_long(tokens: str, card: ModelCard, param: str, image_tokens: int = 0) -> ApiError:
    """The prompt is too long. `image_tokens` of its tokens are of images."""
    limit, whose = min(
        (card.max_context_tokens, ""), (card.arena_tokens, ", all that the KV cache holds")
    )
    return ContextTooLong(tokens, limit, whose, param, image_tokens)
