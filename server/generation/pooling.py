"""Texts that are pooled into vectors, as requests to the engine."""

from base64 import b64encode
from collections.abc import Callable, Sequence
from functools import partial
from math import exp
from typing import Annotated, ClassVar, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from pydantic import Field, PlainValidator

from engine.api import PromptTooLong
from engine.values.model import Embedder, ModelCard, Reranker, Task, Tokenizer
from engine.values.request import Pooling, Request
from server.errors import InvalidField
from server.generation.prompt import check_prompt, too_long
from server.generation.request_fields import Prompt, PromptRequest, WirePrompt, parse_prompts
from server.generation.requests import ServedModel, check_task
from server.record import RequestRecord

Vector: TypeAlias = npt.NDArray[np.float32]


def vector(pooled: bytes, embedder: Embedder, dimensions: int | None = None) -> Vector:
    """What the engine has pooled, as the checkpoint has vectors, or the front of that."""
    found = np.frombuffer(pooled, "<f4")[:dimensions]
    return unit(found) if embedder.normalized else found


def unit(found: Vector) -> Vector:
    """Of a length of 1, unless all is 0."""
    length = np.float32(np.linalg.norm(found))
    return found / length if length else found


def cosine(left: Vector, right: Vector) -> float:
    return float(unit(left) @ unit(right))


def score(pooled: bytes, reranker: Reranker) -> float:
    """Of the one number that a reranker makes of a pair."""
    (number,) = np.frombuffer(pooled, "<f4").tolist()
    if not reranker.has_sigmoid:
        return float(number)
    grown = exp(-abs(number))  # which never overflows
    return 1 / (1 + grown) if number >= 0 else grown / (1 + grown)


def base64(found: Vector) -> str:
    """Little-endian float32, as OpenAI's clients read it."""
    return b64encode(found.astype("<f4").tobytes()).decode()


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
        shared = model.prefixes.shared_tokens(salt, texts)
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


MAX_INPUTS = 2048


def _parse_inputs(value: object) -> list[Prompt]:
    return parse_prompts(value, MAX_INPUTS)


WireInputs = WirePrompt | Annotated[list[WirePrompt], Field(min_length=1, max_length=MAX_INPUTS)]
Inputs = Annotated[list[Prompt], PlainValidator(_parse_inputs, json_schema_input_type=WireInputs)]


class EmbeddingRequest(PooledRequest):
    EXAMPLE: ClassVar = {"input": ["What is a radix tree?", "A tree that shares prefixes."]}

    input: Inputs
    encoding_format: Literal["float", "base64"] = Field(
        "float", description="base64 is of little-endian float32."
    )
    dimensions: int | None = Field(
        None, ge=1, description="As many numbers from the front, of a length of 1 again."
    )
    prompt_name: str | None = Field(
        None,
        max_length=256,
        description="Which of the checkpoint's prompts stands before each text, by the name that "
        "config_sentence_transformers.json gives it. Unset: that file's default, mostly none.",
    )

    @property
    def input_names(self) -> list[str]:
        """What errors call each input."""
        if len(self.input) == 1:
            return ["input"]
        return [f"input[{index}]" for index in range(len(self.input))]


async def embedding_requests(
    body: EmbeddingRequest, model: ServedModel, record: RequestRecord
) -> list[Request]:
    """The engine's requests, one for each input. Raises ApiError (400) for what the model cannot
    embed.
    """
    check_task(model, Task.EMBED)
    embedder = model.engine.card.embedder
    assert embedder is not None
    _check_dimensions(body, embedder)
    return await model.workers.prepare(record, partial(_requests, body, model, embedder, record))


def named_prompt(embedder: Embedder, name: str | None) -> str:
    """What stands before a text. Raises ApiError (400) for a name that the checkpoint has not."""
    if name is None:
        return embedder.prompts.get(embedder.default_prompt, "")
    if name not in embedder.prompts:
        known = ", ".join(map(repr, embedder.prompts)) or "none"
        raise InvalidField("prompt_name", f"this model has {known}, not {name!r}")
    return embedder.prompts[name]


def _check_dimensions(body: EmbeddingRequest, embedder: Embedder) -> None:
    if body.dimensions is not None and body.dimensions > embedder.dimensions:
        raise InvalidField(
            "dimensions",
            f"must be between 1 and the model's {embedder.dimensions}, not {body.dimensions}",
        )


def _requests(
    body: EmbeddingRequest, model: ServedModel, embedder: Embedder, record: RequestRecord
) -> list[Request]:
    prompt = named_prompt(embedder, body.prompt_name)
    limit = token_limit(body, model.engine.card)
    texts = [
        _tokens(one, name, body, model, prompt, limit)
        for one, name in zip(body.input, body.input_names, strict=True)
    ]
    return pooled_requests(model, body, record, texts, embedder.pooling)


def _tokens(
    one: Prompt,
    param: str,
    body: EmbeddingRequest,
    model: ServedModel,
    prompt: str,
    limit: int | None,
) -> Tokens:
    card = model.engine.card
    if isinstance(one, str):
        tokenizer, text = model.engine.tokenizer, prompt + one
        return bounded(lambda: text_tokens(tokenizer, text, limit) or _end(card), card, param)
    if body.prompt_name is not None:
        raise InvalidField("prompt_name", "goes before texts, and this input is tokens")
    return bounded(lambda: one[:limit], card, param)


def _end(card: ModelCard) -> list[int]:
    """An end-of-text token, which stands for an empty text where the tokenizer adds no tokens. An
    empty list where the model has no such token.
    """
    return sorted(card.eos_token_ids)[:1]
