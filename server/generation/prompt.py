"""Prompts: conversations as the arguments of a chat template, and text as tokens.

All of it is called in worker threads."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Literal

from engine.api import PromptTooLong
from engine.values.model import ModelCard, Replay, Tokenizer
from server.errors import ApiError, ContextTooLong, InvalidField
from server.generation.conversation import Conversation, Message, TextPart, digests
from server.generation.generic_tools import SystemRole, plain_conversation
from server.generation.history import AssistantTurn, Call, Replays
from server.generation.request_fields import Prompt
from server.generation.tools import CustomToolCall, FunctionToolCall
from server.parsing.answer import ToolFormat
from server.parsing.formats.json_calls import GENERIC

NO_EFFORT = "none"
KNOWN_EFFORTS = {"xhigh": "high", "max": "high"}
"""Efforts that templates do not know, as the highest that they do."""
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""The names that templates use: most the first, gpt-oss's the last."""

ROLES = {"developer": "system", "function": "tool"}
"""The names of these roles in templates."""

ChatMessage = dict[str, Any]
"""The fields of a Message, which a Conversation validates."""

WriteArguments = Callable[[str], object]
"""Makes a call's arguments, given as JSON text, into the template's value."""


def as_object(arguments: str) -> object:
    """An object, as most templates expect; text that is none stays as it is."""
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def as_text(arguments: str) -> object:
    """Text, as DeepSeek's templates expect, which concatenate it."""
    return arguments or "{}"


def template_messages(
    messages: Sequence[Message], arguments: WriteArguments = as_object
) -> list[Mapping[str, object]]:
    """The messages for the template. Tool results get the names of their functions."""
    names: dict[str, str] = {}
    rendered = []
    for message in messages:
        for call in message.calls:
            names[call.id] = call.function.name
        rendered.append(_template_message(message, names, arguments))
    return rendered


def in_place(messages: Sequence[Message], roles: "Roles") -> Sequence[Message]:
    """The messages in roles that the template renders where they stand.

    Where it has no place for later system messages, those at the head are one, and later ones are
    what the user says, in a `<system-reminder>` as Claude Code writes them. Where it takes nothing
    but an answer after tool results, what the user says there is a part of the last result.
    """
    joined = {("user", "reminder"), ("reminder", "user"), ("reminder", "reminder")}
    if roles.late_system == "user":
        joined.add(("system", "system"))
    if roles.behind_results == "tool":
        joined |= {("tool", "user"), ("tool", "reminder")}
    placed: list[Message] = []
    has_begun = False
    last = ""
    for message in messages:
        said, kind = message, ROLES.get(message.role, message.role)
        has_begun = has_begun or kind != "system"
        if kind == "system" and has_begun and roles.late_system == "user":
            said, kind = _reminder(message), "reminder"
        if (last, kind) in joined:
            parts = [*(placed[-1].content or ()), *(said.content or ())]
            placed[-1] = placed[-1].model_copy(update={"content": parts})
            last = last if last == "tool" else kind
        else:
            placed.append(said)
            last = kind
    return placed


def _reminder(message: Message) -> Message:
    text = f"<system-reminder>\n{_text(message)}\n</system-reminder>"
    part = TextPart(type="text", text=text)
    return message.model_copy(update={"role": "user", "content": [part]})


def has_thought_preamble(message: Message) -> bool:
    """Whether it has reasoning, then text, then a call."""
    return bool(message.calls and _reasoning(message) and _text(message))


def fold_text_into_reasoning(message: Message) -> Message:
    """The message with its text as part of the reasoning, for templates that render one of them."""
    if not has_thought_preamble(message):
        return message
    thought = f"{_reasoning(message)}\n\n{_text(message)}"
    return message.model_copy(update={"content": None, "reasoning_content": thought})


def template_arguments(body: Conversation) -> dict[str, Any]:
    """The template's arguments besides the messages."""
    arguments: dict[str, Any] = {}
    if body.reasoning_effort is not None:
        effort = body.reasoning_effort
        arguments["reasoning_effort"] = KNOWN_EFFORTS.get(effort, effort)
        if effort == NO_EFFORT:
            arguments["enable_thinking"] = False
    arguments |= body.chat_template_kwargs
    if body.continue_final_message:
        arguments |= {"continue_final_message": True, "add_generation_prompt": False}
    if not body.add_generation_prompt:
        arguments["add_generation_prompt"] = False
    if tools := _declared(body):
        arguments["tools"] = tools
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
        calls = message.calls
        if not calls:
            continue
        conversation = next(before)
        if not replays.knows(cache_salt, conversation, [call.id for call in calls]):
            continue  # before the arguments are parsed
        replay = replays.find(cache_salt, _turn(message, calls, conversation))
        if replay is not None:
            found[index] = replay
    return found


def _turn(
    message: Message, calls: Sequence[FunctionToolCall | CustomToolCall], conversation: bytes
) -> AssistantTurn:
    return AssistantTurn(
        [Call(call.id, call.function.name, as_object(call.function.arguments)) for call in calls],
        _text(message),
        _reasoning(message),
        conversation,
    )


def _reasoning(message: Message) -> str | None:
    return message.reasoning_content or message.reasoning


def _text(message: Message) -> str:
    return "\n".join(part.text for part in message.content or ())


def _declared(body: Conversation) -> list[dict[str, Any]]:
    """The tools in the prompt: with a named choice all, so that the prompt is the same from turn to
    turn; with `none` none."""
    if body.tool_choice == "none":
        return []
    return [tool.for_template() for tool in body.tools]


def _template_message(
    message: Message, names: Mapping[str, str], arguments: WriteArguments
) -> Mapping[str, object]:
    """One string of content, and a role that templates know.

    A template that does not know `developer` would render a role that its model never saw; one that
    does treats `system` alike.
    """
    fields: dict[str, object] = {
        "role": ROLES.get(message.role, message.role),
        "content": _text(message),
    }
    name = message.name or names.get(message.answered_call or "")
    if name:
        fields["name"] = name
    if calls := message.calls:
        fields["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": arguments(call.function.arguments),
                },
            }
            for call in calls
        ]
    if message.answered_call is not None:
        fields["tool_call_id"] = message.answered_call
    if reasoning := _reasoning(message):
        fields |= dict.fromkeys(REASONING_FIELDS, reasoning)
    return fields


_WORD = "somethingthatissaid"
_CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": {}}}
_RESULT: Sequence[Mapping[str, object]] = (
    {"role": "user", "content": "A"},
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "abcdefghi", "name": "f", "content": _WORD},
)
_BEHIND_RESULT = (
    *_RESULT[:-1],
    {**_RESULT[-1], "content": "B"},
    {"role": "user", "content": _WORD},
)
_LATE_SYSTEM = (
    {"role": "system", "content": "A"},
    {"role": "user", "content": "B"},
    {"role": "system", "content": _WORD},
    {"role": "assistant", "content": "C"},
    {"role": "user", "content": "D"},
)


def _called(content: str, reasoning: str) -> Sequence[Mapping[str, object]]:
    thoughts = dict.fromkeys(REASONING_FIELDS, reasoning)
    call = {**_RESULT[1], "content": content, **thoughts}
    return (_RESULT[0], call, {**_RESULT[2], "content": "B"})


_SYSTEM = ({"role": "system", "content": _WORD}, {"role": "user", "content": "A"})
_PREAMBLE = _called(_WORD, "C")
_THOUGHT_PREAMBLE = _called("", f"C\n\n{_WORD}")


@dataclass(frozen=True, slots=True)
class Roles:
    """The roles or fields under which a template renders what not every template can.

    `late_system`: the role of system messages after the first. `behind_results`: the role of a user
    message right after tool results. `preambles`: the field of an assistant's text before a call,
    where there is reasoning too. `system`: the role of the system messages before all others, where
    the server describes the tools.
    """

    late_system: Literal["system", "user"]
    behind_results: Literal["user", "tool"]
    preambles: Literal["content", "reasoning"]
    system: SystemRole


def roles_of(tokenizer: Tokenizer) -> Roles:
    """The roles with which the model's template raises no error and leaves nothing out."""
    renders = partial(_template_renders, tokenizer)
    has_late_system = renders(_LATE_SYSTEM)
    needs_an_answer = renders(_RESULT) and not renders(_BEHIND_RESULT)
    wants_one = not renders(_PREAMBLE) and renders(_THOUGHT_PREAMBLE)
    return Roles(
        late_system="system" if has_late_system else "user",
        behind_results="tool" if needs_an_answer else "user",
        preambles="reasoning" if wants_one else "content",
        system="system" if renders(_SYSTEM) else "user",
    )


def _template_renders(tokenizer: Tokenizer, messages: Sequence[Mapping[str, object]]) -> bool:
    try:
        return _WORD in tokenizer.decode(tokenizer.apply_chat_template(messages))
    except ValueError:
        return False


@dataclass(slots=True)
class Turn:
    """Consecutive parts of one role, assembled from a dialect's own parts."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[ChatMessage] = field(default_factory=list)
    answered_call: str | None = None  # the id of the call whose result it is

    def add(self, other: "Turn") -> None:
        self.texts += other.texts
        self.thoughts += other.thoughts
        self.calls += other.calls

    def add_call(self, id: str, name: str, arguments: str) -> None:
        """The arguments are JSON."""
        function = {"name": name, "arguments": arguments}
        self.calls.append({"id": id, "type": "function", "function": function})

    def message(self) -> ChatMessage:
        """The turn as one message. An assistant's texts are concatenated, others joined by line
        breaks.
        """
        message: ChatMessage = {"role": self.role}
        if self.texts or self.role != "assistant":
            message["content"] = ("" if self.role == "assistant" else "\n").join(self.texts)
        if self.thoughts:
            message["reasoning_content"] = "".join(self.thoughts)
        if self.calls:
            message["tool_calls"] = self.calls
        if self.answered_call is not None:
            message["tool_call_id"] = self.answered_call
        return message


def _concerns_tools(message: Mapping[str, object]) -> bool:
    """Whether the message has calls, or is the result of one."""
    return message["role"] == "tool" or "tool_calls" in message


class PromptEncoder:
    """Turns what clients send into token ids."""

    def __init__(self, tokenizer: Tokenizer, tools: ToolFormat | None, card: ModelCard) -> None:
        """`tools` is the format of the model's calls; None for a model that calls none."""
        self._tokenizer = tokenizer
        self._tools = tools
        self._card = card

    @cached_property
    def roles(self) -> Roles:
        """The roles of the model's template, tried out at first use."""
        return roles_of(self._tokenizer)

    def chat(
        self, conversation: Conversation, replays: Replays, cache_salt: str
    ) -> tuple[int, ...]:
        """The conversation, ready for the assistant's turn, with the tokens of answers that this
        server wrote under the same `cache_salt`.

        Raises ApiError (400) with the template's words when it refuses the messages, and when they
        have more tokens than a sequence may have.
        """
        messages = conversation.messages

        def encode() -> list[int]:
            placed = in_place(messages, self.roles)
            before = [
                digest
                for message, digest in zip(messages, digests(messages), strict=False)
                if message.calls
            ]
            fitted, known = self._fitted(placed), found_replays(replays, placed, cache_salt, before)
            arguments = template_arguments(conversation)

            def render(written: WriteArguments) -> list[int]:
                rendered = template_messages(fitted, written)
                is_about_tools = conversation.tools or any(map(_concerns_tools, rendered))
                if self._tools is GENERIC and is_about_tools:
                    return self._with_generic_tools(rendered, known, arguments)
                return self._tokenizer.apply_chat_template(rendered, known, **arguments)

            try:
                return render(as_object)
            except ValueError:
                if not any(message.calls for message in messages):
                    raise
                return render(as_text)

        return bounded(encode, self._card, "messages")

    def _with_generic_tools(
        self,
        messages: Sequence[Mapping[str, object]],
        replays: Mapping[int, Replay],
        arguments: Mapping[str, Any],
    ) -> list[int]:
        """The conversation for a template that has no tools. `replays` are by message."""
        others = {**arguments}
        plain = plain_conversation(messages, others.pop("tools", ()), self.roles.system)
        known = {plain.places[index]: replay for index, replay in replays.items()}
        return self._tokenizer.apply_chat_template(plain.messages, known, **others)

    def _fitted(self, messages: Sequence[Message]) -> Sequence[Message]:
        """The messages, with texts before calls moved to where the template renders them."""
        if any(map(has_thought_preamble, messages)) and self.roles.preambles == "reasoning":
            return [fold_text_into_reasoning(message) for message in messages]
        return messages

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


def bounded(encode: Callable[[], Sequence[int]], card: ModelCard, param: str) -> tuple[int, ...]:
    """The tokens of the field `param`, which `encode` makes. Raises ApiError
    (400) where they are more than a sequence may have, or none can be made.
    """
    try:
        tokens = tuple(encode())
    except PromptTooLong as error:
        raise too_long(f"at least {error.at_least_tokens}", card, param) from error
    except ValueError as error:
        raise InvalidField(param, f"cannot be turned into a prompt: {error}") from error
    if len(tokens) > card.max_sequence_tokens:
        raise too_long(str(len(tokens)), card, param)
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


def too_long(tokens: str, card: ModelCard, param: str) -> ApiError:
    """The prompt is too long."""
    limit, whose = min(
        (card.max_context_tokens, ""), (card.arena_tokens, ", all that the KV cache holds")
    )
    return ContextTooLong(tokens, limit, whose, param)
