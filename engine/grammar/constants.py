"""Integers beyond 2^53 as constants.

llguidance compares numbers as 64-bit floats, so it would write an integer between two floats as one
of them. Such an integer is put as the only multiple of one of its divisors between these floats.
Some one in seven has no such divisor: a prime, or a small multiple of one.
"""

import math
from collections.abc import Iterator
from typing import Any, TypeAlias

Schema: TypeAlias = dict[str, Any]

MAX_INTEGER = 2**63 - 1
_MAX_DIVISOR = 2**32
_TRIAL_DIVISORS = 2**10
_MAX_STEPS = 2**17
"""Of the search for a divisor: one below 2^32 is found in some 2^16."""


def exact_integer(number: int) -> Schema | None:
    """A schema that allows this integer alone, which is no float; None where there is none."""
    low, high = _below(number), _above(number)
    if not -MAX_INTEGER <= low < high <= MAX_INTEGER + 1:
        return None
    divisor = _divisor(abs(number), max(number - low, high - number))
    if divisor is None:
        return None
    return {"type": "integer", "minimum": low, "maximum": high, "multipleOf": divisor}


def _below(number: int) -> int:
    nearest = float(number)
    return int(nearest if nearest <= number else math.nextafter(nearest, -math.inf))


def _above(number: int) -> int:
    nearest = float(number)
    return int(nearest if nearest >= number else math.nextafter(nearest, math.inf))


def _divisor(number: int, least: int) -> int | None:
    """A divisor above `least` that llguidance can count by."""
    product = 1
    for factor in _factors(number):
        if least < factor < _MAX_DIVISOR:
            return factor
        if factor <= least and product <= least:
            product *= factor
    return product if product > least else None


def _factors(number: int) -> Iterator[int]:
    """Small ones first; the last may not be prime."""
    for divisor in range(2, _TRIAL_DIVISORS):
        while number % divisor == 0:
            yield divisor
            number //= divisor
    while number >= _MAX_DIVISOR and (found := _rho(number)) is not None:
        yield found
        number //= found
    yield number


def _rho(number: int) -> int | None:
    """Pollard's rho: a divisor of a number without small ones; None for a prime."""
    if pow(3, number - 1, number) == 1:
        return None
    slow = fast = 2
    for _ in range(_MAX_STEPS):
        slow = (slow * slow + 1) % number
        fast = (fast * fast + 1) % number
        fast = (fast * fast + 1) % number
        if (found := math.gcd(slow - fast, number)) != 1:
            return found if found != number else None
    return None
