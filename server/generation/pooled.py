"""Texts that are pooled, as requests to the engine."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

from pydantic import Field

from engine.api import PromptTooLong
from engine.values.model import ModelCard, Tokenizer
from engine.values.request import Pooling, Request
from server.errors import InvalidField
from server.generation.engine_requests import check_prompt, too_long
from server.generation.models import ServedModel
from server.generation.request_fields import PromptRequest
from server.record import RequestRecord

WHOLE_CONTEXT = -1
"""`truncate_prompt_tokens`: to as much as a sequence may have."""


class PooledRequest(PromptRequest):
    """Fields of all requests that ask for vectors or scores."""

    priority: int = Field(0, ge=-1000, le=1000)
    truncate_prompt_tokens: int | None = Field(
        None,
        ge=WHOLE_CONTEXT,
        description="Cut a text that has more tokens, at its end; -1: to what the model takes. "
        "Unset, such a text is refused.",
    )


Tokens: TypeAlias = tuple[int, ...]


def token_limit(body: PooledRequest, card: ModelCard) -> int | None:
    """Of how many tokens a text is cut to; None: it is refused. Raises ApiError (400)."""
    asked, most = body.truncate_prompt_tokens, card.max_sequence_tokens
    if asked is None:
        return None
    if asked == 0 or asked > most:
        raise InvalidField(
            "truncate_prompt_tokens",
            f"must be between 1 and {most}, or {WHOLE_CONTEXT} for as many",
        )
    return most if asked == WHOLE_CONTEXT else asked


def bounded(encode: Callable[[], Sequence[int]], card: ModelCard, param: str) -> Tokens:
    """The tokens, which are the model's and not too many. Raises ApiError (400)."""
    try:
        tokens = tuple(encode())
    except PromptTooLong as error:
        raise too_long(f"at least {error.at_least_tokens}", card, param) from error
    except ValueError as error:
        raise InvalidField(param, f"cannot be turned into a prompt: {error}") from error
    if len(tokens) > card.max_sequence_tokens:
        raise too_long(str(len(tokens)), card, param)
    check_prompt(tokens, card, param)
    return tokens


def text_tokens(tokenizer: Tokenizer, text: str, limit: int | None) -> Sequence[int]:
    """A text and the tokenizer's special tokens around it, cut to the limit where there is one."""
    if limit is None:
        return tokenizer.encode(text, add_special_tokens=True)
    return tokenizer.encode_beginning(text, limit, add_special_tokens=True)


def pooled_requests(
    model: ServedModel,
    body: PooledRequest,
    record: RequestRecord,
    texts: Sequence[Tokens],
    pooling: Pooling,
) -> list[Request]:
    """One for each text. The cache keeps what they begin with together."""
    salt = record.cache_salt(body.cache_salt)
    shared = [0] * len(texts)
    if pooling is Pooling.LAST:
        shared = model.beginnings.shared_tokens(salt, texts)
    return [
        Request(
            id=f"{record.id}-{index}",
            prompt=text,
            max_tokens=0,
            client=record.client,
            priority=body.priority,
            cache_salt=salt,
            pooling=pooling,
            shared_tokens=shared[index],
            adapter=model.adapter,
        )
        for index, text in enumerate(texts)
    ]
