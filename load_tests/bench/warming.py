"""The time to a chat's first token, with its system prompt warmed and without.

    python -m load_tests.bench.warming --url http://127.0.0.1:8000

Empties the daemon's cache in memory before each chat.
"""

import statistics
import time
from typing import Annotated, Any

import httpx
import typer

RULES = 60
SYSTEM = " ".join(
    ["You review code."]
    + [f"Rule {n}: name each fault that you find, and say why it is one." for n in range(RULES)]
)
SYSTEM_MESSAGE = {"role": "system", "content": SYSTEM}
CHAT = {
    "messages": [SYSTEM_MESSAGE, {"role": "user", "content": "What is a radix tree?"}],
    "max_tokens": 8,
    "temperature": 0,
    "stream": True,
}


def warm(client: httpx.Client) -> dict[str, Any]:
    """Have the system prompt computed. Returns what the daemon says of it."""
    body = {"messages": [SYSTEM_MESSAGE]}
    answer: dict[str, Any] = client.post("/v1/cache/warm", json=body).raise_for_status().json()
    return answer


def first_token_seconds(client: httpx.Client) -> float:
    """From the request to the first piece of text."""
    began, seconds = time.perf_counter(), 0.0
    with client.stream("POST", "/v1/chat/completions", json=CHAT) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if not seconds and '"content":"' in line and '"content":""' not in line:
                seconds = time.perf_counter() - began
    return seconds


def main(
    url: Annotated[str, typer.Option(help="Of a daemon that does nothing else.")],
    rounds: Annotated[int, typer.Option(help="Chats of each kind, which alternate.")] = 20,
) -> None:
    """Print the median, the least and the greatest time of each kind."""
    times: dict[bool, list[float]] = {False: [], True: []}
    with httpx.Client(base_url=url, timeout=None) as client:
        tokens = warm(client)["prompt_tokens"]
        first_token_seconds(client)  # not counted: it builds what later ones find
        for number in range(rounds):
            for is_warmed in (number % 2 == 0, number % 2 == 1):
                client.post("/admin/cache/clear", params={"tiers": "memory"}).raise_for_status()
                if is_warmed:
                    warm(client)
                times[is_warmed].append(first_token_seconds(client))
    print(f"a system prompt of {tokens:,} tokens, {rounds} chats of each kind")
    for is_warmed, taken in times.items():
        name = "warmed" if is_warmed else "not warmed"
        milliseconds = [1e3 * each for each in (statistics.median(taken), min(taken), max(taken))]
        print("{}: {:,.0f} ms, {:,.0f} to {:,.0f}".format(name, *milliseconds))


if __name__ == "__main__":
    typer.run(main)
