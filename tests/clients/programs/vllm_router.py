"""vllm-router with the policy kv_aware, before two daemons that publish KV events."""

import os
import tempfile
from contextlib import ExitStack
from pathlib import Path

from load_tests.fleet import Share, conversations, resends, router, worker
from tests.clients.checks import Daemon, main
from tests.clients.scenario import SCRIPTED


def resends_go_where_they_are_cached(daemon: Daemon) -> str:
    """Also by a router that has just been started, which knows only what it is told."""
    if daemon.model == SCRIPTED:
        return "with the demo model only"
    program = Path(os.environ["ENVIRONMENT"]) / "bin/vllm-router"
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        logs, share = Path(folder), Share()
        workers = [stack.enter_context(worker(logs / f"daemon{n}.log")) for n in range(2)]
        with router(program, "round_robin", workers, logs / "router.log") as url:
            held = conversations(url, 0, Share())
        with router(program, "kv_aware", workers, logs / "router.log") as url:
            resends(url, held, 0, share)
    assert share.cached_tokens > 0.8 * share.prompt_tokens, share
    return f"{share} of the tokens cached"


if __name__ == "__main__":
    main(globals())
