"""Texts, and pairs of a query and a document, as requests to the engine that are pooled, and what
becomes of the results: vectors and scores.

A reranker reads each pair as one prompt. An embedder embeds each text once, and the score of a pair
is the cosine of its two vectors.
"""

from base64 import b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import exp
from typing import Annotated, ClassVar, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from pydantic import AliasChoices, Field, PlainValidator
from pydantic_core import PydanticCustomError

from engine.values.model import Embedder, ModelCard, Reranker, Task, Tokenizer
from engine.values.request import Pooling, Request
from engine.values.tokens import pack
from server.errors import InvalidField
from server.generation.prompt import bounded, check_prompt
from server.generation.request_fields import (
    PrioritizedRequest,
    Prompt,
    PromptRequest,
    WirePrompt,
    parse_prompts,
)
from server.generation.requests import ServedModel, check_task
from server.json_model import RequestModel
from server.record import RequestRecord

Vector: TypeAlias = npt.NDArray[np.float32]


def vector(pooled: bytes, embedder: Embedder, dimensions: int | None = None) -> Vector:
    """The first `dimensions` numbers of the pooled vector, at unit length if the checkpoint's
    are.
    """
    found = np.frombuffer(pooled, "<f4")[:dimensions]
    return unit(found) if embedder.normalized else found


def unit(found: Vector) -> Vector:
    """The vector at unit length; a zero vector is unchanged."""
    length = np.float32(np.linalg.norm(found))
    return found / length if length else found


def cosine(left: Vector, right: Vector) -> float:
    return float(unit(left) @ unit(right))


def score(pooled: bytes, reranker: Reranker) -> float:
    """The score from the one number that a reranker computes for a pair."""
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


class PooledRequest(PromptRequest, PrioritizedRequest):
    """Fields of all requests that ask for vectors or scores."""

    truncate_prompt_tokens: int | None = Field(
        None,
        ge=WHOLE_CONTEXT,
        description="Cut a text that has more tokens, at its end; -1: to what the model takes. "
        "Unset, such a text is refused.",
    )


Tokens: TypeAlias = tuple[int, ...]


def token_limit(body: PooledRequest, card: ModelCard) -> int | None:
    """The number of tokens to which a text is cut; None: a longer text is refused. Raises ApiError
    (400).
    """
    asked, most = body.truncate_prompt_tokens, card.max_sequence_tokens
    if asked is None:
        return None
    if asked == 0 or asked > most:
        raise InvalidField(
            "truncate_prompt_tokens",
            f"must be between 1 and {most}, or {WHOLE_CONTEXT} for as many",
        )
    return most if asked == WHOLE_CONTEXT else asked


def prompt_of(encode: Callable[[], Sequence[int]], card: ModelCard, param: str) -> Tokens:
    """The tokens, which are the model's and not too many. Raises ApiError (400)."""
    tokens = bounded(encode, card, param)
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
    """One request for each text. The cache keeps their common prefix."""
    salt = record.cache_salt(body.cache_salt)
    shared = [0] * len(texts)
    if pooling is Pooling.LAST:
        shared = model.prefixes.shared_tokens(salt, texts)
    return [
        Request(
            id=f"{record.id}-{index}",
            prompt=pack(text),
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
    """Parse inputs like `parse_prompts`, and also objects with a text, as Jina's clients send
    them.
    """
    if isinstance(value, list) and len(value) <= MAX_INPUTS:
        value = [_input_text(index, each) for index, each in enumerate(value)]
    return parse_prompts(value, MAX_INPUTS)


def _input_text(index: int, value: object) -> object:
    """The text of an object, or any other value as it is."""
    if not isinstance(value, dict):
        return value
    match value:
        case {"text": str(text)} if len(value) == 1:
            return text
    kinds = ", ".join(sorted(map(repr, value)))[:MAX_SHOWN] or "nothing"
    message = "item {index} is an object with {kinds}; only objects with a 'text' are embedded"
    raise PydanticCustomError("input", message, {"index": index, "kinds": kinds})


MAX_SHOWN = 100  # characters of a client's own keys in an error


class TextInput(RequestModel):
    """A text as an object, as Jina has it."""

    text: str


WireInputs = (
    WirePrompt | Annotated[list[WirePrompt | TextInput], Field(min_length=1, max_length=MAX_INPUTS)]
)
Inputs = Annotated[list[Prompt], PlainValidator(_parse_inputs, json_schema_input_type=WireInputs)]


class EmbeddingRequest(PooledRequest):
    EXAMPLE: ClassVar = {"input": ["What is a radix tree?", "A tree that shares prefixes."]}

    input: Inputs
    encoding_format: Literal["float", "base64"] = Field(
        "float", description="base64 is of little-endian float32."
    )
    dimensions: int | None = Field(
        None,
        ge=1,
        validation_alias=AliasChoices("dimensions", "output_dimension"),
        description="As many numbers from the front, of a length of 1 again. Or "
        "`output_dimension`, as Voyage has it.",
    )
    output_dtype: Literal["float"] = Field(
        "float", description="The type of the numbers, by Voyage's name."
    )
    prompt_name: str | None = Field(
        None,
        max_length=256,
        description="Which of the checkpoint's prompts stands before each text, by the name that "
        "config_sentence_transformers.json gives it. Unset: that file's default, mostly none.",
    )

    @property
    def input_names(self) -> list[str]:
        """The name of each input in errors."""
        if len(self.input) == 1:
            return ["input"]
        return [f"input[{index}]" for index in range(len(self.input))]


def embedding_requests(
    body: EmbeddingRequest, model: ServedModel, record: RequestRecord
) -> list[Request]:
    """The engine's requests, one for each input. Raises ApiError (400) for an input that the model
    cannot embed.
    """
    check_task(model, Task.EMBED)
    embedder = model.engine.card.embedder
    assert embedder is not None
    _check_dimensions(body, embedder)
    prompt = named_prompt(embedder, body.prompt_name)
    limit = token_limit(body, model.engine.card)
    texts = [
        _tokens(one, name, body, model, prompt, limit)
        for one, name in zip(body.input, body.input_names, strict=True)
    ]
    return pooled_requests(model, body, record, texts, embedder.pooling)


def named_prompt(embedder: Embedder, name: str | None) -> str:
    """The prompt before a text. Raises ApiError (400) for a name that the checkpoint lacks."""
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
        return prompt_of(lambda: text_tokens(tokenizer, text, limit) or _end(card), card, param)
    if body.prompt_name is not None:
        raise InvalidField("prompt_name", "goes before texts, and this input is tokens")
    return prompt_of(lambda: one[:limit], card, param)


def _end(card: ModelCard) -> list[int]:
    """An end-of-text token, which stands for an empty text where the tokenizer adds no tokens. An
    empty list where the model has no such token.
    """
    return sorted(card.eos_token_ids)[:1]


Instruction = Annotated[
    str | None,
    Field(
        description="How documents relate to the query, if the model's template has a place for it."
    ),
]


class RankingRequest(PooledRequest):
    """Fields that both routes have."""

    instruction: Instruction = None
    max_tokens_per_doc: int | None = Field(
        None, ge=1, description="Cut longer documents at their end."
    )


QUERY_PROMPTS = ("query",)
DOCUMENT_PROMPTS = ("document", "passage")
"""What checkpoints of embedders call the prompts of each."""

MAX_TOKENS = 1 << 20
"""Of all pairs of a request: each repeats the query, so their number alone bounds no memory."""

Scores: TypeAlias = Callable[[Sequence[bytes]], list[float]]
"""The scores of all pairs, in their order, from what the engine has pooled for all requests."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A query and a document, and the fields that they came in."""

    query: str
    document: str
    query_param: str
    document_param: str


def prepare_ranking(
    body: RankingRequest, pairs: Sequence[Pair], model: ServedModel, record: RequestRecord
) -> tuple[list[Request], Scores]:
    """The engine's requests, and the function that turns their results into scores.

    Raises ApiError (400) for what the model cannot compare.
    """
    check_task(model, Task.RERANK, Task.EMBED)
    for pair in pairs:
        for text, param in ((pair.query, pair.query_param), (pair.document, pair.document_param)):
            if not text:
                raise InvalidField(param, "must not be empty")
    card = model.engine.card
    if card.reranker is not None:
        return _by_reranker(body, pairs, model, card.reranker, record)
    assert card.embedder is not None
    return _by_similarity(body, pairs, model, card.embedder, record)


def _by_reranker(
    body: RankingRequest,
    pairs: Sequence[Pair],
    model: ServedModel,
    reranker: Reranker,
    record: RequestRecord,
) -> tuple[list[Request], Scores]:
    if body.instruction is not None and not reranker.is_templated:
        raise InvalidField("instruction", "this model's pairs have no place for one")
    prompts, n_tokens = list[Tokens](), 0
    for pair in pairs:
        prompts.append(_pair_tokens(body, pair, model, reranker))
        n_tokens += len(prompts[-1])
        if n_tokens > MAX_TOKENS:
            raise InvalidField(
                pair.document_param,
                f"the pairs up to here have {n_tokens} tokens, each with its query; at most "
                f"{MAX_TOKENS} in one request",
            )
    requests = pooled_requests(model, body, record, prompts, Pooling.LAST)

    def scores(pooled: Sequence[bytes]) -> list[float]:
        return [score(one, reranker) for one in pooled]

    return requests, scores


def _by_similarity(
    body: RankingRequest,
    pairs: Sequence[Pair],
    model: ServedModel,
    embedder: Embedder,
    record: RequestRecord,
) -> tuple[list[Request], Scores]:
    if body.instruction is not None:
        raise InvalidField("instruction", "this model embeds, and compares vectors")
    before_query = _prompt(embedder, QUERY_PROMPTS)
    before_document = _prompt(embedder, DOCUMENT_PROMPTS)
    texts = _Texts(model, token_limit(body, model.engine.card))
    places = [
        (
            texts.place(before_query + pair.query, pair.query_param),
            texts.place(before_document + _document(body, pair, model), pair.document_param),
        )
        for pair in pairs
    ]
    requests = pooled_requests(model, body, record, texts.tokens, embedder.pooling)

    def scores(pooled: Sequence[bytes]) -> list[float]:
        vectors = [vector(one, embedder) for one in pooled]
        return [cosine(vectors[query], vectors[document]) for query, document in places]

    return requests, scores


class _Texts:
    """Each text once, as tokens."""

    def __init__(self, model: ServedModel, limit: int | None) -> None:
        self._model = model
        self._limit = limit
        self._places: dict[str, int] = {}
        self.tokens: list[Tokens] = []

    def place(self, text: str, param: str) -> int:
        """The index of the input in `tokens`, to which it is added if new. Raises ApiError
        (400).
        """
        if text not in self._places:
            encode = partial(text_tokens, self._model.engine.tokenizer, text, self._limit)
            self._places[text] = len(self.tokens)
            self.tokens.append(prompt_of(encode, self._model.engine.card, param))
        return self._places[text]


def _prompt(embedder: Embedder, names: Sequence[str]) -> str:
    return next((embedder.prompts[name] for name in names if name in embedder.prompts), "")


def _document(body: RankingRequest, pair: Pair, model: ServedModel) -> str:
    if body.max_tokens_per_doc is None:
        return pair.document
    return _cut(model.engine.tokenizer, pair.document, body.max_tokens_per_doc)


def _cut(tokenizer: Tokenizer, text: str, most_tokens: int) -> str:
    """The text of its first tokens."""
    tokens = tokenizer.encode_beginning(text, most_tokens, add_special_tokens=False)
    return text if len(tokens) < most_tokens else tokenizer.decode(tokens)


def _pair_tokens(
    body: RankingRequest, pair: Pair, model: ServedModel, reranker: Reranker
) -> Tokens:
    """The prompt of a pair. Where that is cut, the document is."""
    card, tokenizer = model.engine.card, model.engine.tokenizer
    limit, document = token_limit(body, card), _document(body, pair, model)
    encode = partial(_joined, tokenizer, reranker, body.instruction, pair.query)
    if limit is None:
        return prompt_of(partial(encode, document), card, pair.document_param)
    kept = limit - len(prompt_of(partial(encode, ""), card, pair.query_param))
    while kept > 0:
        tokens = encode(_cut(tokenizer, document, kept))
        if len(tokens) <= limit:
            return prompt_of(partial(tuple, tokens), card, pair.document_param)
        kept -= len(tokens) - limit  # cut text may have a token more than it was cut to
    raise InvalidField(
        "truncate_prompt_tokens", f"a pair takes {limit} tokens without its document"
    )


def _joined(
    tokenizer: Tokenizer, reranker: Reranker, instruction: str | None, query: str, document: str
) -> list[int]:
    if not reranker.is_templated:
        return tokenizer.encode_pair(query, document)
    roles = [("system", instruction), ("query", query), ("document", document)]
    messages = [{"role": role, "content": text} for role, text in roles if text is not None]
    return tokenizer.apply_chat_template(messages)
