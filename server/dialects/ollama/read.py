"""Ollama's bodies read into a chat, a completion or an embedding request."""

import json
from collections import OrderedDict, defaultdict, deque
from collections.abc import Sequence
from itertools import count
from typing import Any

from server.dialects.image_fields import image_source
from server.dialects.ollama.schema import (
    OllamaChatRequest,
    OllamaEmbedding,
    OllamaGenerateRequest,
    OllamaGenerationRequest,
    OllamaMessageParam,
)
from server.dialects.openai import served_tools
from server.errors import UNSUPPORTED, invalid, refused_field
from server.generation.conversation import (
    ROLES,
    Chat,
    Conversation,
    ImagePart,
    Message,
    Part,
    check_messages,
    check_tools,
    texts,
)
from server.generation.pooling import WHOLE_CONTEXT, EmbeddingRequest
from server.generation.request_fields import (
    NO_LIMIT,
    SampledRequest,
)
from server.generation.requests import ServedModel, TextCompletion
from server.generation.sampler_fields import SamplerFields
from server.generation.tools import Tool, ToolCall


def chat_messages(messages: Sequence[OllamaMessageParam]) -> list[Message]:
    """The conversation. Calls and results that have no ids get some: a result without one answers
    the first call of its `tool_name` that waits, or the first of all.
    """
    reader = _Reader()
    return [
        reader.read(message, f"messages[{index}].images") for index, message in enumerate(messages)
    ]


def _parts(text: str, images: Sequence[str], place: str) -> tuple[Part, ...]:
    """Images, which the body has in this place, and the text about them."""
    shown = [
        ImagePart(image_source(image), place=f"{place}[{index}]")
        for index, image in enumerate(images)
    ]
    return (*shown, *texts(text)) if text or not shown else tuple(shown)


class _Reader:
    def __init__(self) -> None:
        self._ids = (f"call{number:05}" for number in count(1))  # nine characters, as Mistral's
        self._waiting = _UnansweredCalls()

    def read(self, message: OllamaMessageParam, place: str) -> Message:
        """The message, whose images are in this place."""
        calls = list[ToolCall]()
        for call in message.tool_calls:
            id, name = call.id or next(self._ids), call.function.name
            self._waiting.add(id, name)
            arguments = json.dumps(call.function.arguments, ensure_ascii=False)
            calls.append(ToolCall(id, name, arguments))
        has_content = message.content or message.images or message.role != "assistant"
        return Message(
            role=ROLES[message.role],
            parts=_parts(message.content, message.images, place) if has_content else (),
            reasoning=message.thinking or "",
            calls=calls,
            answered_call=self._waiting.answered(message) if message.role == "tool" else None,
            name=message.tool_name,
        )


class _UnansweredCalls:
    """The ids of calls without a result, however many there are, found at once."""

    def __init__(self) -> None:
        self._all: OrderedDict[str, None] = OrderedDict()
        self._by_name: defaultdict[str, deque[str]] = defaultdict(deque)  # and answered ones

    def add(self, id: str, name: str) -> None:
        """A call of the function of this name."""
        self._all[id] = None
        self._by_name[name].append(id)

    def answered(self, result: OllamaMessageParam) -> str | None:
        """The id of the call whose result it is, which waits no more."""
        found = result.tool_call_id or self._first(result.tool_name)
        if found is not None:
            self._all.pop(found, None)
        return found

    def _first(self, name: str | None) -> str | None:
        if name is None:
            return next(iter(self._all), None)
        ids = self._by_name[name]
        while ids and ids[0] not in self._all:
            ids.popleft()
        return ids[0] if ids else None


PASSTHROUGH_OPTIONS = {
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "stop",
    *SamplerFields.model_fields,
}
"""Options with the same name in a SampledRequest."""

Fields = dict[str, Any]


def as_chat(body: OllamaChatRequest, model: ServedModel) -> Chat:
    """Raises ApiError (400)."""
    return _chat(body, chat_messages(body.messages), served_tools(body.tools), model)


def prompt_as_chat(body: OllamaGenerateRequest, model: ServedModel) -> Chat:
    """The system message, if there is one, and the prompt as the user's. Raises ApiError (400)."""
    messages = [Message(role="user", parts=_parts(body.prompt, body.images, "images"))]
    if body.system:
        messages.insert(0, Message(role="system", parts=texts(body.system)))
    return _chat(body, messages, (), model)


def raw_completion(body: OllamaGenerateRequest, model: ServedModel) -> TextCompletion:
    """A prompt that goes past the chat template, `system` with it. Raises ApiError (400)."""
    return TextCompletion(
        prompts=[body.prompt],
        sampling=SampledRequest(**_sampled(body, model)),
        structure=body.structure,
        max_tokens=_max_tokens(body),
        logprobs=body.n_logprobs,
    )


def _chat(
    body: OllamaGenerationRequest,
    messages: Sequence[Message],
    tools: Sequence[Tool],
    model: ServedModel,
) -> Chat:
    _check_thinking(body, model)
    check_messages(messages, "messages")
    check_tools(tools, "tools")
    choice = body.thinking_choice
    conversation = Conversation(
        messages=messages,
        tools=tools,
        cache_salt=body.cache_salt,
        continue_final_message=messages[-1].is_prefill,
        **choice.conversation_fields,
    )
    return Chat(
        conversation=conversation,
        sampling=SampledRequest(**_sampled(body, model)),
        max_tokens=_max_tokens(body),
        logprobs=body.n_logprobs,
        structure=body.structure,
        thinking_budget=choice.budget_of(reasons=model.planner.reasons),
    )


def _check_thinking(body: OllamaGenerationRequest, model: ServedModel) -> None:
    """Raises ApiError (400) where `think` is for a model that does not reason."""
    if body.think and not model.planner.reasons:
        message = f'"{model.name}" does not support thinking'  # the CLI looks for these words
        raise invalid(message, "think", UNSUPPORTED)


def _sampled(body: OllamaGenerationRequest, model: ServedModel) -> Fields:
    """Raises ApiError (400) for a longer context than the served one: the client would rely on all
    of it.
    """
    options, most = body.options, model.engine.card.max_sequence_tokens
    if options.num_ctx is not None and options.num_ctx > most:
        problem = f"{options.num_ctx:,} tokens are more than {model.name} has room for, {most:,}"
        raise refused_field("options.num_ctx", problem)
    fields: Fields = options.model_dump(include=PASSTHROUGH_OPTIONS, exclude_none=True)
    return fields | {
        "stream": body.stream,
        "return_progress": body.return_progress,
        "cache_salt": body.cache_salt,
        "generate": not body.is_prewarm,
        "prompt_cache_options": {"keep": body.prompt_cache_options.keep},
        "repetition_penalty": options.repeat_penalty,
        "seed": None if options.seed is None or options.seed < 0 else options.seed,
    }


def _max_tokens(body: OllamaGenerationRequest) -> int:
    asked = body.options.num_predict
    return asked if asked is not None and asked > 0 else NO_LIMIT


def as_embedding(
    body: OllamaEmbedding, texts: Sequence[str], dimensions: int | None
) -> EmbeddingRequest:
    """The request for embeddings that the body means."""
    return EmbeddingRequest(
        model=body.model,
        input=list(texts),
        dimensions=dimensions,
        truncate_prompt_tokens=WHOLE_CONTEXT if body.truncate else None,
        cache_salt=body.cache_salt,
    )
