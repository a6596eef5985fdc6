"""How a client's script is run and what it reports: one JSON object a line for each check.
node/checks.mjs is the same for Node. Standard library alone, as scenario.py.

A check of a script is a public function that takes the daemon.
"""

import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType
from urllib.request import urlopen

from tests.clients.scenario import SCRIPTED

PATIENCE_SECONDS = 30


@dataclass(frozen=True)
class Daemon:
    """Where the script finds the daemon."""

    root: str
    """The URL without /v1, as Anthropic's clients want it."""

    model: str

    @property
    def base_url(self) -> str:
        """With /v1, as OpenAI's clients want it."""
        return f"{self.root}/v1"

    def wait_until_it_runs(self, count: int) -> None:
        """Until the engine has so many requests; raises TimeoutError if it never has."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (running := self._running()) != count:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{running} requests run, and not {count}")
            time.sleep(0.02)

    def prompts(self, route: str) -> list[tuple[int, int]]:
        """Of each request of the route that is over: tokens of its prompt that were cached, and
        all. The latest is the first.
        """
        with urlopen(f"{self.root}/admin/requests/log") as answer:
            requests = json.load(answer)["requests"]
        return [
            (request["cached_tokens"], request["prompt_tokens"])
            for request in requests
            if request["route"] == route
        ]

    def _running(self) -> int:
        with urlopen(f"{self.root}/admin/requests") as answer:
            return len(json.load(answer)["requests"])


Check = Callable[[Daemon], str]
"""Says what it saw. Raises whatever it likes if that was wrong."""


@dataclass(frozen=True)
class Scripted:
    """Decorates a check that only a scripted model can be relied on for."""

    check: Check


REPORT = '{"check": '
"""How each line of the report begins; a client may print others."""


def main(script: Mapping[str, object], *more: Check | Scripted) -> None:
    """Run `more` and the checks among a script's `globals()`, in the order of their definition, on
    the daemon that the command line names: URL, model.
    """
    daemon = Daemon(*sys.argv[1:3])
    results = list[bool]()
    for check in (*more, *_defined_in(script)):
        if isinstance(check, Scripted):
            if daemon.model == SCRIPTED:
                results.append(_result(check.check, daemon))
        else:
            results.append(_result(check, daemon))
    sys.exit(not all(results))


def raised(error: type[Exception], act: Callable[[], object]) -> Exception:
    """The error, which must be of this type."""
    try:
        act()
    except error as caught:
        return caught
    raise AssertionError(f"no {error.__name__} was raised")


def with_cached(answer: str, n_tokens: int) -> str:
    """The answer, and how many tokens of its prompt were cached: there must be some."""
    assert answer
    assert n_tokens > 0, answer
    return f"{answer} ({n_tokens} cached)"


def stopped(daemon: Daemon, close: Callable[[], object]) -> str:
    """An answer that has begun and never ends is given up, and with it what the engine does."""
    daemon.wait_until_it_runs(1)
    close()
    daemon.wait_until_it_runs(0)
    return "nothing runs any more"


def _defined_in(script: Mapping[str, object]) -> Iterator[Check | Scripted]:
    for name, value in script.items():
        if isinstance(value, Scripted):
            yield value
        if not isinstance(value, FunctionType) or name.startswith("_"):
            continue
        if value.__module__ == script["__name__"]:  # it is not imported
            yield value


def _result(check: Check, daemon: Daemon) -> bool:
    try:
        detail, passed = check(daemon), True
    except Exception as error:  # whatever a client raises, the other checks are to run
        traceback.print_exc()
        detail, passed = f"{type(error).__name__}: {error}", False
    name = check.__name__.replace("_", " ")
    print(json.dumps({"check": name, "passed": passed, "detail": detail}), flush=True)
    return passed
