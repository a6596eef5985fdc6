"""An output that repeats itself without end is ended, and one that does so lawfully is not."""

import json
import random

import pytest

from engine.output.loops import LoopFinder
from engine.values.request import LoopLimit
from tests.grammars import demo_tokenizer

TOKENIZER = demo_tokenizer(2)
LIMIT = LoopLimit()


def ended(tokens: list[int], limit: LoopLimit = LIMIT) -> int | None:
    """After how many tokens it ends."""
    finder = LoopFinder(limit)
    return next((at for at, token in enumerate(tokens, 1) if finder.add(token)), None)


@pytest.mark.parametrize("period", [1, 2, 5, 8, 13, 40, 100, 511, 512])
@pytest.mark.parametrize("n_before", [0, 7, 3000])
def test_a_run_that_comes_again_and_again_is_a_loop(period: int, n_before: int) -> None:
    chance = random.Random(period)
    before = [chance.randrange(50_000) for _ in range(n_before)]
    run = [chance.randrange(50_000) for _ in range(period)]
    at = ended([*before, *(run * (4000 // period + 1))])
    assert at is not None
    n_cycle = LIMIT.cycle_tokens(period)
    assert n_before + n_cycle <= at <= n_before + n_cycle + period + 16


@pytest.mark.parametrize("period", range(1, 513, 17))
def test_a_loop_takes_four_copies_and_more_tokens_than_a_ruler_has(period: int) -> None:
    assert LIMIT.cycle_tokens(period) >= max(72, 4 * period)


def test_a_longer_run_is_no_loop() -> None:
    run = list(range(513))
    assert ended(run * 20) is None


def test_a_run_that_differs_in_one_token_each_time_is_no_loop() -> None:
    tokens = [token for number in range(500) for token in (1, 2, 3, 4, 1000 + number)]
    assert ended(tokens) is None


def rows(n: int) -> str:
    cells = (f"| {number} | item | 10 | ok |" for number in range(n))
    return "\n".join(["| n | what | price | state |", "| --- | --- | --- | --- |", *cells])


LAWFUL = {
    "a table": rows(200),
    "a ruler": "=" * 400 + "\n" + "-" * 400,
    "an empty table": "| | | | |\n" * 20,
    "an array of zeros": json.dumps([0] * 120),
    "a matrix": json.dumps([[int(row == column) for column in range(12)] for row in range(12)]),
    "equal objects": json.dumps([{"name": "", "value": None, "tags": []}] * 12),
    "records": json.dumps([{"id": number, "name": "item", "tags": []} for number in range(200)]),
    "code": "".join(f"    assert value[{n}] == {n % 7}\n    check(value)\n" for n in range(150)),
    "blank lines": "a = 1\n\n\n\n\n\n\n\nb = 2\n" * 8,
    "a poem": "Row, row, row your boat\n" * 12,
    "base64": "AAAA" * 60,
}


@pytest.mark.parametrize("text", LAWFUL.values(), ids=LAWFUL)
def test_text_that_lawfully_repeats_is_no_loop(text: str) -> None:
    assert ended(TOKENIZER.tokenize_str(text)) is None


def test_a_sentence_that_is_said_for_ever_is_a_loop() -> None:
    tokens = TOKENIZER.tokenize_str("I will now check the file once more.\n" * 200)
    at = ended(tokens)
    assert at is not None
    assert at < 700


@pytest.mark.parametrize(("count", "least", "most"), [(3, 1, 20), (2, 4, 8), (10, 1, 1)])
def test_a_request_may_say_how_often_is_too_often(count: int, least: int, most: int) -> None:
    limit = LoopLimit(most, least, count)
    run = list(range(most))
    at = ended([77, *(run * (count + 20))], limit)
    assert at is not None
    assert at <= 1 + count * most + most + 16
    assert ended([*range(500)], limit) is None
    if least > 1:
        assert ended([7] * (least - 1) + [8, 9], limit) is None
