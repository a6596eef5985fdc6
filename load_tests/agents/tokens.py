"""What prompts have in common, in the tokens that the checkpoint's template makes of them."""

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
from transformers import AutoTokenizer

from load_tests.agents.dialects.chat import chat_messages, declared
from load_tests.agents.dialects.dialect import Ask

Tokens = npt.NDArray[np.int64]


class PromptTokens:
    """Renders and encodes as the daemon should, with transformers alone."""

    def __init__(self, model: Path) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(model)

    def of(self, ask: Ask) -> Tokens:
        messages = chat_messages(ask)
        for message in messages:
            for call in message.get("tool_calls", ()):
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        text = self._tokenizer.apply_chat_template(
            messages,
            tools=[declared(tool) for tool in ask.tools],
            add_generation_prompt=True,
            tokenize=False,
        )
        return np.array(self._tokenizer.encode(text, add_special_tokens=False))


class Computed:
    """What a daemon has computed: the last prompt of each session, and the answer to it."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[Tokens, int]] = {}

    def add(self, session: int, prompt: Tokens, whole_tokens: int) -> None:
        """The session's last prompt. `whole_tokens` are its own, as the daemon counts them, and
        those of its answer that go back with the next one.
        """
        self._last[session] = prompt, whole_tokens

    def common(self, prompt: Tokens) -> int:
        """The tokens that a prompt begins with and that were computed before."""
        return max((_common(prompt, *last) for last in self._last.values()), default=0)


def _common(prompt: Tokens, earlier: Tokens, whole_tokens: int) -> int:
    alike = common_prefix(prompt, earlier)
    return whole_tokens if alike == len(earlier) else alike


def common_prefix(one: Tokens, other: Tokens) -> int:
    """How many tokens two prompts begin with alike."""
    shorter = min(len(one), len(other))
    different = np.flatnonzero(one[:shorter] != other[:shorter])
    return int(different[0]) if len(different) else shorter
