"""`POST /tokenize`, `/detokenize`, `GET /tokenizer_info`, in vLLM's shapes."""

from collections.abc import Sequence
from typing import Annotated, ClassVar

from fastapi import Request
from pydantic import BaseModel, Field, PlainValidator, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError
from starlette.responses import Response

from engine.launch import Checkpoint, open_checkpoint
from server.dialects.delivery import respond_without_engine
from server.dialects.endpoint import MODEL_ERRORS, Endpoints
from server.dialects.openai import token_text
from server.dialects.prompt import PromptOrChat, prompt_tokens
from server.errors import UNSUPPORTED
from server.generation.models import ServedModel
from server.generation.output_size import CHARACTER_BYTES, TOKEN_BYTES, TOKEN_TEXT_BYTES
from server.generation.prompt import check_token_ids
from server.generation.request_fields import TokenId, parse_token_ids
from server.json_model import RequestModel
from server.service import ModelName, RecordDependency, ServiceDependency

TokenIds = Annotated[
    list[int], PlainValidator(parse_token_ids, json_schema_input_type=list[TokenId])
]


class TokenizeRequest(PromptOrChat):
    EXAMPLE: ClassVar = {"prompt": "A radix tree is"}

    add_special_tokens: bool | None = Field(
        None,
        description="Of a prompt: those that the tokenizer puts around a text. True unless set.",
    )
    return_token_strs: bool = False

    @field_validator("add_special_tokens")
    @classmethod
    def _of_a_prompt(cls, value: bool | None, info: ValidationInfo) -> bool | None:
        if value and info.data.get("messages"):
            raise PydanticCustomError(UNSUPPORTED, "a chat has those that its template writes")
        return value


class TokenizeResponse(BaseModel):
    count: int
    max_model_len: int  # the most tokens of prompt and answer
    tokens: list[int]
    token_strs: list[str] | None  # as log-probabilities name tokens


class DetokenizeRequest(RequestModel):
    EXAMPLE: ClassVar = {"tokens": [1, 2, 3]}

    model: str = Field("", max_length=256)
    tokens: TokenIds


class DetokenizeResponse(BaseModel):
    prompt: str


class TokenizerInfo(BaseModel):
    """A checkpoint's tokenizer; null for what it does not have."""

    tokenizer_class: str | None
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None


router = Endpoints()


@router.endpoint("POST", "/tokenize", answer=TokenizeResponse, errors=MODEL_ERRORS)
async def tokenize(
    body: TokenizeRequest, http: Request, service: ServiceDependency, record: RecordDependency
) -> Response:
    model = await service.model(body.model, record)
    with_special = body.add_special_tokens is not False
    tokens = await prompt_tokens(body, model, record, add_special_tokens=with_special)
    token_bytes = TOKEN_BYTES + (TOKEN_TEXT_BYTES if body.return_token_strs else 0)
    return await respond_without_engine(
        lambda: _tokenized(body, model, tokens), token_bytes * len(tokens), http, service
    )


@router.endpoint("POST", "/detokenize", answer=DetokenizeResponse, errors=MODEL_ERRORS)
async def detokenize(
    body: DetokenizeRequest, http: Request, service: ServiceDependency, record: RecordDependency
) -> Response:
    model = await service.model(body.model, record)
    text = await model.prompts.decode(record, body.tokens, "tokens")
    return await respond_without_engine(
        lambda: DetokenizeResponse(prompt=text), CHARACTER_BYTES * len(text), http, service
    )


@router.endpoint("GET", "/tokenizer_info", errors=(400, 403, 404))
async def tokenizer_info(
    service: ServiceDependency, record: RecordDependency, model: ModelName = ""
) -> TokenizerInfo:
    """What a client needs that renders chats itself, as lm-eval does, under vLLM's names."""
    source = (await service.chosen(model, record)).settings.source
    await service.hold(model, record)
    return await service.workers.run(record.client, 0, lambda: _info(open_checkpoint(source)))


def _info(checkpoint: Checkpoint) -> TokenizerInfo:
    tokens = checkpoint.special_tokens
    return TokenizerInfo(
        tokenizer_class=checkpoint.tokenizer_class,
        chat_template=checkpoint.chat_template or None,
        bos_token=tokens.get("bos_token"),
        eos_token=tokens.get("eos_token"),
        pad_token=tokens.get("pad_token"),
        unk_token=tokens.get("unk_token"),
    )


def _tokenized(
    body: TokenizeRequest, model: ServedModel, tokens: Sequence[int]
) -> TokenizeResponse:
    card, tokenizer = model.engine.card, model.engine.tokenizer
    check_token_ids(tokens, card, "prompt")
    texts = None
    if body.return_token_strs:
        texts = [token_text(tokenizer.token_bytes(token)) for token in tokens]
    return TokenizeResponse(
        count=len(tokens),
        max_model_len=card.max_sequence_tokens,
        tokens=list(tokens),
        token_strs=texts,
    )
