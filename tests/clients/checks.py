"""How a client's script is run and what it reports: one JSON object a line for each check."""

import json
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.clients.scenario import SCRIPTED


@dataclass(frozen=True)
class Daemon:
    """Where the script finds the daemon. `base_url` ends with /v1."""

    base_url: str
    model: str


Check = Callable[[Daemon], str]
"""Says what it saw. Raises whatever it likes if that was wrong."""

REPORT = '{"check": '
"""How each line of the report begins; a client may print others."""


def main(*checks: Check, scripted: Sequence[Check] = ()) -> None:
    """Run the checks on the daemon that the command line names: base URL, model.

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


def _result(check: Check, daemon: Daemon) -> bool:
    try:
        detail, passed = check(daemon), True
    except Exception as error:  # whatever a client raises, the other checks are to run
        traceback.print_exc()
        detail, passed = f"{type(error).__name__}: {error}", False
    name = check.__name__.replace("_", " ")
    print(json.dumps({"check": name, "passed": passed, "detail": detail}), flush=True)
    return passed
