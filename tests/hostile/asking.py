"""Hostile requests are sent, and what comes of them."""

import json

import httpx

from tests.hostile.cases import Case

TAKEN = frozenset({httpx.codes.OK, httpx.codes.BAD_REQUEST})


async def send(http: httpx.AsyncClient, case: Case) -> int:
    """Its status. Anything but 200 and 400 is an AssertionError."""
    written = json.dumps(case.body)  # in ASCII, so that half a character is sent, too
    headers = {"Content-Type": "application/json"}
    answer = await http.post(case.path, content=written, headers=headers)
    assert answer.status_code in TAKEN, f"{case.name}: {answer.status_code} {answer.text[:400]}"
    return answer.status_code


async def is_alive(http: httpx.AsyncClient) -> bool:
    return (await http.get("/health")).status_code == httpx.codes.OK
