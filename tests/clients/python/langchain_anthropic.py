"""langchain-anthropic: ChatAnthropic with bound tools."""

from typing import Any

import anthropic
from langchain_anthropic import ChatAnthropic
from pydantic import SecretStr

from tests.clients.checks import Daemon, main, raised
from tests.clients.python.langchain_loops import Loops
from tests.clients.scenario import GREETING, MAX_TOKENS, UNKNOWN


def required(daemon: Daemon) -> str:
    return LOOPS.required_call(daemon, tool_choice="any")


def errors(daemon: Daemon) -> str:
    unknown = Daemon(daemon.root, UNKNOWN)
    return str(raised(anthropic.NotFoundError, lambda: _model(unknown).invoke(GREETING)))


def _model(daemon: Daemon) -> Any:
    return ChatAnthropic(
        base_url=daemon.root,
        api_key=SecretStr("none"),
        model_name=daemon.model,
        temperature=0,
        max_tokens_to_sample=MAX_TOKENS,
        max_retries=0,
        timeout=None,
        stop=None,
    )


LOOPS = Loops(_model, _model)

if __name__ == "__main__":
    main(globals(), *LOOPS.checks())
