"""`rootstock top` against a server that shows pictures of a cache."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel
from typer.testing import CliRunner, Result

from server.admin_schema import CacheTree, MemoryGuardInfo, PooledModelInfo, PooledModels, State
from server.settings import Settings
from server.terminal.cli import app
from tests.cache_trees import cache_tree, counted, node
from tests.contract.canned_server import CannedServer, canned
from tests.contract.daemon import running
from tests.contract.fake_engine import FakeEngine
from tests.contract.terminal.commands import read_until, terminal
from tests.polling import WAIT_SECONDS

TREE = "/admin/cache/tree"
STREAM = f"{TREE}/stream?model=tiny"
MODELS = "/admin/models"
ENTERS, LEAVES = b"\x1b[?1049h", b"\x1b[?1049l"  # the terminal's second screen


RUNNING, WAITING = "1a2b3c4d" * 4, "5e6f7a8b" * 4


def asked(name: str, state: str, computed_tokens: int, output_tokens: int) -> dict[str, object]:
    return {
        **{"id": name, "state": state, "node": 2, "namespace": "0"},
        **{"prompt_tokens": 1500, "cached_tokens": 1000},
        **{"computed_tokens": computed_tokens, "output_tokens": output_tokens},
    }


def picture(**fields: object) -> CacheTree:
    """Three prompts on a shared one, and another; two requests."""
    shown: dict[str, object] = {
        "arena": {
            **{"blocks": 4096, "free": 1024, "cached": 2048, "held": 1024},
            **{"saved_bytes": 3 << 20, "block_bytes": 65536},
        },
        "recent_hits": [{"seconds": 300, "queried_tokens": 1000, "hit_tokens": 750}],
        "hidden": {"nodes": 2, "tokens": 7, "blocks": 2},
        "namespaces": [
            {"id": "0", "name": "default", "nodes": 4, "tokens": 1820},
            {"id": "1", "name": "salted 01234567\x1b[2J", "nodes": 3, "tokens": 71},
        ],
        "requests": [
            {**asked(f"{WAITING}#1", "waiting", 0, 0), "waits_for": "memory"},
            asked(RUNNING, "running", 1500, 12),
        ],
    }
    nodes = [
        node(1, None, 1000, holders=1),
        node(2, 1, 500, start=1000, holders=1),
        node(3, 1, 300, start=1000, idle_seconds=150.0),
        node(4, 1, 20, start=1000, idle_seconds=4.2, next_evicted=1),
        node(5, None, 64, namespace="1"),
    ]
    prompts = counted(prompt_tokens=4000, cached_tokens=3000, first_tokens=4, first_token_seconds=1)
    return cache_tree(**{"nodes": nodes, "counters": prompts, **shown, **fields})


def events(*pictures: CacheTree) -> bytes:
    return b"".join(b": alive\n\ndata: %b\n\n" % encoded(one) for one in pictures)


def encoded(answer: BaseModel) -> bytes:
    return answer.model_dump_json().encode()


def pooled(state: State) -> PooledModels:
    """A daemon's only model, in that state."""
    model = PooledModelInfo(
        id="tiny",
        aliases=[],
        adapters=[],
        source="models/tiny",
        state=state,
        failure=None,
        progress=None,
        progress_share=None,
        requests=0,
        waiting=0,
        needed_bytes=None,
        memory=None,
        decode=None,
        idle_seconds=None,
        seconds_left=None,
        ttl_seconds=None,
        pinned=False,
        alarms=[],
        load_seconds=None,
        retry_seconds=None,
    )
    return PooledModels(budget_bytes=None, models=[model])


@pytest.fixture
def server() -> Iterator[CannedServer]:
    with canned() as server:
        server.pages[f"{TREE}?model=tiny"] = encoded(picture())
        server.pages[MODELS] = encoded(pooled(State.READY))
        yield server


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["top", *arguments], env={"COLUMNS": "100"})


def test_without_a_terminal_there_is_one_picture(server: CannedServer) -> None:
    result = run("--url", server.url, "--api-key", "sesame")
    assert (result.exit_code, result.stderr) == (0, "")
    lines = [line.rstrip() for line in result.stdout.splitlines()]
    assert lines[:8] == [
        f"daemon       tiny at {server.url}",
        "requests     1 running, 1 waiting",
        "hits         75.0% of 4,000 prompt tokens since start",
        "lately       75.0% in 5 min",
        "first token  after 0.25 s on average",
        "sharing      saves 3.00 MiB of copies right now",
        "█" * 25 + "▒" * 50 + "░" * 25,
        "█ held 1,024   ▒ cached 2,048   ░ free 1,024   of 4,096 blocks, 256.00 MiB",
    ]
    assert [line.split("  ")[0] for line in lines[10:15]] == [
        *("0 to 1,000", "├ 1,000 to 1,500", "├ 1,000 to 1,300", "└ 1,000 to 1,020", "0 to 64")
    ]
    assert [line.split()[-5:] for line in lines[10:12]] == [
        ["default", "1,000", "1,820", "1", "-"],
        ["1,500", "500", "500", "1", "-"],
    ]
    assert lines[12].split()[-4:] == ["300", "-", "2", "min"]
    assert lines[13].split()[-4:] == ["4", "s", "next", "1"]
    assert lines[15] == "and 2 more nodes of 7 tokens"
    assert [line.split() for line in lines[18:]] == [
        ["1a2b3c4d", "running", "1,500", "1,000", "1,500", "12"],
        ["5e6f7a8b#1", "waiting:", "memory", "1,500", "1,000", "0", "0"],
    ]
    assert "\x1b" not in result.stdout
    assert set(server.keys) == {"Bearer sesame"}


def test_what_is_done_for_lack_of_memory_has_a_line(server: CannedServer) -> None:
    problem = "cached prefixes are evicted: 91% of the machine (limit 90.0%)"
    guard = MemoryGuardInfo(step="prefixes", problem=problem, readings=[])
    watched = pooled(State.READY).model_copy(update={"memory_guard": guard})
    server.pages[MODELS] = encoded(watched)
    lines = [line.rstrip() for line in run("--url", server.url).stdout.splitlines()]
    assert lines[1] == f"memory       is short: {problem}"


def test_a_disk_cache_has_a_line(server: CannedServer) -> None:
    size = {"entries": 40, "used_bytes": 5 << 20, "shared_bytes": 5 << 20, "limit_bytes": 1 << 30}
    moved = {"read_bytes": 1, "written_bytes": 2, "hits": 3, "loaded_tokens": 1900}
    loading = [asked(RUNNING, "loading", 0, 0)]
    tiered = picture(disk={**size, **moved}, requests=loading)
    server.pages[f"{TREE}?model=tiny"] = encoded(tiered)
    lines = [line.rstrip() for line in run("--url", server.url).stdout.splitlines()]
    assert lines[1] == "requests     0 running, 1 waiting"
    assert lines[6] == (
        "disk         5.00 MiB of 1.00 GiB; 1,900 tokens loaded for 3 prompts since start"
    )
    assert lines[-1].split()[:2] == ["1a2b3c4d", "loading"]


def test_an_empty_cache(server: CannedServer) -> None:
    server.pages[f"{TREE}?model=tiny"] = encoded(cache_tree())
    assert run("--url", server.url).stdout.rstrip().endswith("The cache is empty.")


NO_MODELS = (
    "error: this server lists no models at /admin/models: it is no Rootstock daemon, or an older "
    "one\n"
)
NO_PICTURE = (
    "error: this daemon shows no picture of its cache: it is an older one, or runs with "
    "--no-dashboard\n"
)


def test_what_shows_no_picture_is_a_line(server: CannedServer) -> None:
    server.pages[f"{TREE}?model=tiny"] = b'{"object": "list"}'
    with (
        canned({"error": {"message": "There is no such URL."}}, status=404) as other,
        running(FakeEngine(), Settings(port=0, dashboard=False)) as silent,
    ):
        for url, problem in (
            (server.url, 'error: not an answer of a Rootstock daemon: {"object": "list"}\n'),
            (other.url, NO_MODELS),
            (f"{silent}/v1", NO_PICTURE),
        ):
            result = run("--url", url)
            assert (result.exit_code, result.stdout, result.stderr) == (1, "", problem)


@pytest.mark.usefixtures("interruptible")
def test_at_a_terminal_it_follows_until_ctrl_c(server: CannedServer, tmp_path: Path) -> None:
    server.pages[STREAM] = events(picture(), picture(requests=[]))
    server.open_pages.add(STREAM)
    with terminal(tmp_path, "top", "--url", server.url) as (process, screen):
        read_until(screen, ENTERS)
        read_until(screen, b"0 running, 0 waiting")
        below = read_until(screen, b"of 4,096 blocks")
        process.send_signal(signal.SIGINT)
        left = read_until(screen, LEAVES)
        assert process.wait(WAIT_SECONDS) == 0
    assert "█".encode() * 25 in below
    assert b"Traceback" not in left
    assert b"Aborted" not in left


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("body", [events(picture()), b""], ids=["after a picture", "at once"])
def test_a_daemon_that_stops_is_a_line(server: CannedServer, tmp_path: Path, body: bytes) -> None:
    server.pages[STREAM] = body
    with terminal(tmp_path, "top", "--url", server.url) as (process, screen):
        read_until(screen, b"error: the daemon has stopped")
        assert process.wait(WAIT_SECONDS) == 1


def test_a_model_that_is_unloaded_while_it_is_watched_is_a_line(
    server: CannedServer, tmp_path: Path
) -> None:
    server.pages[STREAM] = events(picture(), picture(requests=[]))
    server.open_pages.add(STREAM)
    with terminal(tmp_path, "top", "--url", server.url) as (process, screen):
        read_until(screen, b"0 running, 0 waiting")
        server.pages[MODELS] = encoded(pooled(State.UNLOADED))
        server.is_ending.set()
        read_until(screen, b"error: tiny is not loaded; `rootstock load tiny` loads it")
        assert process.wait(WAIT_SECONDS) == 1
