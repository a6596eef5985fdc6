"""`POST /tokenize`, `/detokenize`, `GET /tokenizer_info`, in vLLM's shapes."""

from typing import Annotated, ClassVar

from pydantic import (
    BaseModel,
    Field,
    PlainValidator,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticCustomError

from engine.api import ModelError
from engine.launch import Checkpoint, open_checkpoint
from server.dialects.endpoint import Endpoints
from server.dialects.openai import (
    ChatConversation,
    MessagesOrPrompt,
    messages_or,
)
from server.dialects.openai_logprobs import token_text
from server.errors import UNSUPPORTED, not_loaded
from server.generation.images import with_images
from server.generation.prompt import ChatPrompt, check_token_ids
from server.generation.request_fields import (
    Prompt,
    TokenId,
    WirePrompt,
    parse_prompts,
    parse_token_ids,
)
from server.generation.requests import ServedModel
from server.json_model import RequestModel
from server.record import RequestRecord
from server.service import Context, ModelName


def _parse_prompt(value: object) -> Prompt:
    prompts = parse_prompts(value)
    if len(prompts) != 1:
        raise PydanticCustomError("prompt", "one prompt at a time")
    return prompts[0]


WireOnePrompt = WirePrompt | Annotated[list[WirePrompt], Field(min_length=1, max_length=1)]


OnePrompt = Annotated[Prompt, PlainValidator(_parse_prompt, json_schema_input_type=WireOnePrompt)]


class PromptOrChat(MessagesOrPrompt, ChatConversation):
    """A prompt as text or token ids, or a chat body."""

    EXAMPLE: ClassVar = {"messages": [{"role": "user", "content": "What is a radix tree?"}]}

    model_config = messages_or({"type": ["string", "array"]})

    prompt: OnePrompt | None = None


def prompt_tokens(
    body: PromptOrChat,
    model: ServedModel,
    record: RequestRecord,
    *,
    add_special_tokens: bool = True,
) -> ChatPrompt:
    """The prompt of either kind of completion. `add_special_tokens` applies to plain text.

    Raises ApiError (400) for one that the model cannot take, and UnpreparedImages.
    """
    if body.prompt is None:
        salt = record.cache_salt(body.cache_salt)
        conversation = with_images(body.conversation, model.engine, record)
        return model.prompts.chat(conversation, model.replays, salt)
    return ChatPrompt(model.prompts.text(body.prompt, add_special_tokens=add_special_tokens))


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
    """A checkpoint's tokenizer; missing parts are null."""

    tokenizer_class: str | None
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None


router = Endpoints()


@router.direct("/tokenize", body=TokenizeRequest, answer=TokenizeResponse)
def tokenize(body: TokenizeRequest, model: ServedModel, record: RequestRecord) -> TokenizeResponse:
    with_special = body.add_special_tokens is not False
    tokens, _ = prompt_tokens(body, model, record, add_special_tokens=with_special)
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


@router.direct("/detokenize", body=DetokenizeRequest, answer=DetokenizeResponse)
def detokenize(
    body: DetokenizeRequest, model: ServedModel, record: RequestRecord
) -> DetokenizeResponse:
    return DetokenizeResponse(prompt=model.prompts.decode(body.tokens, "tokens"))


@router.endpoint("GET", "/tokenizer_info", errors=(400, 403, 404, 409))
async def tokenizer_info(context: Context, model: ModelName = "") -> TokenizerInfo:
    """The data for clients that render chats themselves, such as lm-eval, under vLLM's names. It
    comes from the model's files; the model is not loaded for it.
    """
    service, record = context.service, context.record
    source = (await service.chosen(model, record)).settings.source
    try:
        return await service.workers.run(record.client, 0, lambda: _info(open_checkpoint(source)))
    except ModelError as error:
        raise not_loaded(f"The files of the model cannot be read: {error}") from error


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
