"""Computes prompts before clients send them, while the engine is idle."""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from uuid import uuid4

from pydantic import BaseModel

from engine.api import EngineError, EngineStopped
from engine.values.model import Task
from engine.values.output import OutputEvent
from engine.values.request import Request
from engine.values.tokens import pack
from server.errors import ApiError
from server.fairness import Workers
from server.generation.conversation import Conversation, Message, texts
from server.generation.images import UnpreparedImages, with_images
from server.generation.prompt import ChatPrompt, check_prompt
from server.generation.requests import ServedModel, check_task
from server.generation.stream import sequence_error
from server.record import Principal, RequestRecord

FILE_CLIENT = "warm_prompts"
"""The client of the prompts of a file. They wait for every other client."""

NEXT_USER_TEXTS = ("A", "1")
"""Two different messages of a user. The common prefix of the two continued chats is in every
continuation.
"""

log = logging.getLogger("rootstock")


@dataclass(frozen=True, slots=True)
class WarmPrompt:
    """The beginning of chats, or of text completions, which is computed. `pin` keeps it from
    eviction until the cache is cleared.
    """

    beginning: Conversation | str
    cache_salt: str = ""
    pin: bool = False


ReadPrompt = Callable[[str], WarmPrompt]
"""Reads the JSON of a prompt, as a file has it. Raises ApiError (400)."""


PrepareImages = Callable[[UnpreparedImages, RequestRecord], Awaitable[None]]
"""Prepares the images of a request. Raises ApiError and EngineError."""


class Warmed(BaseModel):
    """The result of warming a prompt. Its tokens were either cached before or are computed now."""

    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    pinned: bool


def warm_request(warmed: WarmPrompt, model: ServedModel, record: RequestRecord) -> Request:
    """The engine's request. Raises ApiError (400) for a prompt that the model cannot take."""
    check_task(model, Task.GENERATE)
    beginning = warmed.beginning
    if isinstance(beginning, str):
        param, encoded = "prompt", ChatPrompt(model.prompts.text(beginning))
    else:
        shown = with_images(beginning, model.engine, record)
        param, encoded = "messages", _shared_tokens(shown, model, record)
    prompt, images = encoded
    check_prompt(prompt, model.engine.card, param)
    return Request(
        id=record.id,
        prompt=pack(prompt),
        images=images,
        max_tokens=0,
        speculate=False,
        client=record.client,
        cache_salt=record.cache_salt(warmed.cache_salt),
        adapter=model.adapter,
        is_background=True,
        pin=warmed.pin,
    )


def _shared_tokens(
    conversation: Conversation, model: ServedModel, record: RequestRecord
) -> ChatPrompt:
    """The tokens that every chat begins with that begins with these messages and has these tools.
    Where the last message waits for an answer, they are the whole prompt of that.
    """
    messages, salt = conversation.messages, record.cache_salt(conversation.cache_salt)
    if messages[-1].role in {"user", "tool"} or conversation.continue_final_message:
        return model.prompts.chat(conversation, model.replays, salt)
    first, second = [
        model.prompts.chat(_continued(conversation, text), model.replays, salt)
        for text in NEXT_USER_TEXTS
    ]
    pairs = enumerate(zip(first.tokens, second.tokens, strict=False))
    n_shared = next((index for index, (one, other) in pairs if one != other), len(first.tokens))
    return ChatPrompt(first.tokens[:n_shared], first.images)


def _continued(conversation: Conversation, text: str) -> Conversation:
    """The conversation with one more message of the user's."""
    message = Message(role="user", parts=texts(text))
    return replace(conversation, messages=[*conversation.messages, message])


class _LastEvent:
    """An EventSink that waits for the end of a request with one sequence."""

    def __init__(self, note: Callable[[OutputEvent], None] | None) -> None:
        self._note = note
        self.ended = asyncio.get_running_loop().create_future()

    def put(self, event: OutputEvent) -> None:
        if self._note is not None:
            self._note(event)
        if event.finish_reason is not None and not self.ended.done():
            self.ended.set_result(event)

    def fail(self, error: BaseException) -> None:
        if not self.ended.done():
            self.ended.set_exception(error)


async def warm(
    request: Request, model: ServedModel, note: Callable[[OutputEvent], None] | None = None
) -> Warmed:
    """Have the engine compute the prompt. `note` is called for each event. Raises EngineError, and
    ApiError where it fails.
    """
    sink = _LastEvent(note)
    submission = model.engine.generate(request, sink)
    try:
        event: OutputEvent = await sink.ended
    finally:
        submission.end()
    if error := sequence_error(event):
        raise error
    usage = event.usage
    assert usage is not None, "a sequence that ends well has a usage"
    return Warmed(
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        computed_tokens=usage.prompt_tokens - usage.cached_tokens,
        pinned=request.pin,
    )


def _file_request(
    text: str, model: ServedModel, record: RequestRecord, read: ReadPrompt
) -> Request:
    return warm_request(read(text), model, record)


async def warm_file(
    prompts: Sequence[Mapping[str, object]],
    model: ServedModel,
    workers: Workers,
    read: ReadPrompt,
    prepare_images: PrepareImages,
) -> None:
    """Warm the prompts of a file one after the other. A prompt that cannot be warmed is logged with
    its number and the invalid field; the others continue.
    """
    n_computed = n_cached = n_pinned = 0
    for number, prompt in enumerate(prompts, 1):
        record = RequestRecord(uuid4().hex, Principal(FILE_CLIENT))
        try:
            text = json.dumps(prompt)
            prepare = partial(_file_request, text, model, record, read)
            async with record.held:
                try:
                    request = await workers.run(FILE_CLIENT, len(text), prepare)
                except UnpreparedImages as error:
                    await prepare_images(error, record)
                    request = await workers.run(FILE_CLIENT, len(text), prepare)
                warmed = await warm(request, model)
        except EngineStopped:
            return
        except (ApiError, EngineError) as error:
            log.error("%s: warm_prompts, prompt %d: %s", model.name, number, error)
        else:
            n_computed += warmed.computed_tokens
            n_cached += warmed.cached_tokens
            n_pinned += warmed.pinned
    log.info(
        "%s: warm_prompts: %d tokens computed, %d were cached; %d of %d prompts are pinned",
        *(model.name, n_computed, n_cached, n_pinned, len(prompts)),
    )
