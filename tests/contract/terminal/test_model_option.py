"""`--model` of the commands that ask a daemon: which of its several models they are about."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from server.models.registry import ModelRegistry
from tests.contract.daemon import serving
from tests.contract.fake_engine import Gate
from tests.contract.several import Engines, needs, settings_of
from tests.contract.terminal.commands import read_until, run, terminal
from tests.polling import WAIT_SECONDS


@pytest.fixture
def engines() -> Engines:
    return Engines()


@pytest.fixture
def url(engines: Engines) -> Iterator[str]:
    """Of a daemon with three models, of which the first is loaded."""
    settings = settings_of()
    with serving(ModelRegistry(settings, engines, needs), settings) as base_url:
        yield f"{base_url}/v1"


def test_a_chat_is_with_the_model_that_is_named(url: str, engines: Engines) -> None:
    for model, answer in (("uno", "I am load 1\n"), ("two", "I am load 2\n")):
        assert run("chat", "--url", url, "--model", model, typed="hi\n").stdout == answer
    port = url.removesuffix("/v1").rpartition(":")[2]  # at which commands find it without a URL
    joined = run("chat", "--model", "two", typed="hi\n", ROOTSTOCK_PORT=port)
    assert (joined.stdout, len(engines.started)) == ("I am load 2\n", 2)


def test_the_cache_is_that_of_the_model_that_is_named(url: str, engines: Engines) -> None:
    probed = run("cache", "probe", "hi", "--model", "two", "--url", url)
    assert probed.stdout == "0 of 20 tokens are cached\n"
    assert len(engines.started) == 2, "it was loaded for that"
    assert run("cache", "stats", "--model", "two", "--url", url).exit_code == 0
    assert run("cache", "clear", "--model", "two", "--url", url).exit_code == 0
    assert [engine.cleared.qsize() for engine in engines.made] == [0, 1]


def test_a_clear_without_a_model_is_of_every_loaded_one(url: str, engines: Engines) -> None:
    assert run("load", "two", "--url", url).exit_code == 0
    cleared = run("cache", "clear", "--url", url)
    assert [engine.cleared.qsize() for engine in engines.made] == [1, 1]
    assert cleared.stdout.splitlines() == [
        "one: 20 blocks freed in memory, 640.00 KiB",
        "two: 20 blocks freed in memory, 640.00 KiB",
        "forgotten: 0 answers with tool calls, 0 stored responses",
        "kept: 0 answers with tool calls, 0 stored responses",
    ]
    assert cleared.stderr == ""


def test_a_clear_says_what_is_not_loaded(url: str) -> None:
    shown = run("cache", "clear", "--model", "two", "--url", url)
    assert (shown.exit_code, shown.stderr) == (0, "")
    assert shown.stdout.splitlines()[0] == "two: not loaded, so nothing is in memory"
    assert run("unload", "one", "--url", url).exit_code == 0
    shown = run("cache", "clear", "--url", url)
    assert shown.stdout.splitlines()[0] == "every model: not loaded, so nothing is in memory"


def test_replays_are_cleared_of_models_that_are_not_loaded_too(url: str, engines: Engines) -> None:
    cleared = run("cache", "clear", "--what", "kv,replays", "--url", url)
    assert [line.partition(":")[0] for line in cleared.stdout.splitlines()] == [
        *("one", "forgotten", "kept")
    ]
    assert [engine.cleared.qsize() for engine in engines.made] == [1]
    named = run("cache", "clear", "--what", "replays", "--model", "two", "--url", url)
    assert (named.exit_code, named.stderr) == (0, "")


def test_a_load_shows_at_a_terminal_what_it_does(
    url: str, engines: Engines, tmp_path: Path
) -> None:
    engines.gate = Gate()
    with terminal(tmp_path, "load", "two", "--url", url) as (process, screen):
        read_until(screen, b"two is being loaded: loading weights")
        engines.gate.open()
        read_until(screen, b"two is ready, 400.00 MiB")
        assert process.wait(WAIT_SECONDS) == 0


def test_ps_has_the_memory_of_loaded_models_alone(url: str) -> None:
    lines = [line.split() for line in run("ps", "--url", url).stdout.splitlines()]
    assert lines[3][:4] == ["memory", "400.00", "MiB", "of"]
    assert [line[:2] for line in lines[4:8]] == [
        *(["model", "state"], ["one", "ready"], ["two", "unloaded"], ["three", "unloaded"])
    ]
    assert [line[0] for line in lines[8:]] == ["memory", "one"]
    assert " ".join(lines[9]) == "one 20 MiB 50 MiB - 330 MiB - - 400 MiB"


LOOKS = [("cache", "stats"), ("top",)]


def test_without_a_model_the_first_loaded_one_is_shown(url: str) -> None:
    assert run("load", "two", "--url", url).exit_code == 0
    for command in LOOKS:
        shown = run(*command, "--url", url)
        assert (shown.exit_code, shown.stderr) == (0, "")
    assert run("unload", "one", "--url", url).exit_code == 0
    for command in LOOKS:
        shown = run(*command, "--url", url)
        assert (shown.exit_code, shown.stderr) == (0, "one is not loaded; showing two\n")
        assert shown.stdout


def test_a_model_that_cannot_be_looked_into_is_said_to_be_so(url: str) -> None:
    def refused(*arguments: str) -> str:
        result = run(*arguments, "--url", url)
        assert (result.exit_code, result.stdout) == (1, "")
        return result.stderr

    for command in LOOKS:
        assert refused(*command, "--model", "two") == "error: two is not loaded; loaded: one\n"
        unknown = "error: The model 'four' does not exist; there is 'one', 'uno'"
        assert refused(*command, "--model", "four").startswith(unknown)
    assert run("unload", "one", "--url", url).exit_code == 0
    for command in LOOKS:
        assert refused(*command) == (
            "error: no model is loaded; `rootstock load NAME` loads one of one, two, three\n"
        )
        named = "error: one is not loaded; `rootstock load one` loads it\n"
        assert refused(*command, "--model", "one") == named


def test_top_watches_the_model_that_is_named(url: str, engines: Engines) -> None:
    """Its cache is what is shown. All engines are asked, once, whatever is watched."""
    assert run("load", "two", "--url", url).exit_code == 0
    shown = run("top", "--model", "two", "--url", url)
    assert shown.exit_code == 0
    assert f"two at {url}" in shown.stdout
    assert [engine.looks for engine in engines.made] == [1, 1]


def test_a_directory_has_no_model(tmp_path: object) -> None:
    result = run("cache", "clear", str(tmp_path), "--model", "two")
    assert result.exit_code == 2
    assert "--model" in result.stderr
