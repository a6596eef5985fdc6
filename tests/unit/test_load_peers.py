"""Child processes: ready, stopped, and told apart from dead ones."""

from pathlib import Path

import httpx
import pytest

from load_tests.client import TargetError
from load_tests.peers.catalogue import Peer, mlx_lm, rootstock, serving, vllm_mlx
from load_tests.scenarios.kinds import load_scenario
from load_tests.side_by_side.rounds import Bench, play_rounds

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


def test_a_peer_that_dies_at_start_is_reported_with_its_last_words(tmp_path: Path) -> None:
    peer = Peer("dead", ("-c", "print('no such model'); raise SystemExit(3)"), "tiny")
    with (
        pytest.raises(TargetError, match=r"(?s)exited with 3.*no such model"),
        serving(peer, tmp_path, tmp_path / "log"),
    ):
        pass


def test_a_peer_that_never_answers_is_given_up(tmp_path: Path) -> None:
    peer = Peer("mute", ("-c", "import time; time.sleep(60)"), "tiny")
    with (
        pytest.raises(TargetError, match="the process still runs"),
        serving(peer, tmp_path, tmp_path / "log", start_seconds=0.2),
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


def test_a_peer_finds_an_empty_home(tmp_path: Path) -> None:
    code = "import os; print('home:', os.listdir(os.environ['HOME']))"
    peer = Peer("homely", ("-c", code), "tiny")
    with (
        pytest.raises(TargetError, match=r"home: \[\]"),
        serving(peer, tmp_path, tmp_path / "log"),
    ):
        pass


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
