"""Computes prompts before clients send them, while the engine is idle."""

import asyncio
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import ClassVar, Self
from uuid import uuid4

from pydantic import BaseModel, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from engine.api import EngineError, EngineStopped
from engine.values.model import Task
from engine.values.output import FinishReason, OutputEvent
from engine.values.request import Request
from engine.values.tokens import pack
from server.errors import SERVER, ApiError, invalid_field, refused_field
from server.generation.conversation import MAX_MESSAGES, Conversation, Message
from server.generation.prompt import check_prompt
from server.generation.requests import ServedModel, check_task
from server.json_model import NULL, any_of
from server.record import Principal, RequestRecord
from server.workers import Workers

FILE_CLIENT = "warm_prompts"
"""The client of the prompts of a file. They wait for every other client."""

NEXT_USER_TEXTS = ("A", "1")
"""Two different messages of a user. The common prefix of the two continued chats is in every
continuation.
"""

log = logging.getLogger("rootstock")


class WarmRequest(Conversation):
    """The beginning of chats, or of text completions."""

    EXAMPLE: ClassVar = {"messages": [{"role": "system", "content": "You are a careful reviewer."}]}

    model_config = any_of(
        {
            "properties": {"messages": {"type": "array", "minItems": 1}, "prompt": NULL},
            "required": ["messages"],
        },
        {"properties": {"messages": NULL, "prompt": {"type": "string"}}, "required": ["prompt"]},
    )

    messages: list[Message] = Field(default_factory=list, max_length=MAX_MESSAGES, fail_fast=True)
    prompt: str | None = Field(None, min_length=1, description="Of text completions.")
    pin: bool = Field(
        False, description="Keep it from eviction until the cache is cleared: for admins."
    )

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if bool(self.messages) == (self.prompt is not None):
            raise PydanticCustomError("prompt", "give either messages or prompt")
        return self


class Warmed(BaseModel):
    """The result of warming a prompt. Its tokens were either cached before or are computed now."""

    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    pinned: bool


def warm_request(body: WarmRequest, model: ServedModel, record: RequestRecord) -> Request:
    """The engine's request. Raises ApiError (400) for a prompt that the model cannot take."""
    check_task(model, Task.GENERATE)
    param = "messages" if body.prompt is None else "prompt"
    if body.prompt is None:
        prompt = _shared_tokens(body, model, record)
    else:
        prompt = model.prompts.text(body.prompt)
    check_prompt(prompt, model.engine.card, param)
    return Request(
        id=record.id,
        prompt=pack(prompt),
        max_tokens=0,
        speculate=False,
        client=record.client,
        cache_salt=record.cache_salt(body.cache_salt),
        adapter=model.adapter,
        is_background=True,
        pin=body.pin,
    )


def _shared_tokens(
    conversation: Conversation, model: ServedModel, record: RequestRecord
) -> tuple[int, ...]:
    """The tokens that every chat begins with that begins with these messages and has these tools.
    Where the last message waits for an answer, they are the whole prompt of that.
    """
    messages, salt = conversation.messages, record.cache_salt(conversation.cache_salt)
    if messages[-1].role in {"user", "tool", "function"} or conversation.continue_final_message:
        return model.prompts.chat(conversation, model.replays, salt)
    first, second = [
        model.prompts.chat(_continued(conversation, text), model.replays, salt)
        for text in NEXT_USER_TEXTS
    ]
    pairs = enumerate(zip(first, second, strict=False))
    n_shared = next((index for index, (one, other) in pairs if one != other), len(first))
    return first[:n_shared]


def _continued(conversation: Conversation, text: str) -> Conversation:
    """The conversation with one more message of the user's."""
    message = Message.model_validate({"role": "user", "content": text})
    return conversation.model_copy(update={"messages": [*conversation.messages, message]})


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
    match event.finish_reason:
        case FinishReason.ABORT:
            raise EngineStopped("The server is stopping; the prompt was not computed.")
        case FinishReason.ERROR if event.param is not None:
            raise refused_field(event.param, event.error or "")
        case FinishReason.ERROR:
            message = event.error or "The request failed while it was computed."
            raise ApiError(500, message, type=SERVER, code="generation_failed")
    usage = event.usage
    assert usage is not None, "a sequence that ends well has a usage"
    return Warmed(
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        computed_tokens=usage.prompt_tokens - usage.cached_tokens,
        pinned=request.pin,
    )


def _of_file(text: str, model: ServedModel, record: RequestRecord) -> Request:
    return warm_request(WarmRequest.model_validate_json(text), model, record)


async def warm_file(
    prompts: Sequence[Mapping[str, object]], model: ServedModel, workers: Workers
) -> None:
    """Warm the prompts of a file one after the other. A prompt that cannot be warmed is logged with
    its number and the invalid field; the others continue.
    """
    n_computed = n_cached = n_pinned = 0
    for number, prompt in enumerate(prompts, 1):
        record = RequestRecord(uuid4().hex, Principal(FILE_CLIENT))
        try:
            text = json.dumps(prompt)
            prepare = partial(_of_file, text, model, record)
            warmed = await warm(await workers.run(FILE_CLIENT, len(text), prepare), model)
        except EngineStopped:
            return
        except (ApiError, EngineError, ValidationError) as error:
            reason = invalid_field(error) if isinstance(error, ValidationError) else error
            log.error("%s: warm_prompts, prompt %d: %s", model.name, number, reason)
        else:
            n_computed += warmed.computed_tokens
            n_cached += warmed.cached_tokens
            n_pinned += warmed.pinned
    log.info(
        "%s: warm_prompts: %d tokens computed, %d were cached; %d of %d prompts are pinned",
        *(model.name, n_computed, n_cached, n_pinned, len(prompts)),
    )
