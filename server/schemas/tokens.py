"""`POST /tokenize` and `/detokenize`, in vLLM's shapes."""

from typing import Annotated

from pydantic import BaseModel, Field, PlainValidator, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from server.schemas.base import RequestModel
from server.schemas.common import TokenId
from server.schemas.completions import parse_token_ids
from server.schemas.errors import UNSUPPORTED
from server.schemas.prompt import PromptOrChat

TokenIds = Annotated[
    list[int], PlainValidator(parse_token_ids, json_schema_input_type=list[TokenId])
]


class TokenizeRequest(PromptOrChat):
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
