"""What a random model at temperature 1 answers under schemas: it conforms, or has no end."""

import asyncio
import json
from collections import Counter
from collections.abc import Iterable
from decimal import Decimal, InvalidOperation

import jsonschema

from engine.api import Engine, InvalidRequest
from engine.values.output import FinishReason
from engine.values.request import Constraint, Grammar, GrammarKind, Request, SamplingParams
from engine.values.tokens import pack
from tests.schemas.generate import Generator, Schema
from tools.events import events_of

AT_ONCE = 32


async def answers_conform(engine: Engine, seeds: Iterable[int], max_tokens: int) -> Counter[str]:
    """One answer under each seed's schema; counts how they ended.

    Raises AssertionError, with the seed, for an answer that does not conform, a sequence that
    fails, or an exception other than InvalidRequest.
    """
    ends: Counter[str] = Counter()
    waiting = list(seeds)
    for first in range(0, len(waiting), AT_ONCE):
        some = waiting[first : first + AT_ONCE]
        ends.update(await asyncio.gather(*(_answer(engine, seed, max_tokens) for seed in some)))
    return ends


async def _answer(engine: Engine, seed: int, max_tokens: int) -> str:
    schema = Generator(seed).schema()
    about = f"seed {seed}, {json.dumps(schema)}"
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))
    constraint = Constraint(grammar, "response_format")
    request = Request(
        f"{seed}", pack((5, 6, 7)), max_tokens, SamplingParams(seed=seed), constraint=constraint
    )
    try:
        events = [event async for event in events_of(engine, request)]
    except InvalidRequest:
        return "refused"
    text = "".join(event.text for event in events)
    end = events[-1].finish_reason
    if end is FinishReason.LENGTH:
        return "cut short"
    assert end is FinishReason.STOP, f"{end}: {about}"
    _conforms(text, schema, about)
    return "complete"


def _number(text: str) -> float | Decimal:
    """As its text says it: next to 2^53 a float may be the very bound that the text keeps off."""
    value = float(text)
    try:
        exact = Decimal(text)
    except InvalidOperation:  # beyond any exponent that it has
        return value
    return exact if value.is_integer() and value != exact else value


def _conforms(text: str, schema: Schema, about: str) -> None:
    validator = jsonschema.Draft202012Validator(
        schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    try:
        validator.validate(json.loads(text, parse_float=_number))
    except (ValueError, jsonschema.ValidationError) as error:
        raise AssertionError(f"{error} in {text!r}: {about}") from error
