"""`rootstock ps` and `cache` against a daemon on a real socket."""

import threading
from collections.abc import Iterator

import httpx
import pytest
from openai import OpenAI
from typer.testing import Result

from engine.values.request import WaitReason
from engine.values.stats import CacheTier
from server.admin_schema import LiveRequest
from server.settings import Settings
from server.terminal.admin_client import Admin
from tests.contract.canned_server import canned
from tests.contract.daemon import running
from tests.contract.fake_engine import FakeEngine, Gate, Script
from tests.contract.terminal.commands import run
from tests.polling import WAIT_SECONDS


@pytest.fixture
def keyed_url() -> Iterator[str]:
    """Of a daemon that asks for the key `k`."""
    with running(FakeEngine(), Settings(port=0, api_key="k")) as base_url:
        yield f"{base_url}/v1"


def lines_of(result: Result) -> list[list[str]]:
    """The words of each line."""
    assert result.exit_code == 0, result.stderr
    return [line.split() for line in result.stdout.splitlines()]


def test_ps_shows_what_runs(url: str, model: str, client: OpenAI, engine: FakeEngine) -> None:
    engine.script = Script(gate=(gate := Gate()))
    message = {"role": "user", "content": "Hi"}
    asking = threading.Thread(
        target=client.chat.completions.create, kwargs={"model": model, "messages": [message]}
    )
    asking.start()
    request_id = engine.at_gate.get(timeout=WAIT_SECONDS)
    try:
        lines = lines_of(run("ps", "--url", url))
    finally:
        gate.open()
        asking.join()
    assert [" ".join(words) for words in lines[:4]] == [
        f"daemon {url}",
        f"model {model}",
        "requests 1 running, 0 waiting",
        "cache 6% in use, 16% kept for later, of 4.00 MiB",
    ]
    assert lines[4][:2] == ["memory", "weights"]
    assert lines[5][:5] == [model, "50", "MiB", "4", "MiB"]
    assert lines[7][:4] == [request_id[:8], "running", "127.0.0.1", "20"]


def test_an_invalid_url_is_shown_as_it_was_given() -> None:
    result = run("ps", "--url", "ftp://here")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "error: ftp://here is not a URL such as http://127.0.0.1:8000/v1\n"


def test_ps_shows_that_the_only_model_is_not_loaded(keyed_url: str, model: str) -> None:
    daemon = ("--url", keyed_url, "--api-key", "k")
    assert run("unload", model, *daemon).exit_code == 0
    assert lines_of(run("ps", *daemon))[1] == ["model", model, "(unloaded)"]


def test_ps_has_a_line_of_80_columns_for_a_request(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = LiveRequest(
        id="f" * 32,
        route="/v1/chat/completions",
        model="m",
        client="2001:db8::8a2e:370:7334",
        key=None,
        agent="Claude Code",
        sequences=1,
        prompt_tokens=131_072,
        cached_tokens=131_072,
        output_tokens=131_072,
        accepted_draft_tokens=65_536,
        first_token_seconds=None,
        tokens_per_second=None,
        status="waiting",
        waits_for=WaitReason.MEMORY,
        age_seconds=86_400.4,
        computed_tokens=131_072,
        blocks=1,
    )
    monkeypatch.setattr(Admin, "requests", lambda self: [large])
    lines = lines_of(run("ps", "--url", url, COLUMNS="80"))
    assert lines[-1] == [
        *("ffffffff", "waiting:", "memory", "2001:db8::8a2e"),
        *["131,072"] * 3,
        *("24.0", "h"),
    ]


def test_the_daemon_that_runs_gets_its_key_and_another_port_does_not(keyed_url: str) -> None:
    port = keyed_url.removesuffix("/v1").rpartition(":")[2]
    ours = {"ROOTSTOCK_PORT": port, "ROOTSTOCK_API_KEY": "k"}
    assert run("ps", **ours).exit_code == 0
    assert run("ps", "--url", keyed_url, **ours).exit_code == 0
    assert run("ps", "--url", keyed_url, ROOTSTOCK_CLIENT_API_KEY="k").exit_code == 0
    assert run("ps", ROOTSTOCK_PORT=port, ROOTSTOCK_CLIENT_API_KEY="k").exit_code == 0
    with canned() as elsewhere:
        run("ps", "--url", elsewhere.url, **ours)
    assert elsewhere.keys
    assert set(elsewhere.keys) == {None}


@pytest.mark.parametrize("command", [["ps"], ["cache", "stats"], ["cache", "clear"]])
def test_what_is_no_rootstock(command: list[str]) -> None:
    with canned() as server:
        result = run(*command, "--url", server.url)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: not an answer of a Rootstock daemon")
    assert "Traceback" not in result.stderr


def test_an_answer_that_does_not_end_is_not_read_to_its_end() -> None:
    for status in (200, 400):
        with canned(models="x" * 2**25, status=status) as server:
            result = run("ps", "--url", server.url)
        origin = server.url.removesuffix("/v1")
        assert result.stderr == f"error: {origin}/admin/requests answers with more than 16 MiB\n"


def test_nobody_there() -> None:
    with running(FakeEngine(), Settings(port=0)) as gone:
        pass
    result = run("cache", "stats", ROOTSTOCK_PORT=gone.rpartition(":")[2])
    assert result.stderr == (
        f"error: no daemon runs at {gone}/v1; `rootstock serve` starts one, --url names one "
        "elsewhere\n"
    )
    assert run("cache", "stats", ROOTSTOCK_PORT="0").stderr.startswith("error: no daemon runs; `")


def test_cache_stats_have_the_disk_cache_where_there_is_one(url: str) -> None:
    lines = [" ".join(words) for words in lines_of(run("cache", "stats", "--url", url))]
    assert {
        "arena 4.00 MiB, 128 blocks",
        "held 8 blocks, 4 by several requests",
        "saved 384.00 KiB, 12 blocks not copied",
        "memory 60.00 MiB in use by MLX, 90.00 MiB at most, of 300.00 MiB reserved; 300.00 MiB "
        "resident",
        "lately 25.0% in 5 min, 16.7% in 15 min",
        "hits 20 of 120 tokens, 16.7%",
    } <= {*lines}
    first = lines.index("on disk 5.00 MiB of 1.00 GiB, other models 2.00 MiB")
    assert lines[first + 1 : first + 6] == [
        "loaded 900 tokens of 3 prompts",
        "read 1.00 MiB",
        "written 4.00 MiB",
        "evicted 11 blocks; 5 never written",
        "failures 1 checksum",
    ]
    assert lines[-1] == "recurrent 16 9 4 3 5 11"
    with running(FakeEngine(disk=None), Settings(port=0)) as base_url:
        assert "on disk" not in run("cache", "stats", "--url", f"{base_url}/v1").stdout


@pytest.mark.parametrize(
    ("flags", "cleared"),
    [([], set(CacheTier)), (["--tiers", "disk"], {CacheTier.DISK})],
)
def test_cache_clear_may_be_of_one_tier(
    url: str, engine: FakeEngine, flags: list[str], cleared: set[CacheTier]
) -> None:
    assert run("cache", "clear", "--url", url, *flags).exit_code == 0
    assert engine.cleared.get_nowait() == cleared


def test_cache_clear_of_no_tier_says_what_there_are(url: str, engine: FakeEngine) -> None:
    result = run("cache", "clear", "--url", url, "--tiers", "tape & more")
    assert result.exit_code == 2
    assert "Invalid value for '--tiers': tape & more: must be memory or disk" in result.stderr
    assert engine.cleared.empty()
    result = run("cache", "clear", "--url", url, "--what", "kv,foo")
    assert "Invalid value for '--what': foo: must be kv, replays or responses" in result.stderr


def test_cache_clear_says_what_it_freed_and_what_it_kept(
    url: str, base_url: str, model: str
) -> None:
    def said(*flags: str) -> list[str]:
        return run("cache", "clear", "--url", url, *flags).stdout.splitlines()

    said("--what", "replays,responses")  # what other tests left on the shared daemon
    httpx.post(f"{base_url}/v1/responses", json={"input": "Hi"}).raise_for_status()
    freed, none, all_of_it = said()
    assert freed == f"{model}: 20 blocks freed in memory, 640.00 KiB"
    assert none == "forgotten: 0 answers with tool calls, 0 stored responses"
    kept = all_of_it.removeprefix("kept: 0 answers with tool calls, ")
    assert kept == "1 stored response (--what replays,responses forgets them)"
    assert said("--what", "replays,responses") == [
        "forgotten: 0 answers with tool calls, 1 stored response",
        "kept: 0 answers with tool calls, 0 stored responses",
    ]


def test_cache_probe_asks_as_a_chat_would(url: str) -> None:
    question = "What is kept?"
    run("cache", "clear", "--url", url)
    assert run("cache", "probe", question, "--url", url).stdout == "0 of 31 tokens are cached\n"
    run("chat", "--url", url, "--system", "Be brief.", typed=f"{question}\n")
    asked = ("cache", "probe", "--system", "Be brief.", "--url", url)
    assert run(*asked, question).stdout == "48 of 49 tokens are cached\n"
    assert run(*asked, typed=question).stdout == "48 of 49 tokens are cached\n"
    assert run("cache", "probe", "--raw", "<system>Be", "--url", url).stdout.startswith("9 of 10 ")


def test_cache_probe_of_what_is_no_text_or_too_much(url: str) -> None:
    """Bytes of another encoding: half surrogate pairs as an argument, and in a pipe U+FFFD."""
    asked = ("cache", "probe", "--raw", "--url", url)
    assert run(*asked, "caf\udce9 noir").stdout.endswith(" of 9 tokens are cached\n")
    assert run(*asked, typed=b"caf\xe9 noir").stdout.endswith(" of 11 tokens are cached\n")
    result = run(*asked, "x" * 600)
    assert result.exit_code == 1
    assert "(HTTP 400 from " in result.stderr
    assert not result.stderr.startswith("error: HTTP")
