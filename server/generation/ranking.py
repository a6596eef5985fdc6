"""Pairs of a query and a document as requests to the engine, and what these become as scores.

A reranker reads each pair as one prompt. An embedder embeds each text once, and the score of a pair
is the cosine of its two vectors."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, TypeAlias

from pydantic import Field

from engine.values.model import Embedder, Reranker, Task, Tokenizer
from engine.values.request import Pooling, Request
from server.errors import InvalidField
from server.generation.pooling import (
    PooledRequest,
    Tokens,
    bounded,
    cosine,
    pooled_requests,
    score,
    text_tokens,
    token_limit,
    vector,
)
from server.generation.requests import ServedModel, check_task
from server.record import RequestRecord

Instruction = Annotated[
    str | None,
    Field(
        description="What a document has to be for the query, where the model's template takes it."
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


async def prepare_ranking(
    body: RankingRequest, pairs: Sequence[Pair], model: ServedModel, record: RequestRecord
) -> tuple[list[Request], Scores]:
    """The engine's requests, and what makes scores of their results.

    Raises ApiError (400) for what the model cannot compare.
    """
    check_task(model, Task.RERANK, Task.EMBED)
    return await model.workers.prepare(record, partial(_prepared, body, pairs, model, record))


def _prepared(
    body: RankingRequest, pairs: Sequence[Pair], model: ServedModel, record: RequestRecord
) -> tuple[list[Request], Scores]:
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
        """Where in `tokens` it is, or is from now on. Raises ApiError (400)."""
        if text not in self._places:
            encode = partial(text_tokens, self._model.engine.tokenizer, text, self._limit)
            self._places[text] = len(self.tokens)
            self.tokens.append(bounded(encode, self._model.engine.card, param))
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
        return bounded(partial(encode, document), card, pair.document_param)
    kept = limit - len(bounded(partial(encode, ""), card, pair.query_param))
    while kept > 0:
        tokens = encode(_cut(tokenizer, document, kept))
        if len(tokens) <= limit:
            return bounded(partial(tuple, tokens), card, pair.document_param)
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
