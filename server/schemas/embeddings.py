"""`POST /v1/embeddings`."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field, PlainValidator

from server.schemas.common import PromptRequest, PromptTokensDetails
from server.schemas.completions import Prompt, WirePrompt, parse_prompts

MAX_INPUTS = 2048

WHOLE_CONTEXT = -1
"""`truncate_prompt_tokens`: to as much as a sequence may have."""


def _parse_inputs(value: object) -> list[Prompt]:
    return parse_prompts(value, MAX_INPUTS)


WireInputs = WirePrompt | Annotated[list[WirePrompt], Field(min_length=1, max_length=MAX_INPUTS)]
Inputs = Annotated[list[Prompt], PlainValidator(_parse_inputs, json_schema_input_type=WireInputs)]


class PooledRequest(PromptRequest):
    """Fields of all requests that ask for vectors or scores."""

    priority: int = Field(0, ge=-1000, le=1000)
    truncate_prompt_tokens: int | None = Field(
        None,
        ge=WHOLE_CONTEXT,
        description="Cut a text that has more tokens, at its end; -1: to what the model takes. "
        "Unset, such a text is refused.",
    )


class EmbeddingRequest(PooledRequest):
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


class Embedding(BaseModel):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class PooledUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class EmbeddingList(BaseModel):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: PooledUsage
