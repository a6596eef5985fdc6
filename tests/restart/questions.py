"""A mixed load: prompts that begin alike, conversations, prompts like no other."""

import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx
from tokenizers import Tokenizer

from engine.text.byte_level import BYTE_OF
from server.dialects.openai_logprobs import token_text
from tests.restart.asking import Heard, ask

LEAD = 2e-3
"""A question is not asked where the best token leads by less: there two sound computations may
differ."""


@dataclass(frozen=True, slots=True)
class Question:
    """`expected` is what a daemon without a disk cache says, asked alone."""

    prompt: tuple[int, ...]
    expected: Heard

    def check(self, heard: Heard) -> None:
        """That an answer is right, as far as it goes."""
        wrong = heard.differs(self.expected)
        assert not wrong, f"a wrong answer to {len(self.prompt)} tokens: {wrong}"
        assert not heard.is_whole or len(heard.tokens) == len(self.expected.tokens)


@dataclass(frozen=True, slots=True)
class Load:
    """How many of each. Lengths are in tokens."""

    systems: int = 4
    endings: int = 5  # of each system prompt
    conversations: int = 5
    turns: int = 4
    unique: int = 14
    system_tokens: int = 420
    answer_tokens: int = 12


class Writer:
    """Makes questions up, and asks a daemon what the answers are."""

    def __init__(self, http: httpx.AsyncClient, model: Path, load: Load, seed: int) -> None:
        self._http = http
        self._load = load
        self._random = random.Random(seed)
        self._ids = token_ids(model)

    async def questions(self) -> AsyncIterator[Question]:
        load = self._load
        for system in [self._tokens(load.system_tokens) for _ in range(load.systems)]:
            for _ in range(load.endings):
                if question := await self._question((*system, *self._tokens(40))):
                    yield question
        for _ in range(load.conversations):
            said = self._tokens(280)
            for _ in range(load.turns):
                said = (*said, *self._tokens(50))
                question = await self._question(said)
                if question is None:
                    break
                yield question
                said = (*said, *(self._ids[token] for token in question.expected.tokens))
        for _ in range(load.unique):
            if question := await self._question(self._tokens(self._random.randrange(40, 900))):
                yield question

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._random.choices(sorted(self._ids.values()), k=count))

    async def _question(self, prompt: tuple[int, ...]) -> Question | None:
        heard = Heard()
        await ask(self._http, prompt, self._load.answer_tokens, heard)
        return None if min(heard.leads) < LEAD else Question(prompt, heard)


def token_ids(model: Path) -> dict[str, int]:
    """By the names that log-probabilities have for tokens."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    return {
        token_text(bytes(BYTE_OF[letter] for letter in token)): number
        for token, number in tokenizer.get_vocab().items()
    }
