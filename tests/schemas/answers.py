"""What a random model at temperature 1 answers under schemas: it conforms, or has no end."""

import asyncio
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any, NamedTuple, TypeAlias

import jsonschema
import jsonschema_rs

from engine.api import Engine, InvalidRequest
from engine.values.output import FinishReason
from engine.values.request import Constraint, Grammar, GrammarKind, Request, SamplingParams
from engine.values.tokens import pack
from tests.schemas.generate import Generator, Schema
from tools.events import events_of

AT_ONCE = 32
Tally: TypeAlias = Counter[str]


class Prompt(NamedTuple):
    """Tokens to answer, and the schema of the answer."""

    name: str
    schema: Schema
    tokens: Sequence[int]


async def answers_conform(engine: Engine, seeds: Iterable[int], max_tokens: int) -> Tally:
    """One answer under each seed's schema; counts how they ended.

    Raises AssertionError, with the seed, for an answer that does not conform, a sequence that
    fails, or an exception other than InvalidRequest.
    """
    ends: Tally = Counter()
    waiting = list(seeds)
    for first in range(0, len(waiting), AT_ONCE):
        some = waiting[first : first + AT_ONCE]
        ends.update(await asyncio.gather(*(_answer(engine, seed, max_tokens) for seed in some)))
    return ends


async def corpora_conform(engine: Engine, prompts: Iterable[Prompt], max_tokens: int) -> Tally:
    """One answer to each prompt under its schema, at most AT_ONCE of them at a time.

    Raises AssertionError for an answer that does not conform, and InvalidRequest for a schema that
    is refused.
    """
    ends: Tally = Counter()
    waiting = list(enumerate(prompts))
    for first in range(0, len(waiting), AT_ONCE):
        some = waiting[first : first + AT_ONCE]
        answers = (_complete(engine, seed, prompt, max_tokens) for seed, prompt in some)
        ends.update(await asyncio.gather(*answers))
    return ends


async def _answer(engine: Engine, seed: int, max_tokens: int) -> str:
    prompt = Prompt(f"seed {seed}", Generator(seed).schema(), (5, 6, 7))
    try:
        return await _complete(engine, seed, prompt, max_tokens)
    except InvalidRequest:
        return "refused"


async def _complete(engine: Engine, seed: int, prompt: Prompt, max_tokens: int) -> str:
    about = f"{prompt.name}, {json.dumps(prompt.schema)}"
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(prompt.schema))
    constraint = Constraint(grammar, "response_format")
    sampling = SamplingParams(seed=seed)
    request = Request(f"{seed}", pack(prompt.tokens), max_tokens, sampling, constraint=constraint)
    events = [event async for event in events_of(engine, request)]
    text = "".join(event.text for event in events)
    end = events[-1].finish_reason
    if end is FinishReason.LENGTH:
        return "cut short"
    assert end is FinishReason.STOP, f"{end}: {about}"
    _conforms(text, prompt.schema, about)
    return "complete"


def _number(text: str) -> float | Decimal:
    """As its text says it: next to 2^53 a float may be the very bound that the text keeps off."""
    value = float(text)
    try:
        exact = Decimal(text)
    except InvalidOperation:  # beyond any exponent that it has
        return value
    return exact if value.is_integer() and value != exact else value


def validator_of(schema: Schema) -> Any:
    """An independent one, for the draft that the schema is written in."""
    text = json.dumps(schema)
    if r"\\p{" in text:  # which Python's patterns do not have
        return jsonschema_rs.Draft202012Validator(schema)
    draft = jsonschema.Draft7Validator if '"items": [' in text else jsonschema.Draft202012Validator
    return draft(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)


def _conforms(text: str, schema: Schema, about: str) -> None:
    validator = validator_of(schema)
    try:
        validator.validate(json.loads(text, parse_float=_number))
    except (ValueError, jsonschema.ValidationError, jsonschema_rs.ValidationError) as error:
        raise AssertionError(f"{error} in {text!r}: {about}") from error
