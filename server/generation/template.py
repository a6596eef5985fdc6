"""What a chat template takes, and conversations in the form in which it takes them."""

import json
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import takewhile
from re import fullmatch
from typing import Any, Literal

from engine.api import PromptTooLong
from engine.values.model import Tokenizer
from server.generation.conversation import ImageData, ImagePart, Message, Part, Role, Text, texts
from server.generation.generic_tools import SystemRole
from server.generation.tools import UNREADABLE, ToolCall, arguments_object

REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""The names that templates use: most the first, gpt-oss's the last."""


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """What a chat template takes. Values are found at load, by rendering small conversations.

    - `content`: the form of a message's content.
    - `system`: the role of system messages before all others.
    - `late_system`: the role of later system messages.
    - `user_turn`: whether a conversation needs a user's message, or begins with one.
    - `same_role`: whether consecutive messages of a user, or of an assistant, have to be one.
    - `after_results`: the role of a user's message right after tool results.
    - `preambles`: the field of an assistant's text before a call, where there is reasoning too.
    - `arguments`: the form of a call's arguments; `text` is JSON.
    - `call_ids`: the form of calls' ids; `nine` are nine letters and digits.
    - `tools`: whether a function without description and parameters is `completed` with empty ones.
    - `images`: the form of an image: a part of type `image` or `image_url`, or the tokenizer's
      stand-in for one in a message's string; `none` where the template renders no image.
    - `result_images`: where the images of tool results are: in the `tool` message; in a `user`
      message after it; or in the tool message as `text`, by the stand-in, where nothing that a user
      says may follow.
    """

    content: Literal["text", "parts"] = "text"
    system: SystemRole = "system"
    late_system: Literal["system", "user"] = "system"
    user_turn: Literal["optional", "needed", "first"] = "optional"
    same_role: Literal["apart", "joined"] = "apart"
    after_results: Literal["user", "tool"] = "user"
    preambles: Literal["content", "reasoning"] = "content"
    arguments: Literal["object", "text"] = "object"
    call_ids: Literal["any", "nine"] = "any"
    tools: Literal["declared", "completed"] = "declared"
    images: Literal["none", "image", "image_url", "text"] = "none"
    result_images: Literal["tool", "user", "text"] = "tool"


def in_place(messages: Sequence[Message], traits: TemplateTraits) -> list[Message]:
    """The messages in roles and in an order that the template renders.

    Where it has no system messages, those at the head begin what the user says. Where it has no
    place for later ones, those at the head are one, and later ones are what the user says, in a
    `<system-reminder>` as Claude Code writes them. Where it takes nothing but an answer after tool
    results, what the user says there is a part of the last result; where a result is due, it is
    that. Where it needs a user's message and there is none, an empty one follows the system
    messages.
    """
    placed = _with_user(_joined(messages, traits), traits)
    return [_preamble_in_place(message, traits) for message in placed]


def _joined(messages: Sequence[Message], traits: TemplateTraits) -> list[Message]:
    joined = {("user", "reminder"), ("reminder", "user"), ("reminder", "reminder")}
    joined |= {("head", "head"), ("head", "user")}
    if traits.late_system == "user":
        joined.add(("system", "system"))
    if traits.after_results == "tool":
        joined |= {("tool", "user"), ("tool", "reminder")}
    if traits.same_role == "joined":
        joined |= {("user", "user"), ("answer", "answer"), ("answer", "assistant")}
    placed: list[tuple[Message, list[Part]]] = []
    has_begun = False
    last = ""
    for message in messages:
        said, kind = message, _kind(message)
        has_begun = has_begun or kind != "system"
        if kind == "system" and has_begun and traits.late_system == "user":
            said, kind = _reminder(message), "reminder"
        elif kind == "system" and not has_begun and traits.system == "user":
            said = _reworded(message, f"{message.text}\n")
            kind = "head"
        is_in_place_of_result = last == "assistant" and kind in {"user", "reminder"}
        if is_in_place_of_result and traits.after_results == "tool":
            said, kind = _as_result(said, placed[-1][0]), "tool"
        if (last, kind) in joined:
            before, parts = placed.pop()
            parts.extend(said.parts)
            placed.append((_merged(before, said), parts))
            last = last if last == "tool" else kind
        else:
            placed.append((said, [*said.parts]))
            last = kind
    return [replace(message, parts=tuple(parts)) for message, parts in placed]


def _merged(before: Message, said: Message) -> Message:
    """Two messages as one, but for their parts. Only the second may have calls."""
    reasoning = "\n\n".join(filter(None, (before.reasoning, said.reasoning)))
    return replace(said if said.calls else before, reasoning=reasoning)


def _as_result(message: Message, call: Message) -> Message:
    """What is said in place of the result of a call, as the result."""
    return replace(message, role="tool", answered_call=call.calls[-1].id)


def _kind(message: Message) -> str:
    """The role; of an assistant's message without calls, `answer`."""
    return "answer" if message.role == "assistant" and not message.calls else message.role


def _reminder(message: Message) -> Message:
    return _reworded(message, f"<system-reminder>\n{message.text}\n</system-reminder>")


def _reworded(message: Message, text: str) -> Message:
    """A system message as a user's with another text. Its images follow the text."""
    return replace(message, role="user", parts=(*texts(text), *message.images))


def _with_user(messages: list[Message], traits: TemplateTraits) -> list[Message]:
    """The messages, with an empty one of the user's where the template needs one."""
    n_system = len([*takewhile(lambda message: message.role == "system", messages)])
    others = messages[n_system:]
    match traits.user_turn:
        case "needed":
            is_there = any(message.role == "user" for message in others)
        case "first":
            is_there = bool(others) and others[0].role == "user"
        case _:
            is_there = True
    if is_there:
        return messages
    return [*messages[:n_system], Message(role="user", parts=texts("")), *others]


def _preamble_in_place(message: Message, traits: TemplateTraits) -> Message:
    """The message with its text before a call where the template renders it."""
    is_preamble = message.calls and message.reasoning and message.text
    if not is_preamble or traits.preambles == "content":
        return message
    thoughts = f"{message.reasoning}\n\n{message.text}"
    return replace(message, parts=message.images, reasoning=thoughts)


def with_user_images(messages: Sequence[Message]) -> list[Message]:
    """The messages with the images of tool results in a user's message after the results."""
    placed, waiting = list[Message](), list[Part]()
    for message in messages:
        if message.role != "tool" and waiting:
            placed.append(Message(role="user", parts=waiting))
            waiting = []
        if message.role == "tool" and message.images:
            waiting += message.images
            said = [part for part in message.parts if isinstance(part, Text)]
            message = replace(message, parts=said or texts(""))  # noqa: PLW2901
        placed.append(message)
    return [*placed, Message(role="user", parts=waiting)] if waiting else placed


def template_messages(
    messages: Sequence[Message], traits: TemplateTraits, image_text: str = ""
) -> list[Mapping[str, object]]:
    """The messages for the template. Tool results get the names of their functions. `image_text`
    stands for an image in a string.
    """
    names: dict[str, str] = {}
    ids = _CallIds(traits)
    rendered = list[Mapping[str, object]]()
    for message in messages:
        for call in message.calls:
            names[call.id] = call.name
        fields = _template_message(message, names, ids, traits)
        rendered.append(fields | {"content": _content(message, traits, image_text)})
    return rendered


def _template_message(
    message: Message, names: Mapping[str, str], ids: "_CallIds", traits: TemplateTraits
) -> dict[str, object]:
    """The message's fields but for its content."""
    fields: dict[str, object] = {"role": message.role, "content": ""}
    name = message.name or names.get(message.answered_call or "")
    if name:
        fields["name"] = name
    if message.calls:
        fields["tool_calls"] = [
            {
                "id": ids.of_call(call),
                "type": "function",
                "function": {"name": call.name, "arguments": _arguments(call, traits)},
            }
            for call in message.calls
        ]
    answered = ids.of_answered(message)
    if answered is not None:
        fields["tool_call_id"] = answered
    if message.reasoning:
        fields |= dict.fromkeys(REASONING_FIELDS, message.reasoning)
    return fields


def _content(message: Message, traits: TemplateTraits, image_text: str) -> object:
    has_images = bool(message.images)
    is_text_in_result = message.role == "tool" and traits.result_images == "text"
    if has_images and (traits.images == "text" or is_text_in_result):
        return "\n".join(
            part.text if isinstance(part, Text) else image_text for part in message.parts
        )
    if traits.content == "text" and not has_images:
        return message.text
    return [
        _text_part(part.text) if isinstance(part, Text) else _image_part(traits)
        for part in message.parts
    ]


def _text_part(text: str) -> Mapping[str, object]:
    return {"type": "text", "text": text}


def _image_part(traits: TemplateTraits) -> Mapping[str, object]:
    """An image as the template takes it. What the image shows is not for the template."""
    if traits.images == "image_url":
        return {"type": "image_url", "image_url": {"url": ""}}
    return {"type": "image"}


def _arguments(call: ToolCall, traits: TemplateTraits) -> object:
    """The arguments of a call as the template takes them: an object, whatever the text says; or
    the text, as DeepSeek's templates expect, which concatenate it.
    """
    if traits.arguments == "text":
        return call.arguments or "{}"
    read = arguments_object(call.arguments, "trailing-strings")
    return {UNREADABLE: call.arguments} if read is None else read


_ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz"
_NINE = 9


class _CallIds:
    """The ids of calls in the form that the template takes, the same for a call and its result. An
    id that has the form stays. A result without an id answers the first call that has no result.
    """

    def __init__(self, traits: TemplateTraits) -> None:
        self._form = traits.call_ids
        self._n_calls = 0
        self._waiting: OrderedDict[str, None] = OrderedDict()

    def of_call(self, call: ToolCall) -> str:
        if self._form == "any":
            return call.id
        self._n_calls += 1
        id = _nine(call.id or f"call {self._n_calls}")
        self._waiting[id] = None
        return id

    def of_answered(self, message: Message) -> str | None:
        """The id of the call whose result the message is; None for one that is no result."""
        if self._form == "any" or message.role != "tool":
            return message.answered_call
        id = next(iter(self._waiting), "")
        if message.answered_call or not id:
            id = _nine(message.answered_call or "")
        self._waiting.pop(id, None)
        return id


def _nine(id: str) -> str:
    """The id, or one of nine letters and digits that is made of it."""
    if fullmatch("[a-zA-Z0-9]{9}", id):
        return id
    number = int.from_bytes(blake2b(id.encode("utf-8", "replace"), digest_size=8).digest())
    digits = []
    for _ in range(_NINE):
        number, digit = divmod(number, len(_ALPHABET))
        digits.append(_ALPHABET[digit])
    return "".join(digits)


def declared_tools(
    declarations: Iterable[Mapping[str, Any]], traits: TemplateTraits
) -> list[Mapping[str, Any]]:
    """The declarations of tools in the form that the template takes."""
    if traits.tools == "declared":
        return list(declarations)
    return [{**each, "function": _completed(each["function"])} for each in declarations]


def _completed(function: Mapping[str, Any]) -> Mapping[str, Any]:
    parameters = {"type": "object", "properties": {}} | (function.get("parameters") or {})
    return {"description": "", **function, "parameters": parameters}


def content_in_form(
    message: Mapping[str, Any], traits: TemplateTraits, image_text: str
) -> Mapping[str, Any]:
    """The template's message, whose content is one string with `image_text` in place of images, in
    the form that the template takes.
    """
    content: str = message["content"]
    pieces = content.split(image_text) if image_text else [content]
    if traits.images == "text" or len(pieces) == 1:
        is_text = traits.content == "text"
        return message if is_text else {**message, "content": [_text_part(content)]}
    parts = [_text_part(pieces[0])] if pieces[0] else []
    for piece in pieces[1:]:
        parts.append(_image_part(traits))
        parts += [_text_part(piece)] if piece else []
    return {**message, "content": parts}


_WORD = "somethingthatissaid"
_ID = "abcdefghi"
_FOREIGN_IDS = ("call_0123456789abcdef01234567", "f:0", "")
_PRINTED = str({_WORD: "B"})
"""How a template prints an object as it is, which is no JSON."""


def _said(role: Role, text: str) -> Message:
    return Message(role=role, parts=texts(text))


def _called(text: str = "", reasoning: str = "", id: str = _ID, value: str = "{}") -> Message:
    said = texts(text)
    calls = [ToolCall(id, "f", value)]
    return Message(role="assistant", parts=said, reasoning=reasoning, calls=calls)


def _result(text: str, id: str = _ID) -> Message:
    return Message(role="tool", parts=texts(text), answered_call=id)


_USER = _said("user", "A")


@dataclass(frozen=True, slots=True)
class _Probe:
    """Conversations by which a trait is found: its value is the first option with which the
    template renders all that they say. Where there is none, it is `otherwise`, or else the first
    option with which the template raises no error.
    """

    trait: str
    options: Sequence[str]
    conversations: Sequence[Sequence[Message]]
    otherwise: str | None = None
    tools: Sequence[Mapping[str, Any]] = ()

    def found(self, tokenizer: Tokenizer, traits: TemplateTraits) -> TemplateTraits:
        """The traits with the value that is found. The other traits are taken as they are."""
        choices = [_with(traits, self.trait, option) for option in self.options]
        for chosen in choices:
            if all(map(_is_whole, self._rendered(tokenizer, chosen))):
                return chosen
        if self.otherwise is not None:
            return _with(traits, self.trait, self.otherwise)
        for chosen in choices:
            if None not in self._rendered(tokenizer, chosen):
                return chosen
        return choices[0]

    def _rendered(self, tokenizer: Tokenizer, traits: TemplateTraits) -> Iterator[str | None]:
        """The text of each of the conversations; None for one that the template refuses."""
        arguments = {"tools": declared_tools(self.tools, traits)} if self.tools else {}
        for messages in self.conversations:
            shown = template_messages(in_place(messages, traits), traits)
            try:
                yield tokenizer.decode(tokenizer.apply_chat_template(shown, **arguments))
            except (ValueError, PromptTooLong):
                yield None


def _with(traits: TemplateTraits, trait: str, value: str) -> TemplateTraits:
    chosen: dict[str, Any] = {trait: value}
    return replace(traits, **chosen)


def _is_whole(text: str | None) -> bool:
    return text is not None and _WORD in text and _PRINTED not in text


_PROBES = (
    _Probe(
        "content",
        ("text", "parts"),
        [[_said("user", _WORD)]],
    ),
    _Probe(
        "arguments",
        ("object", "text"),
        [[_USER, _called(value=json.dumps({_WORD: "B"})), _result("C")]],
    ),
    _Probe(
        "same_role",
        ("apart", "joined"),
        [
            [_USER, _said("user", _WORD)],
            [_USER, _said("assistant", "B"), _said("assistant", _WORD), _said("user", "C")],
        ],
    ),
    _Probe(
        "user_turn",
        ("optional", "needed", "first"),
        [[_said("assistant", _WORD)], [_said("assistant", "B"), _said("user", _WORD)]],
    ),
    _Probe("system", ("system",), [[_said("system", _WORD), _USER]], "user"),
    _Probe(
        "late_system",
        ("system",),
        [
            [
                *(_said("system", "B"), _USER, _said("system", _WORD)),
                *(_said("assistant", "C"), _said("user", "D")),
            ]
        ],
        "user",
    ),
    _Probe(
        "after_results",
        ("user", "tool"),
        [[_USER, _called(), _result("B"), _said("user", _WORD)]],
    ),
    _Probe(
        "preambles",
        ("content", "reasoning"),
        [[_USER, _called(_WORD, "B"), _result("C")]],
    ),
    _Probe(
        "call_ids",
        ("any", "nine"),
        [[_USER, _called(id=id), _result(_WORD, id)] for id in _FOREIGN_IDS],
    ),
    _Probe(
        "tools",
        ("declared", "completed"),
        [[_USER]],
        tools=[{"type": "function", "function": {"name": _WORD}}],
    ),
)


def traits_of(tokenizer: Tokenizer, *, takes_images: bool = False) -> TemplateTraits:
    """What the tokenizer's chat template takes. A template that takes nothing has the defaults."""
    found = TemplateTraits()
    for probe in _PROBES:
        found = probe.found(tokenizer, found)
    if not takes_images:
        return found
    shown = Message(role="user", parts=(*texts("A"), _IMAGE, *texts(_WORD)))
    for option in ("image", "image_url", "text"):
        chosen = _with(found, "images", option)
        if _renders_image(tokenizer, [shown], chosen):
            return _with(chosen, "result_images", _result_images(tokenizer, chosen))
    return found


def _result_images(tokenizer: Tokenizer, traits: TemplateTraits) -> str:
    """Where the template renders images of tool results."""
    result = replace(_result(_WORD), parts=(*texts(_WORD), _IMAGE))
    options = ("tool", "text") if traits.after_results == "tool" else ("tool",)
    for option in options:
        chosen = _with(traits, "result_images", option)
        if _renders_image(tokenizer, [_USER, _called(), result], chosen):
            return option
    return "user"


_IMAGE = ImagePart(ImageData(""))


def _renders_image(
    tokenizer: Tokenizer, messages: Sequence[Message], traits: TemplateTraits
) -> bool:
    """Whether the template renders the one image in the messages, and the text next to it."""
    shown = template_messages(in_place(messages, traits), traits, tokenizer.image_stand_in)
    try:
        tokens, _ = tokenizer.render_with_images(shown, [()])
    except (ValueError, PromptTooLong):
        return False
    return _is_whole(tokenizer.decode(tokens))
