"""Daemons behind a router: what is counted, and what counts as a loss."""

import json
import sys
from pathlib import Path

import httpx
import pytest

from load_tests.client import TargetError
from load_tests.replicas.command import loss_table, share_table
from load_tests.replicas.fleet import FAILOVER, ROUTER, routed
from load_tests.replicas.losses import ENDINGS, Fate, Losses, Outcome, outcome
from load_tests.replicas.sharing import Shared

WHOLE = json.dumps({"choices": [{"finish_reason": "length"}]}).encode()
STOPPED = json.dumps({"choices": [{"finish_reason": "stop"}]}).encode()
STREAM = b'data: {"choices": []}\n\ndata: [DONE]\n\n'


@pytest.mark.parametrize(
    ("status", "body", "fate"),
    [
        (200, WHOLE, Fate.FINISHED),
        (200, STREAM, Fate.FINISHED),
        (200, b": keep-alive\n\n" + STREAM, Fate.FINISHED),
        (200, STOPPED, Fate.FAILED),
        (200, STREAM.removesuffix(b"data: [DONE]\n\n"), Fate.CUT),
        (200, b'data: {"error": {"code": "engine_stopped"}}\n\n', Fate.CUT),
        (200, b"", Fate.CUT),
        (500, b"Request failed: connection refused", Fate.FAILED),
        (503, WHOLE, Fate.FAILED),
    ],
)
def test_an_answer_counts_when_it_is_whole(status: int, body: bytes, fate: Fate) -> None:
    assert outcome(status, body).fate is fate


def test_only_a_killed_replica_may_cut_what_had_begun() -> None:
    outcomes = (Outcome(Fate.FINISHED), Outcome(Fate.CUT, "reset"), Outcome(Fate.FAILED, "500"))
    forbidden = {e.name: Losses(e, outcomes).forbidden() for e in ENDINGS}
    failed, cut = "failed before it had begun: 500", "cut after it had begun: reset"
    assert forbidden == {
        "killed, busy": [f"killed, busy: {failed}"],
        "killed, idle": [f"killed, idle: {cut}", f"killed, idle: {failed}"],
        "drained, busy": [f"drained, busy: {cut}", f"drained, busy: {failed}"],
    }


def test_the_tables_have_a_row_for_each_thing_measured() -> None:
    runs = [Shared("p", 100, 80, (10, 90)), Shared("p", 100, 90, (50, 50))]
    assert share_table([("p", runs)]).rows == (("p", "85% (80%-90%)", "70% (50%-90%)"),)
    losses = Losses(ENDINGS[0], (Outcome(Fate.FINISHED), Outcome(Fate.CUT)))
    assert loss_table([("own", losses)]).rows == (("own", ENDINGS[0].name, "1", "1", "0"),)


def test_the_settings_that_are_checked_are_those_of_the_documentation() -> None:
    page = (Path(__file__).parents[2] / "docs/operating.md").read_text()
    settings = [" ".join(pair) for pair in batched(FAILOVER)]
    assert [setting for setting in settings if setting not in page] == []


def batched(flags: tuple[str, ...]) -> list[tuple[str, str]]:
    """Each flag with its value."""
    return list(zip(flags[::2], flags[1::2], strict=True))


def test_a_missing_router_is_named_with_what_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TargetError, match="make router"), routed("cache_aware", ()):
        pass


FAKE_ROUTER = """#!{python}
import http.server, json, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(sys.argv[1:]).encode())
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def test_a_router_is_given_its_policy_its_settings_and_all_replicas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ROUTER.parent.mkdir(parents=True)
    ROUTER.write_text(FAKE_ROUTER.format(python=sys.executable))
    ROUTER.chmod(0o755)
    with routed("cache_aware", ("http://a:1", "http://b:2"), *FAILOVER) as target:
        arguments = httpx.get(f"{target.base_url}/arguments", trust_env=False).json()
    assert arguments[arguments.index("--policy") + 1] == "cache_aware"
    assert arguments[arguments.index("--worker-urls") + 1 :] == ["http://a:1", "http://b:2"]
    assert set(FAILOVER) <= set(arguments)
