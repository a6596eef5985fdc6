"""How the events of a stream are written: together where they come together, nothing lost."""

import pytest

from server.settings import Settings
from tests.contract.daemon import running
from tests.contract.fake_engine import FakeEngine, Gate, Script
from tests.contract.wire import LITTLE, posted, writes
from tests.polling import WAIT_SECONDS

TOKENS = 450
HELD_BACK = 10  # of these, until the rest has been generated
TEXT = "".join(chr(ord("a") + i % 26) for i in range(TOKENS))
MESSAGES = [{"role": "user", "content": "Hi"}]
MODEL = "test/bytes"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_what_one_step_says_of_several_choices_is_one_write(path: str) -> None:
    body = {"messages": MESSAGES, "prompt": "Hi", "n": 3, "max_tokens": 6, "stream": True}
    engine = FakeEngine(Script(["abcdef"]))
    with (
        running(engine, Settings(port=0)) as base_url,
        posted(base_url, path, body, is_deaf=True) as connection,
    ):
        said = writes(connection)
    for events in said:
        assert {choice["index"] for event in events for choice in event["choices"]} == {0, 1, 2}
    assert len(said) > 0


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_each_token_keeps_its_logprobs_when_text_is_joined(path: str) -> None:
    """They fill the sockets of a client that does not read, and what comes then is joined."""
    engine, gate = FakeEngine(), Gate()
    engine.script = Script([TEXT], gate=gate, gate_after_tokens=TOKENS - HELD_BACK)
    body: dict[str, object] = {"prompt": "Hi", "logprobs": 5, "max_tokens": TOKENS, "stream": True}
    if "chat" in path:
        body |= {"messages": MESSAGES, "logprobs": True, "top_logprobs": 20}
    with (
        running(engine, Settings(port=0), socket_options=LITTLE) as base_url,
        posted(base_url, path, body, is_deaf=True) as connection,
    ):
        engine.at_gate.get(timeout=WAIT_SECONDS)
        gate.open()
        choices = [c for events in writes(connection) for event in events for c in event["choices"]]
    told = [choice["logprobs"] for choice in choices if choice["logprobs"] is not None]
    if "chat" in path:
        tokens = [entry["token"] for logprobs in told for entry in logprobs["content"]]
    else:
        tokens = [token for logprobs in told for token in logprobs["tokens"]]
        assert [at for logprobs in told for at in logprobs["text_offset"]] == [*range(TOKENS)]
    assert "".join(tokens) == TEXT
    assert len(told) < TOKENS
