"""Fields that requests of several dialects have: the model, sampling, stops, structured output."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial
from typing import Annotated, Any, Literal, Self, TypeGuard

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    StringConstraints,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import PydanticCustomError

from engine.values.model import MinP, RepetitionPenalty, Temperature, TopK, TopP
from engine.values.request import Grammar, GrammarKind
from server.generation.foreign_fields import ForeignFields, Unsupported
from server.generation.sampler_fields import SamplerFields
from server.json_model import (
    OBJECT,
    RequestModel,
    any_of,
    at_most,
    integral_to_int,
    of_type,
    present,
    refused,
)

MAX_CHOICE_TEXTS = 1024

ANY_OBJECT = {"type": "object"}

NoSuffix = SkipJsonSchema[Annotated[str, refused("inserting text is not supported")]]
ModelsTemplate = SkipJsonSchema[Annotated[str, refused("the model's own is the only one")]]


class NamedSchema(RequestModel):
    name: str = Field("", max_length=256)
    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(RequestModel):
    """OpenAI's, and that of llama.cpp, Together and Fireworks, where `schema` stands next to the
    type. Where there is a schema it is kept to, `strict` or not.
    """

    model_config = any_of(
        of_type("text", "json_object"), present(json_schema=OBJECT), present(schema=OBJECT)
    )

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")

    @model_validator(mode="after")
    def _has_its_schema(self) -> Self:
        if self.type == "json_schema" and self.json_schema is None and self.schema_ is None:
            raise PydanticCustomError("json_schema", "json_schema is missing")
        if self.json_schema is not None and self.schema_ is not None:
            raise PydanticCustomError("schema", "give either json_schema or schema")
        if self.type == "text" and (self.json_schema or self.schema_ is not None):
            raise PydanticCustomError("schema", "a text has no schema; the type is json_schema")
        return self


Structure = tuple[str, Grammar]
"""The field that requests a grammar, for errors, and the grammar that the answer must match."""

Choices = Annotated[
    list[Annotated[str, Field(min_length=1)]],
    Field(min_length=1, max_length=MAX_CHOICE_TEXTS, fail_fast=True),
]
JsonSchemaText = dict[str, Any] | str
"""A JSON schema, or its text."""


class StructuredOutputs(RequestModel):
    """vLLM's `structured_outputs`. At most one of them."""

    json_: JsonSchemaText | None = Field(None, alias="json")
    json_object: bool = False
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    structural_tag: Unsupported = None
    whitespace_pattern: Unsupported = None
    disable_any_whitespace: Unsupported = None

    def grammars(self) -> Iterator[Structure]:
        """The grammars that the fields describe, each with its field's name."""
        any_object = ANY_OBJECT if self.json_object else None
        json, regex, choice, grammar = self.json_, self.regex, self.choice, self.grammar
        return _grammars(
            json=json, json_object=any_object, regex=regex, choice=choice, grammar=grammar
        )


def of_format(format: ResponseFormat) -> Grammar | None:
    """The output format of a `response_format`; None for text."""
    if format.type == "text":
        return None
    if format.json_schema is not None:
        return of_schema(format.json_schema.schema_)
    return of_schema(ANY_OBJECT if format.schema_ is None else format.schema_)


def of_schema(schema: JsonSchemaText) -> Grammar:
    text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
    return Grammar(GrammarKind.JSON_SCHEMA, text)


_GBNF = re.compile(r"^[ \t]*[A-Za-z0-9_-]+[ \t]*::=", re.MULTILINE)


def of_grammar(text: str) -> Grammar:
    """The grammar of a text in Lark or, where its rules have `::=`, in GBNF."""
    return Grammar(GrammarKind.GBNF if _GBNF.search(text) else GrammarKind.LARK, text)


def of_choice(choices: list[str]) -> Grammar:
    """A format that allows exactly one of some texts."""
    quoted = (json.dumps(choice, ensure_ascii=False) for choice in choices)
    return Grammar(GrammarKind.LARK, f"start: {' | '.join(quoted)}")


_GRAMMARS: Mapping[str, Callable[[Any], Grammar]] = {
    "json": of_schema,
    "json_object": of_schema,
    "regex": partial(Grammar, GrammarKind.REGEX),
    "choice": of_choice,
    "grammar": of_grammar,
}


def _grammars(**given: object) -> Iterator[Structure]:
    """The names and grammars of those that are not None."""
    for name, value in given.items():
        if value is not None:
            yield name, _GRAMMARS[name](value)


NO_LIMIT = -1
"""A token limit as LM Studio sends it: none."""
MODELS_OWN = "Left out or null: the model's own, the sampling_defaults of GET /v1/models/{id}."
SPECULATE = (
    "Whether tokens may be drafted where that makes the answer faster. Its text is the same."
)
RETURN_PROGRESS = (
    "llama.cpp's: whether a stream says how much of the prompt is read, in `prompt_progress`, each "
    "time that more of it is."
)
MAX_STOPS = 64
MAX_STOP_CHARACTERS = 512
MAX_STOP_CHARACTERS_IN_ALL = 4096  # each is looked for in every character of every answer
MAX_LOGIT_BIASES = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_ALLOWED_TOKEN_IDS = 4096
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARACTERS = 128


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _few_characters(stop: list[str]) -> list[str]:
    if sum(map(len, stop)) > MAX_STOP_CHARACTERS_IN_ALL:
        message = "at most {limit} characters in all"
        raise PydanticCustomError("stop", message, {"limit": MAX_STOP_CHARACTERS_IN_ALL})
    return stop


StopText = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_CHARACTERS)]
StopTexts = Annotated[
    list[StopText],
    Field(max_length=MAX_STOPS, fail_fast=True),
    AfterValidator(_few_characters),
]
TokenId = Annotated[int, BeforeValidator(integral_to_int), Field(ge=0)]
BadWord = Annotated[str, StringConstraints(min_length=1, max_length=MAX_BAD_WORD_CHARACTERS)]
TokenIdText = Annotated[str, StringConstraints(pattern="^[0-9]{1,9}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]
Biases = Annotated[
    dict[TokenIdText, Bias],
    at_most(MAX_LOGIT_BIASES),
    Field(json_schema_extra={"maxProperties": MAX_LOGIT_BIASES, "additionalProperties": False}),
]
TokenLimit = Annotated[int, Field(ge=NO_LIMIT)]


class StreamOptions(RequestModel):
    include_usage: bool = False


class PromptRequest(RequestModel):
    """The model, and the salt that separates cached prefixes."""

    model: str = Field("", max_length=256)
    cache_salt: str = Field("", max_length=256)


class PrioritizedRequest(RequestModel):
    """A priority, where the settings let clients choose one."""

    priority: int = Field(0, ge=-1000, le=1000)


class RepetitionDetection(RequestModel):
    """vLLM's: the output ends when a run of `min_pattern_size` to `max_pattern_size` tokens has
    come `min_count` times in a row. A `max_pattern_size` of 0 turns that off.
    """

    max_pattern_size: int = Field(0, ge=0, le=512)
    min_pattern_size: int = Field(0, ge=0, le=512)
    min_count: int = Field(0, ge=0, le=1024)

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.max_pattern_size < self.min_pattern_size:
            raise PydanticCustomError("size", "max_pattern_size is below min_pattern_size")
        if self.max_pattern_size and self.min_count < MIN_COPIES:
            raise PydanticCustomError("count", "min_count must be at least 2")
        return self


MIN_COPIES = 2


class PromptCacheOptions(RequestModel):
    """OpenAI's, and `keep`. Every prompt is cached for as long as there is room for it."""

    mode: Literal["implicit", "explicit"] = Field(
        "implicit", description="No effect: a prompt needs no breakpoints to be cached."
    )
    ttl: Literal["30m"] = Field("30m", description="No effect: nothing is dropped for its age.")
    prewarm: bool = False
    keep: bool = Field(
        True,
        description="Off: what is computed for the request is freed at its end, and never on disk. "
        "What others have cached is used.",
    )

    @model_validator(mode="after")
    def _is_kept_for_something(self) -> Self:
        if self.prewarm and not self.keep:
            raise PydanticCustomError("keep", "keep: a prompt is warmed to be kept")
        return self


class PrewarmRequest(RequestModel):
    """Two ways to have a prompt computed and cached, and nothing generated."""

    generate: bool = True
    prompt_cache_options: PromptCacheOptions = Field(default_factory=PromptCacheOptions)

    @property
    def is_prewarm(self) -> bool:
        return not self.generate or self.prompt_cache_options.prewarm


class SampledRequest(
    PromptRequest, PrioritizedRequest, PrewarmRequest, SamplerFields, ForeignFields
):
    """Sampling and stop conditions. Defaults are OpenAI's, or the model's own. What would change
    the answer and is not served is refused, never ignored: see ForeignFields.
    """

    stream: bool = False

    temperature: Temperature | None = Field(None, description=MODELS_OWN)
    top_p: TopP | None = Field(None, description=MODELS_OWN)
    top_k: TopK | None = Field(None, description=MODELS_OWN)
    min_p: MinP | None = Field(None, description=MODELS_OWN)
    repetition_penalty: RepetitionPenalty | None = Field(None, description=MODELS_OWN)
    repeat_penalty: RepetitionPenalty | None = Field(
        None, description="llama.cpp's name of `repetition_penalty`."
    )
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: Biases = Field(default_factory=dict)
    allowed_token_ids: list[TokenId] | None = Field(
        None,
        min_length=1,
        max_length=MAX_ALLOWED_TOKEN_IDS,
        fail_fast=True,
        description="The only tokens that may be generated, those that end the answer included.",
    )
    bad_words: list[BadWord] = Field(
        default_factory=list,
        max_length=MAX_BAD_WORDS,
        fail_fast=True,
        description="Texts that are not generated: the last token of one, with or without a space "
        "before it, never follows its other tokens.",
    )
    seed: int | None = Field(None, ge=-(2**63), le=2**64 - 1)

    stop: Annotated[
        StopTexts, BeforeValidator(_as_list, json_schema_input_type=StopText | StopTexts)
    ] = Field(default_factory=list)
    stop_token_ids: list[TokenId] = Field(
        default_factory=list, max_length=MAX_STOP_TOKEN_IDS, fail_fast=True
    )
    ignore_eos: bool = False
    min_tokens: int = Field(0, ge=0, le=2**31 - 1)
    repetition_detection: RepetitionDetection | None = None
    speculate: bool = Field(True, description=SPECULATE)
    return_progress: bool = Field(False, description=RETURN_PROGRESS)


AnswerFormat = Literal["", "json"] | dict[str, Any]
"""Ollama's `format`: none, any JSON object, or a schema."""


class StructuredRequest(RequestModel):
    """What the answer has to match, under the names that OpenAI, vLLM, SGLang, llama.cpp and Ollama
    have for it. All dialects take all of them, one at a time.
    """

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonSchemaText | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    json_schema: JsonSchemaText | None = None
    regex: str | None = None
    grammar: str | None = Field(None, description="In GBNF, as llama.cpp has it, or in Lark.")
    ebnf: str | None = Field(None, description="In GBNF, by SGLang's name.")
    format: AnswerFormat = ""

    @model_validator(mode="after")
    def _one_structure(self) -> Self:
        if len(names := [name for name, _ in self._asked]) > 1:
            message = "only one of {names} can be asked for"
            raise PydanticCustomError("structure", message, {"names": " and ".join(names)})
        return self

    @property
    def structure(self) -> Structure | None:
        """The field that requests structured output, and its grammar."""
        return next(iter(self._asked), None)

    @cached_property
    def _asked(self) -> list[Structure]:
        """Kept from the validation, which a thread does where a schema may be long."""
        return list(self._structures())

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy, which may request another structure."""
        copied = super().model_copy(update=update, deep=deep)
        copied.__dict__.pop("_asked", None)
        return copied

    def _structures(self) -> Iterator[Structure]:
        """All structures that the fields request. A dialect adds those of its own fields."""
        if self.response_format is not None and (asked := of_format(self.response_format)):
            yield "response_format", asked
        if self.structured_outputs is not None:
            for name, asked in self.structured_outputs.grammars():
                yield f"structured_outputs.{name}", asked
        for name, asked in _grammars(
            json=self.guided_json,
            regex=self.guided_regex,
            choice=self.guided_choice,
            grammar=self.guided_grammar,
        ):
            yield f"guided_{name}", asked
        if self.json_schema is not None:
            yield "json_schema", of_schema(self.json_schema)
        yield from _grammars(regex=self.regex or None, grammar=self.grammar or None)
        if self.ebnf:
            yield "ebnf", Grammar(GrammarKind.GBNF, self.ebnf)
        if self.format != "":
            yield "format", of_schema(ANY_OBJECT if self.format == "json" else self.format)


class GenerationRequest(SampledRequest, StructuredRequest):
    """Fields that both kinds of completion take."""

    n: int = Field(1, ge=1, le=128)
    stream_options: StreamOptions | None = None

    @field_validator("stream_options")
    @classmethod
    def _only_with_stream(
        cls, value: StreamOptions | None, info: ValidationInfo
    ) -> StreamOptions | None:
        if value is not None and not info.data.get("stream"):
            raise PydanticCustomError("stream_options", "only allowed when stream is true")
        return value

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and self.stream_options.include_usage


MAX_PROMPTS = 256

Prompt = str | list[int]


def parse_prompts(value: object, most: int = MAX_PROMPTS) -> list[Prompt]:
    """Text, token ids, or a list of either, as a list of at most `most` prompts."""
    if not isinstance(value, list) or _token_ids(value) is not None:
        return [_parse(value)]
    if len(value) > most:
        message = "at most {limit} prompts in one request"
        raise PydanticCustomError("prompt", message, {"limit": most})
    return [_parse(prompt) for prompt in value]


def _parse(value: object) -> Prompt:
    if isinstance(value, str):
        return value
    if (tokens := _token_ids(value)) is not None:
        return tokens
    raise PydanticCustomError(
        "prompt", "must be a string, a list of strings, token ids, or a list of those"
    )


def parse_token_ids(value: object) -> list[int]:
    """Token ids alone. In Python, which lets other threads run: there may be millions of them."""
    if (tokens := _token_ids(value)) is not None:
        return tokens
    raise PydanticCustomError("tokens", "must be a list of token ids")


def _token_ids(value: object) -> list[int] | None:
    """The list as token ids; None if it is not one."""
    if not isinstance(value, list):
        return None
    if _is_integers(value):
        return value
    tokens = [integral_to_int(item) for item in value]
    return tokens if _is_integers(tokens) else None


def _is_integers(values: list[object]) -> TypeGuard[list[int]]:
    return all(type(value) is int for value in values)


WirePrompt = str | Annotated[list[TokenId], Field(min_length=1)]
