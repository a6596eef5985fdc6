"""An effort means the same in every dialect: the template is given it where it tells efforts apart,
and reasoning has a budget where it does not.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.contract.dialects.test_names import post
from tests.contract.dialects.test_roles import BODIES
from tests.contract.scripted import THINK, Daemon, RecordingTokenizer

NAMING = "{%- if reasoning_effort == 'xhigh' or reasoning_effort == \"max\" %}"
VERBATIM = "Reasoning: {{ reasoning_effort | default('medium') }}"
THINKING = "{%- if not thinking is defined %}{%- set thinking = false %}{%- endif %}"
OTHERS_THINKING = "{%- if message.thinking is defined %}{{ message['thinking'] }}"

EFFORT_FIELDS: dict[str, Any] = {
    "/v1/chat/completions": lambda effort: {"reasoning_effort": effort},
    "/v1/messages": lambda effort: {"output_config": {"effort": effort}},
    "/v1/responses": lambda effort: {"reasoning": {"effort": effort}},
    "/api/chat": lambda effort: {"think": effort},
}
LIMIT_FIELDS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"max_tokens": 100},
    "/v1/messages": {"max_tokens": 100},
    "/v1/responses": {"max_output_tokens": 100},
    "/api/chat": {"options": {"num_predict": 100}},
}
PATHS = pytest.mark.parametrize("path", BODIES)


@pytest.fixture(scope="module", params=[NAMING, VERBATIM], ids=["naming", "verbatim"])
def with_levels(request: pytest.FixtureRequest) -> Iterator[Daemon]:
    with Daemon.serving(RecordingTokenizer(chat_template=THINK + request.param)) as daemon:
        yield daemon


@PATHS
@pytest.mark.parametrize("effort", ["none", "minimal", "low", "medium", "high", "xhigh", "max"])
def test_the_template_is_given_the_next_effort_that_it_knows(
    with_levels: Daemon, path: str, effort: str
) -> None:
    assert post(with_levels, path, EFFORT_FIELDS[path](effort)).status_code == 200
    tokenizer = with_levels.engine.tokenizer
    names_them = isinstance(tokenizer, RecordingTokenizer) and NAMING in tokenizer.chat_template
    told = {"minimal": "low"} | ({} if names_them else {"xhigh": "high", "max": "high"})
    assert with_levels.given[1]["reasoning_effort"] == told.get(effort, effort)
    assert with_levels.asked.thinking_budget is None


@PATHS
@pytest.mark.parametrize(
    ("effort", "tokens"),
    [("minimal", 10), ("low", 20), ("medium", 50), ("high", 80), ("xhigh", 95), ("max", None)],
)
def test_without_levels_an_effort_is_a_budget(
    hermes: Daemon, path: str, effort: str, tokens: int | None
) -> None:
    fields = EFFORT_FIELDS[path](effort) | LIMIT_FIELDS[path]
    assert post(hermes, path, fields).status_code == 200
    budget = hermes.asked.thinking_budget
    assert (None if budget is None else budget.tokens) == tokens
    assert post(hermes, path, {**fields, "thinking_budget": 7}).status_code == 200
    budget = hermes.asked.thinking_budget
    assert budget is not None
    assert budget.tokens == 7


@pytest.mark.parametrize(
    ("template", "switches"),
    [
        (THINKING, {"enable_thinking": False, "thinking": False}),
        (OTHERS_THINKING, {"enable_thinking": False}),
    ],
)
def test_a_template_may_call_its_switch_thinking(template: str, switches: dict[str, bool]) -> None:
    with Daemon.serving(RecordingTokenizer(chat_template=THINK + template)) as daemon:
        for path in BODIES:
            assert post(daemon, path, {"enable_thinking": False}).status_code == 200
            assert daemon.given[1] == switches
