"""How a client's script is run and what it reports: one JSON object a line for each check.
node/checks.mjs is the same for Node. Standard library alone, as scenario.py.
"""

import json
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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

    def _running(self) -> int:
        with urlopen(f"{self.root}/admin/requests") as answer:
            return len(json.load(answer)["requests"])


Check = Callable[[Daemon], str]
"""Says what it saw. Raises whatever it likes if that was wrong."""

REPORT = '{"check": '
"""How each line of the report begins; a client may print others."""


def main(*checks: Check, scripted: Sequence[Check] = ()) -> None:
    """Run the checks on the daemon that the command line names: URL, model.

    What only a scripted model can be relied on for stands in `scripted`.
    """
    daemon = Daemon(*sys.argv[1:3])
    also = scripted if daemon.model == SCRIPTED else ()
    results = [_result(check, daemon) for check in (*checks, *also)]
    sys.exit(not all(results))


def raised(error: type[Exception], act: Callable[[], object]) -> Exception:
    """The error, which must be of this type."""
    try:
        act()
    except error as caught:
        return caught
    raise AssertionError(f"no {error.__name__} was raised")


def stopped(daemon: Daemon, close: Callable[[], object]) -> str:
    """An answer that has begun and never ends is given up, and with it what the engine does."""
    daemon.wait_until_it_runs(1)
    close()
    daemon.wait_until_it_runs(0)
    return "nothing runs any more"


def _result(check: Check, daemon: Daemon) -> bool:
    try:
        detail, passed = check(daemon), True
    except Exception as error:  # whatever a client raises, the other checks are to run
        traceback.print_exc()
        detail, passed = f"{type(error).__name__}: {error}", False
    name = check.__name__.replace("_", " ")
    print(json.dumps({"check": name, "passed": passed, "detail": detail}), flush=True)
    return passed
