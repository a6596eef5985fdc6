"""Texts to embed as requests to the engine."""

from functools import partial
from typing import Annotated, ClassVar, Literal

from pydantic import Field, PlainValidator

from engine.values.model import Embedder, ModelCard, Task
from engine.values.request import Request
from server.errors import InvalidField
from server.generation.completion_request import Prompt, WirePrompt, parse_prompts
from server.generation.models import ServedModel
from server.generation.pooled import (
    PooledRequest,
    Tokens,
    bounded,
    pooled_requests,
    text_tokens,
    token_limit,
)
from server.generation.tasks import check_task
from server.record import RequestRecord

MAX_INPUTS = 2048


def _parse_inputs(value: object) -> list[Prompt]:
    return parse_prompts(value, MAX_INPUTS)


WireInputs = WirePrompt | Annotated[list[WirePrompt], Field(min_length=1, max_length=MAX_INPUTS)]
Inputs = Annotated[list[Prompt], PlainValidator(_parse_inputs, json_schema_input_type=WireInputs)]


class EmbeddingRequest(PooledRequest):
    EXAMPLE: ClassVar = {"input": ["What is a radix tree?", "A tree that shares beginnings."]}

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
