"""`/api/generate`: a prompt through the template, and past it."""

from typing import Any

import pytest

from engine.values.request import GrammarKind
from tests.contract.ollama.scripted import OllamaDaemon

THOUGHT = "<think>\nHm.\n</think>\n\nHello"


def test_a_prompt_is_what_the_user_says(hermes: OllamaDaemon) -> None:
    hermes.say(THOUGHT)
    answer = hermes.ollama.generate("bytes", "Hi", system="Be brief.")
    assert (answer.response, answer.thinking, answer.done_reason) == ("Hello", "Hm.", "stop")
    assert hermes.given[0] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
    ]


@pytest.mark.parametrize("raw", [False, True])
def test_a_stream_comes_to_the_same(hermes: OllamaDaemon, raw: bool) -> None:
    hermes.say(THOUGHT)
    whole = hermes.ollama.generate("bytes", "Hi", raw=raw)
    *parts, last = hermes.ollama.generate("bytes", "Hi", raw=raw, stream=True)
    assert "".join(part.response for part in parts) == whole.response
    assert "".join(part.thinking or "" for part in parts) == (whole.thinking or "")
    assert (last.done, last.response, last.eval_count) == (True, "", whole.eval_count)


def test_a_raw_prompt_goes_past_the_template(hermes: OllamaDaemon) -> None:
    hermes.say(THOUGHT)
    options: dict[str, Any] = {"num_predict": 200, "stop": ["lo"]}
    answer = hermes.ollama.generate("bytes", "<|end|>Hi", raw=True, options=options)
    asked = hermes.asked
    assert bytes(asked.prompt) == b"<|end|>Hi"
    assert (asked.max_tokens, asked.stop) == (200, ("lo",))
    assert (answer.response, answer.thinking) == (THOUGHT, None)
    assert answer.prompt_eval_count == len("<|end|>Hi")


def test_a_raw_prompt_has_room_and_a_format_as_others_have(hermes: OllamaDaemon) -> None:
    hermes.ollama.generate("bytes", "Hi", raw=True, format="json")
    asked = hermes.asked
    assert asked.max_tokens == hermes.engine.card.max_context_tokens - len("Hi")
    assert asked.constraint is not None
    assert asked.constraint.grammar.kind is GrammarKind.JSON_SCHEMA


def test_a_raw_prompt_that_is_cut_off_says_so(hermes: OllamaDaemon) -> None:
    hermes.say("Hello")
    answer = hermes.ollama.generate("bytes", "Hi", raw=True, options={"num_predict": 2})
    assert (answer.response, answer.done_reason, answer.eval_count) == ("He", "length", 2)
