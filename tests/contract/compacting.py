"""A daemon with room for summaries before the vendors' clients."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from engine.values.model import ModelCard
from tests.contract.fake_engine import CARD, FakeEngine
from tests.contract.scripted import Daemon, RecordingTokenizer
from tests.polling import until

CONTEXT = 1 << 15
WIDE = replace(
    CARD, model_context_tokens=CONTEXT, max_context_tokens=CONTEXT, arena_tokens=4 * CONTEXT
)


@dataclass
class WideEngine(FakeEngine):
    """Its prompts may have tens of thousands of bytes."""

    card: ModelCard = WIDE


class CompactingDaemon(Daemon):
    """A daemon whose model is asked for summaries."""

    @property
    def told(self) -> list[tuple[str, str]]:
        """The roles and texts of the messages that the template was given last."""
        return [(message["role"], message["content"]) for message in self.given[0]]

    @property
    def tools(self) -> list[Any]:
        """The tools that the template was given each time."""
        assert isinstance(self.engine.tokenizer, RecordingTokenizer)
        return [fields.get("tools") for _, fields in self.engine.tokenizer.given]

    @property
    def prompts_until_warmed(self) -> list[Any]:
        """The requests that the engine was given since the last look, up to the one that computes
        the head of a conversation that was compacted.
        """
        found = list[Any]()

        def is_warmed() -> bool:
            found.extend(self.prompts)
            return any(one.is_background for one in found)

        until(is_warmed)
        return found

    @property
    def prompts(self) -> list[Any]:
        """The requests that the engine was given since the last look."""
        found = list[Any]()
        while not self.engine.submitted.empty():
            found.append(self.engine.submitted.get_nowait())
        return found


@contextmanager
def compacting(state: Path, **settings: Any) -> Iterator[CompactingDaemon]:
    """A daemon whose user has this folder of state."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("XDG_STATE_HOME", str(state))
        with CompactingDaemon.serving(RecordingTokenizer(), WideEngine, **settings) as made:
            yield made


def warmed(daemon: CompactingDaemon) -> Any:
    """The request that computes the head of a conversation that was compacted."""
    return daemon.prompts_until_warmed[-1]


def texts(messages: Sequence[tuple[str, str]]) -> str:
    """All that the messages say."""
    return "\n".join(text for _, text in messages)
