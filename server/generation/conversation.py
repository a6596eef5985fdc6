"""A conversation, and how it is to be answered. Every dialect reads its bodies into these."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Literal, TypeAlias

from engine.values.images import Detail, PreparedImage
from server.errors import InvalidField
from server.generation.request_fields import SampledRequest, Structure
from server.generation.tools import MAX_TOOLS, Tool, ToolCall, ToolChoice
from server.json_size import check_json_size

MAX_MESSAGES = 10_000
MAX_PARTS = 1000
MAX_IMAGES = 20

Role = Literal["system", "user", "assistant", "tool"]

ROLES: Mapping[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
"""The roles by the names that clients have for them. A template that does not know `developer`
would render a role that its model never saw; one that does treats `system` alike."""


@dataclass(frozen=True, slots=True)
class Text:
    """A part of a message that is text."""

    text: str


@dataclass(frozen=True, slots=True)
class ImageData:
    """The image's bytes as a `data:` URL or in base64; or, where the body had many of them, a
    reference to the file in which they are.
    """

    text: str


@dataclass(frozen=True, slots=True)
class ImageUrl:
    """Where the image is."""

    url: str


@dataclass(frozen=True, slots=True)
class StoredImage:
    """An image of an earlier request, by the digest of its bytes."""

    digest: bytes


ImageSource: TypeAlias = ImageData | ImageUrl | StoredImage
"""Where the bytes of an image come from."""


@dataclass(frozen=True, slots=True)
class ImagePart:
    """A part of a message that is an image. `place` is where the body has it, for errors.
    `original`, the digest of its bytes, and `prepared` are there when it is known by them.
    """

    source: ImageSource
    detail: Detail = Detail.FULL
    place: str = ""
    original: bytes = b""
    prepared: PreparedImage | None = None


Part: TypeAlias = Text | ImagePart
"""A part of a message's content."""


def texts(*given: str) -> tuple[Part, ...]:
    """Parts of a message, each with one of these texts."""
    return tuple(map(Text, given))


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """What one role says. `answered_call` is the id of the call whose result it is, and `name` the
    name of the tool, or of the speaker. `tools` are those that it makes known, and
    `undeclared_tools` the names of others, which the request does not declare.
    """

    role: Role
    parts: Sequence[Part] = ()
    reasoning: str = ""
    calls: Sequence[ToolCall] = ()
    answered_call: str | None = None
    name: str | None = None
    tools: Sequence[Tool] = ()
    undeclared_tools: Sequence[str] = ()

    @property
    def text(self) -> str:
        """The text of those of its parts that are text."""
        return "\n".join(part.text for part in self.parts if isinstance(part, Text))

    @property
    def images(self) -> Sequence[ImagePart]:
        """Those of its parts that are images."""
        return [part for part in self.parts if isinstance(part, ImagePart)]

    @property
    def identity(self) -> tuple[object, ...]:
        """What tells it from other messages when a client sends it back: role, text and calls, and
        images with their places among the parts. White space around the text does not count.
        """
        calls = [f"{call.id} {call.name}" for call in self.calls]
        images = [
            (at, part.original.hex(), part.detail.value)
            for at, part in enumerate(self.parts)
            if isinstance(part, ImagePart)
        ]
        return (self.role, self.text.strip(), calls, *images)

    @property
    def is_about_calls(self) -> bool:
        """Whether it has calls, or is the result of one."""
        return self.role == "tool" or bool(self.calls)

    @property
    def is_prefill(self) -> bool:
        """Whether it is the beginning of an answer, which the model can continue."""
        return self.role == "assistant" and bool(self.parts) and not self.calls


def placed_images(message: Message, place: str) -> Message:
    """The message, whose images have their places among the parts in the field `place`."""
    if not message.images:
        return message
    parts = [
        replace(part, place=f"{place}[{index}]") if isinstance(part, ImagePart) else part
        for index, part in enumerate(message.parts)
    ]
    return replace(message, parts=parts)


def check_messages(messages: Sequence[Message], field: str) -> None:
    """Raise ApiError (400) for messages that make no prompt, or too long a one. The field is the
    one that the client sent them in.

    The arguments of calls are JSON that templates take as objects: they count as the JSON of a body
    does.
    """
    if not messages:
        raise InvalidField(field, "there is nothing to answer")
    if len(messages) > MAX_MESSAGES:
        raise InvalidField(field, f"at most {MAX_MESSAGES} turns")
    if sum(len(message.images) for message in messages) > MAX_IMAGES:
        raise InvalidField(field, f"at most {MAX_IMAGES} images")
    if any(len(message.calls) > MAX_TOOLS for message in messages):
        raise InvalidField(field, f"at most {MAX_TOOLS} calls in one turn")
    arguments = [call.arguments for message in messages for call in message.calls]
    if not arguments:
        return
    try:
        check_json_size(*(text.encode("utf-8", "surrogatepass") for text in arguments))
    except ValueError as error:
        raise InvalidField(field, f"what the arguments of all calls say {error}") from None


def check_tools(tools: Iterable[Tool], field: str) -> None:
    """Raise ApiError (400) unless the tools, which the field has, can be told apart by their names:
    a call has nothing else. The same tool may be declared twice.
    """
    known = dict[str, Tool]()
    for tool in tools:
        if known.setdefault(tool.name, tool) != tool:
            raise InvalidField(field, f"two tools have the name '{tool.name}'")


def check_choice(choice: ToolChoice, tools: Iterable[Tool]) -> None:
    """Raise ApiError (400) unless there are tools that can be chosen."""
    known = {tool.name for tool in tools}
    if choice.names is None and choice.mode == "required" and not known:
        raise InvalidField("tool_choice", "there are no tools to choose from")
    if unknown := (choice.names or frozenset()) - known:
        raise InvalidField("tool_choice", f"tools has no function '{min(unknown)}'")


def check_continued(messages: Sequence[Message], field: str) -> None:
    """Raise ApiError (400) unless the model can continue the last message."""
    if messages and not messages[-1].is_prefill:
        message = "the last message must be the assistant's, with text and without calls"
        raise InvalidField(field, message)


def digests(messages: Iterable[Message]) -> Iterator[bytes]:
    """For each message a digest of those before it; then the digest of all.

    It has what a client sends back as it was: the texts, images and calls of users, tools and
    assistants. Instructions, which some clients write anew for each turn, are left out.
    """
    found = blake2b(digest_size=16)
    for message in messages:
        yield found.digest()
        if message.role != "system":
            found.update(repr(message.identity).encode())
    yield found.digest()


def digest_of(messages: Iterable[Message]) -> bytes:
    """The digest of all these messages."""
    *_, last = digests(messages)
    return last


PlainValue = str | int | float | bool | None
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
"""Of OpenAI's API, and `max`, which others have. `chat_template_kwargs` may have any other text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """What makes a prompt. `chat_template_kwargs` are arguments of the model's template; `thinks`
    switches its thinking on or off, None leaves that to the template.
    """

    messages: Sequence[Message]
    tools: Sequence[Tool] = ()
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    thinks: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    chat_template_kwargs: Mapping[str, PlainValue] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    cache_salt: str = ""

    @property
    def images(self) -> Sequence[ImagePart]:
        """The images of its messages, in their order."""
        return [part for message in self.messages for part in message.images]

    @property
    def known_tools(self) -> Sequence[Tool]:
        """The tools that the model may know: all but deferred ones that no message has made known,
        and that the choice does not name. Of several by one name the first counts.
        """
        chosen = self.tool_choice.names or frozenset()
        found = {
            tool.name: tool for tool in self.tools if not tool.is_deferred or tool.name in chosen
        }
        for message in self.messages:
            for tool in message.tools:
                found.setdefault(tool.name, tool)
        return list(found.values())

    @property
    def callable_tools(self) -> Sequence[Tool]:
        """The tools that the model may call."""
        choice = self.tool_choice
        if choice.mode == "none":
            return []
        known = self.known_tools
        return [tool for tool in known if choice.names is None or tool.name in choice.names]

    @property
    def concerns_tools(self) -> bool:
        """Whether there are tools, calls or results."""
        return bool(self.tools) or any(
            message.tools or message.is_about_calls for message in self.messages
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """A conversation, and how it is to be answered. Each dialect reads its bodies into one."""

    conversation: Conversation
    sampling: SampledRequest
    max_tokens: int | None = None  # None and -1: as many as there is room for
    n: int = 1
    logprobs: int | None = None  # how many alternatives of each token; None: no logprobs
    structure: Structure | None = None
    parallel_calls: bool = True
    thinking_budget: int | None = None
    prediction: str = ""  # what the answer is expected to be like
    tools_field: str = "tools"  # from which they come, for errors
