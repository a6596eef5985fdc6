"""What the limits of a key let in, and what they count."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from server.access.keys import ApiKey, digest_of
from server.access.policy import KeyLimits, LimitReached
from server.record import Principal, RequestRecord


def limits(**given: int) -> KeyLimits:
    return KeyLimits(ApiKey(name="a", sha256=digest_of("a"), **given))


@asynccontextmanager
async def held(limits: KeyLimits, record: RequestRecord) -> AsyncIterator[None]:
    """As long as a request lasts."""
    async with record.held:
        await record.held.enter_async_context(limits.hold(record))
        yield


async def ask(limits: KeyLimits, tokens: int = 0) -> None:
    record = RequestRecord("r", Principal("a"))
    async with held(limits, record):
        record.tokens = tokens


async def refusal(limits: KeyLimits) -> LimitReached:
    with pytest.raises(LimitReached) as caught:
        await ask(limits)
    return caught.value


def retry_after_seconds(spent: LimitReached) -> int:
    return int(spent.headers["Retry-After"])


async def test_without_limits_there_are_none() -> None:
    for _ in range(1000):
        await ask(limits(), tokens=10**9)


async def test_so_many_at_a_time() -> None:
    two = limits(concurrency=2)
    async with held(two, RequestRecord("1", Principal("a"))):
        async with held(two, RequestRecord("2", Principal("a"))):
            spent = await refusal(two)
        await ask(two)
    assert (spent.limit, retry_after_seconds(spent)) == ("concurrency", 1)
    assert str(spent) == "The limit of this API key is 2 requests at a time."


async def test_what_goes_on_behind_its_request_keeps_its_place() -> None:
    one = limits(concurrency=1)
    record = RequestRecord("r", Principal("a"))
    async with held(one, record):
        goes_on = record.held.pop_all()
    await refusal(one)
    await goes_on.aclose()
    await ask(one)


async def test_a_request_that_fails_gives_its_place_back() -> None:
    one = limits(concurrency=1)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            async with held(one, RequestRecord("r", Principal("a"))):
                raise ZeroDivisionError
    await ask(one)


async def test_so_many_a_minute() -> None:
    three = limits(requests_per_minute=3)
    for _ in range(3):
        await ask(three)
    spent = await refusal(three)
    assert spent.limit == "requests_per_minute"
    assert 1 <= retry_after_seconds(spent) <= 60
    assert "3 requests a minute" in str(spent)


async def test_tokens_are_charged_at_the_end_and_let_in_while_any_are_left() -> None:
    ten = limits(tokens_per_minute=10)
    await ask(ten, tokens=9)
    await ask(ten, tokens=10**6)
    spent = await refusal(ten)
    assert spent.limit == "tokens_per_minute"
    assert 1 <= retry_after_seconds(spent) <= 60
    assert "10 tokens a minute" in str(spent)


async def test_a_request_that_fails_pays_for_what_it_had() -> None:
    ten = limits(tokens_per_minute=10)
    record = RequestRecord("r", Principal("a"), tokens=10)
    with pytest.raises(ZeroDivisionError):
        async with held(ten, record):
            raise ZeroDivisionError
    await refusal(ten)


async def test_who_is_refused_for_one_limit_does_not_pay_for_another() -> None:
    both = limits(concurrency=1, requests_per_minute=2)
    async with held(both, RequestRecord("1", Principal("a"))):
        for _ in range(5):
            assert (await refusal(both)).limit == "concurrency"
    await ask(both)
    assert (await refusal(both)).limit == "requests_per_minute"
    spent = limits(concurrency=1, tokens_per_minute=1)
    await ask(spent, tokens=1)
    for _ in range(3):  # and gives back what it had taken of the first
        assert (await refusal(spent)).limit == "tokens_per_minute"


async def test_each_key_has_its_own() -> None:
    one, other = limits(requests_per_minute=1), limits(requests_per_minute=1)
    await ask(one)
    await refusal(one)
    await ask(other)
