"""What the load tests start, measure and print: peers, streams, dashboards, tables."""

import asyncio
import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.values.request import Request
from engine.values.settings import EngineConfig
from engine.values.tokens import pack
from load_tests.bench.server_cpu import microseconds_per_token
from load_tests.client import Answer, TargetError
from load_tests.conditions import observe
from load_tests.grafana.command import empty, unhealthy
from load_tests.grafana.dashboard import Choice, Query, choices, queries
from load_tests.grafana.dashboard import read as read_dashboard
from load_tests.grafana.prometheus import Rule
from load_tests.peers.catalogue import Peer, mlx_lm, rootstock, serving, vllm_mlx
from load_tests.report import Percentiles, percentiles
from load_tests.scenarios.arrival import Arrived, Gap
from load_tests.scenarios.comeback import Back, CameBack, Crowd
from load_tests.scenarios.kinds import load_scenario, scenario_names, text_scenario_names
from load_tests.scenarios.load import Run, Summary, summarize
from load_tests.scenarios.perform import Outcome
from load_tests.scenarios.restart import ENDINGS, Resent, Restarted
from load_tests.side_by_side.record import Record, read, write
from load_tests.side_by_side.rounds import Bench, Failure, Rounds, play_rounds
from load_tests.side_by_side.tables import Ratio, ratio, tables
from load_tests.streams import crowd, paced
from load_tests.streams.listening import WORD, Heard, Span, WordCounter, background, listen
from tests.hosting import hosted
from tests.unit.threaded_harness import Letters
from tools.events import events_of

ROOT = Path(__file__).parents[2]

HEALTHY = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def do_POST(self):
        print("generation thread died", flush=True)
        self.send_error(500, "no generation")
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_a_peer_serves_while_the_context_lasts(tmp_path: Path) -> None:
    peer = Peer("fake", ("-c", HEALTHY, "{port}"), "tiny")
    with serving(peer, tmp_path, tmp_path / "log") as target:
        assert target.model == "tiny"
        health = target.base_url.replace("/v1", "/health")
        assert httpx.get(health, trust_env=False).status_code == 200
    with pytest.raises(httpx.ConnectError):
        httpx.get(health, trust_env=False)


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("print('no such model'); raise SystemExit(3)", r"(?s)exited with 3.*no such model"),
        ("import time; time.sleep(60)", "the process still runs"),
        ("import os; print('home:', os.listdir(os.environ['HOME']))", r"home: \[\]"),
    ],
)
def test_a_peer_that_does_not_serve_is_reported_with_its_last_words(
    tmp_path: Path, code: str, problem: str
) -> None:
    """Its home is empty."""
    peer = Peer("other", ("-c", code), "tiny")
    start_seconds = 0.2 if "sleep" in code else 60.0
    with (
        pytest.raises(TargetError, match=problem),
        serving(peer, tmp_path, tmp_path / "log", start_seconds),
    ):
        pass


def test_a_comparison_reports_a_peer_that_fails_and_goes_on(tmp_path: Path) -> None:
    peers = [Peer(name, ("-c", HEALTHY, "{port}"), "tiny") for name in ("a", "b")]
    scenario = load_scenario("unique-1")
    found = play_rounds(Bench(tmp_path, tmp_path), peers, scenario, seed=0, repeat=2)
    assert found.rounds == ({}, {})
    assert [failure.peer for failure in found.failures] == ["a", "b", "b", "a"]
    assert "HTTP 500" in found.failures[0].reason
    assert "generation thread died" in found.failures[0].reason


def test_a_peer_whose_environment_is_missing_is_told_how_to_get_it(tmp_path: Path) -> None:
    peer = Peer("absent", (), "tiny", python=tmp_path / "python")
    with (
        pytest.raises(TargetError, match="make bench"),
        serving(peer, tmp_path, tmp_path / "log"),
    ):
        pass


def test_commands_name_the_model_and_the_port() -> None:
    for peer in (rootstock("--no-prefix-cache"), mlx_lm("--decode-concurrency", "8")):
        command = peer.command(Path("/models/x"), 8123)
        assert command[command.index("--model") + 1] == "/models/x"
        assert command[command.index("--port") + 1] == "8123"
    command = vllm_mlx("--max-num-seqs", "8").command(Path("/models/x"), 8123)
    assert command[command.index("serve") + 1] == "/models/x"
    assert command[command.index("--port") + 1] == "8123"
    assert rootstock("--no-prefix-cache").name == "rootstock --no-prefix-cache"
    assert rootstock("--no-prefix-cache").arguments[-1] == "--no-prefix-cache"


async def test_a_paced_engine_says_the_word_once_for_each_token() -> None:
    config = EngineConfig(model="", kv_cache_bytes=2**23)
    build = partial(paced.load, 1e6, WORD, config, lambda line: None)
    engine = await asyncio.to_thread(hosted, build, Letters())
    asking = [Request(str(i), pack((5, 6, 7)), 3 + i, ignore_eos=True) for i in range(2)]

    async def text(request: Request) -> str:
        return "".join([event.text async for event in events_of(engine, request)])

    assert await asyncio.gather(*map(text, asking)) == [3 * WORD, 4 * WORD]
    await engine.drain(0.0)


@given(st.lists(st.sampled_from(["the", "t", "h", "e", " "])), st.integers(1, 5))
def test_words_are_counted_however_the_text_is_cut(pieces: list[str], size: int) -> None:
    text = "".join(pieces).encode()
    counter = WordCounter("the")
    cut = [text[i : i + size] for i in range(0, len(text), size)]
    assert sum(map(counter.count, cut)) == text.count(b"the")


def test_only_what_came_in_the_time_counts() -> None:
    heard = Heard([(0.5, 1), (1.0, 1), (1.25, 2), (2.0, 1)])
    assert heard.words(1.0, 2.0) == 3
    assert heard.gap_seconds(1.0, 2.0) == [0.25]


async def answering(answer: bytes) -> Heard:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"}")
        writer.write(answer)
        await writer.drain()
        writer.close()

    heard = Heard()
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        await listen(port, "Hello", 2, heard)
    return heard


@pytest.mark.parametrize("answer", [b"HTTP/1.1 503 Busy\r\n\r\nno room", b"nothing"])
async def test_a_stream_is_heard_to_its_end_and_one_that_is_refused_is_an_error(
    answer: bytes,
) -> None:
    heard = await answering(b"HTTP/1.1 200 OK\r\n\r\ndata: thethe\n\n")
    assert [count for _, count in heard.reads] == [2]
    with pytest.raises(TargetError):
        await answering(answer)


def test_a_daemon_that_falls_behind_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    span = Span(since=100.0, until=102.0, cpu_seconds=0.01)
    assert microseconds_per_token([40, 39], span, 20.0) == pytest.approx(1e4 / 79)
    assert not caplog.messages
    assert microseconds_per_token([40, 36], span, 20.0) == pytest.approx(1e4 / 76)
    assert caplog.messages == ["The server fell behind: a stream got 18.0 tokens/s."]


async def test_a_crowd_begins_anew_when_its_connections_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(crowd, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(crowd, "SETTLE_SECONDS", 0.01)
    came = list[tuple[str, bytes]]()
    enough = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        address, _ = writer.get_extra_info("peername")
        came.append((address, (await reader.readuntil(b"\r\n")).split()[0]))
        if len(came) == 6:
            enough.set()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with background([crowd._slow_reader(port, 0), crowd._quiet(port, 1)]):
            await asyncio.wait_for(enough.wait(), 10)
    assert set(came) == {("127.0.1.1", b"POST"), ("127.0.1.2", b"GET")}


def answer(first: float, gaps: tuple[float, ...], cached_tokens: int = 0) -> Answer:
    return Answer(
        wave=0,
        conversation=0,
        turn=0,
        started_seconds=0.0,
        first_token_seconds=first,
        latency_seconds=first + sum(gaps),
        gap_seconds=gaps,
        prompt_tokens=100,
        cached_tokens=cached_tokens,
        completion_tokens=len(gaps) + 1,
        drafted_tokens=0,
        accepted_tokens=0,
        text="",
    )


def test_percentiles_of_one_value_or_none() -> None:
    assert percentiles([7.0]) == Percentiles(7.0, 7.0, 7.0)
    assert percentiles([]) == Percentiles(0.0, 0.0, 0.0)


def test_a_summary_adds_up_the_answers() -> None:
    run = Run(2.0, (answer(0.5, (0.1, 0.3)), answer(1.5, (0.2,), cached_tokens=99)))
    found = summarize(run)
    assert (found.requests, found.prompt_tokens, found.cached_tokens) == (2, 200, 99)
    assert found.completion_tokens == 5
    assert found.completion_tokens_per_second == 2.5
    assert found.first_token_seconds.p50 == 1.0
    assert found.gap_seconds.p50 == pytest.approx(0.2)
    assert found.gap_seconds.max == 0.3
    assert found.latency_seconds.max == pytest.approx(1.7)


PEERS = ("rootstock", "mlx_lm.server", "vllm-mlx")


def summary(wall_seconds: float) -> Summary:
    durations = Percentiles(wall_seconds / 10, wall_seconds / 5, wall_seconds)
    return Summary(wall_seconds, 8, 100, 5, 40, 40 / wall_seconds, durations, durations, durations)


def arrived(seconds: float) -> Arrived:
    return Arrived(3600, seconds, 2 * seconds, seconds, (Gap(0.1, 0.05), Gap(1.0, seconds)))


def restarted(seconds: float) -> Restarted:
    found = zip(ENDINGS, (1000, 990, 980), strict=True)
    return Restarted(
        tuple(
            Resent("system prompt", ending, 1001, cached, 8 * seconds, seconds, is_same_text=True)
            for ending, cached in found
        )
    )


def came_back(seconds: float) -> CameBack:
    back = Back("SIGKILL", 4, 6000, 5984, 8 * seconds, seconds, 0.02, 0.03)
    crowd = Crowd("SIGKILL", (seconds, 9 * seconds), (0.5 * seconds, 2 * seconds), 0, 2**20)
    return CameBack(2**17, 2**30, (back,), (crowd,))


def record(name: str, outcome: Callable[[float], Outcome]) -> Record:
    """Ours takes 1 s; the others 2 and 3 times as long, and twice that in the second round."""
    rounds = tuple(
        {peer: outcome(slow * (place + 1)) for place, peer in enumerate(PEERS)} for slow in (1, 2)
    )
    found = Rounds(rounds, (Failure("vllm-mlx", "HTTP 500"),))
    return Record(name, load_scenario(name), observe(0, (), "a BLAS"), PEERS, found)


RECORDS = [
    record("unique-1", summary),
    record("unique-8", summary),
    record("long-prompt", arrived),
    record("restart", restarted),
    record("restart-wide", came_back),
]


def test_what_is_kept_comes_back(tmp_path: Path) -> None:
    for one in RECORDS:
        write(one, tmp_path)
    names = [one.name for one in RECORDS]
    assert read(tmp_path, [*names, "burst"]) == RECORDS


def test_a_ratio_above_one_says_that_we_are_faster() -> None:
    pairs = [
        (summary(1.0), summary(3.0)),
        (summary(2.0), summary(4.0)),
        (summary(1.0), summary(9.0)),
    ]
    found = ratio(pairs, lambda run: run.wall_seconds)
    assert found == Ratio(median=3.0, least=2.0, greatest=9.0)
    assert str(found) == "3.00 (2.00-9.00)"


def test_every_kind_of_scenario_has_its_table() -> None:
    loads, arrivals, restarts, backs, crowds = tables(RECORDS)
    for table in (loads, arrivals, restarts, backs, crowds):
        assert {len(row) for row in table.rows} == {len(table.columns)}
    assert [row[:3] for row in loads.rows] == [
        ("unique-1", "mlx_lm.server", "1.50 / 3.00"),
        ("unique-1", "vllm-mlx", "1.50 / 4.50"),
        ("unique-8", "mlx_lm.server", "1.50 / 3.00"),
        ("unique-8", "vllm-mlx", "1.50 / 4.50"),
    ]
    assert loads.rows[1][-2] == "3.00 (3.00-3.00)"
    assert arrivals.rows[0] == ("long-prompt", "rootstock", "1.50", "1.50", "3.00", "2.00")
    assert restarts.rows[2] == (
        *("restart", "system prompt", "SIGKILL", "1,001", "980", "98.0%"),
        *("12.00", "1.500", "8.0", "2 of 2"),
    )
    assert backs.rows[0] == (
        *("restart-wide", "4", "SIGKILL", "6,000", "99.7%"),
        *("12.00", "1.50", "1.40", "20", "30"),
    )
    assert crowds.rows[0] == (
        *("restart-wide", "2", "SIGKILL", "1.50 / 0.75", "13.50 / 3.00", "1"),
    )


def test_a_round_in_which_one_failed_counts_for_the_others_alone() -> None:
    first, second = RECORDS[0].results.rounds
    rounds = (first, {peer: second[peer] for peer in PEERS[:2]})
    (table,) = tables([dataclasses.replace(RECORDS[0], results=Rounds(rounds, ()))])
    assert [row[2] for row in table.rows] == ["1.50 / 3.00", "1.00 / 3.00"]


def test_a_server_that_always_failed_is_left_out() -> None:
    (found,) = [one for one in RECORDS if one.name == "long-prompt"]
    rounds = tuple({"rootstock": played["rootstock"]} for played in found.results.rounds)
    alone = dataclasses.replace(found, results=Rounds(rounds, ()))
    assert [row[1] for table in tables([alone]) for row in table.rows] == ["rootstock"]


def test_the_published_tables_are_those_of_the_kept_runs() -> None:
    kept = read(ROOT / "docs" / "benchmarks", scenario_names())
    shown = "\n".join(table.markdown() for table in tables(kept)).splitlines()
    page = (ROOT / "docs" / "performance.md").read_text("utf-8").splitlines()
    random = set(scenario_names()) - set(text_scenario_names())
    names_of_rows = tuple(f"| {name} |" for name in random)
    published = [line for line in page if line.startswith(names_of_rows)]
    assert len(published) > 20
    assert not [line for line in published if line not in shown]


INSTANCE = {
    **{"name": "instance", "type": "query", "includeAll": True, "allValue": ".*"},
    "query": {"query": "label_values(up, instance)"},
}


def dashboard(*expressions: str) -> dict[str, Any]:
    targets = [{"expr": expression} for expression in expressions]
    panel = {"type": "timeseries", "title": "A panel", "targets": targets}
    folded = {"type": "row", "title": "A row", "panels": [panel]}
    return {"templating": {"list": [INSTANCE]}, "panels": [folded]}


def test_variables_are_filled_in_also_below_a_folded_row() -> None:
    found = queries(dashboard('rate(a{i=~"$instance"}[$__rate_interval])', "${instance}"), "4s")
    assert found == [Query("A panel", 'rate(a{i=~".*"}[4s])'), Query("A panel", ".*")]
    assert choices(dashboard()) == [Choice("instance", "up", "instance")]


@pytest.mark.parametrize("expressions", [(), ("rate(a[$interval])",)])
def test_a_panel_that_cannot_be_asked_is_an_error(expressions: tuple[str, ...]) -> None:
    with pytest.raises(TargetError):
        queries(dashboard(*expressions), "4s")


def test_no_query_of_ours_has_a_variable_left() -> None:
    found = queries(read_dashboard(), "4s")
    assert len(found) >= len(read_dashboard()["panels"])
    assert not [query for query in found if "$" in query.expression]


def test_a_panel_with_nothing_but_zeros_is_empty() -> None:
    one, other, third = Query("one", "a"), Query("other", "b"), Query("third", "c")
    problems = list(empty([(one, [0.0, 2.0]), (other, [0.0]), (third, [])]))
    assert problems == ["other: nothing but 0: b", "third: no data: c"]
    preempted = Query("pressure", "rate(rootstock_preemptions_total[4s])")
    assert not list(empty([(preempted, [0.0])]))
    assert len(list(empty([(preempted, [])]))) == 1


def test_an_alert_must_have_been_evaluated() -> None:
    assert list(unhealthy([Rule("fine", "ok", "")])) == []
    assert list(unhealthy([Rule("bad", "err", "why")])) == ["the alert bad is err: why"]
    assert list(unhealthy([])) == ["there are no alerts"]
