"""Prompts for a real model, made of what every Python has: its documentation and its source."""

import calendar
import inspect
import json
import textwrap
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pydoc_data.topics import topics

from mlx_lm.tokenizer_utils import TokenizerWrapper

Message = dict[str, str]

ANSWER_TOKENS = 16
"""The most tokens of an answer, but for the long ones."""

LONG_ANSWER_TOKENS = 160

QUESTIONS = (
    "What is the capital of France?",
    "Name three primary colours.",
    "How many legs does a spider have? Answer with the number alone.",
    "Write a haiku about the sea.",
    "What is 7 + 5?",
    "Translate 'good morning' into French, German and Spanish.",
    "¿Cuál es la capital de España?",
    "Was ist die Hauptstadt von Österreich? Antworte kurz.",
    "日本の首都はどこですか。",
    "Какая столица России?",
    "Say 👋🏽 and 👩‍👩‍👧‍👦 back to me.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Say yes.",
    "List the numbers from 1 to 20, separated by commas.",
    "Is the earth flat?\n\n\n        Answer:",
    "Continue: one two three one two three one two three one two",
)
SYSTEM = "You are a terse assistant. Answer in one sentence."

DOCUMENTS = ("assert", "power", "global", "typesmethods", "booleans", "context-managers")
DOCUMENT_CHARACTERS = 700
ASKED_OF_DOCUMENTS = (
    "What is this text about?",
    "Repeat the first sentence of the text.",
    "Give one example in Python.",
    "Write a title for the text.",
)

FUNCTIONS: tuple[Callable[..., object], ...] = (
    textwrap.indent,
    textwrap.shorten,
    json.dumps,
    calendar.monthrange,
    calendar.isleap,
    inspect.cleandoc,
    inspect.getdoc,
    json.load,
)
CODE_CHARACTERS = 500

FIRST_TURNS = (
    "What is a list in Python?",
    "My name is Teodora, and I live in Lisbon.",
    "Name a fruit.",
    "Tell me a joke.",
    "Count from 1 to 5.",
    "What is water made of?",
)
LATER_TURNS = ("And why is that?", "Say it once more, but shorter.")

MOST_CHARACTERS = 8
"""Of a token of the documentation, on average; it has 4."""

BORDER_TOKENS = (31, 32, 33, 63, 64, 65)
"""Lengths of prompts around the ends of blocks of 32 tokens."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt, and the most tokens to generate."""

    name: str
    tokens: tuple[int, ...]
    max_tokens: int


class Writer:
    """Writes prompts with a model's tokenizer and chat template."""

    def __init__(self, tokenizer: TokenizerWrapper, answer: Callable[[Prompt], str]) -> None:
        """`answer` is what an assistant's turns in conversations say."""
        self._tokenizer = tokenizer
        self._answer = answer

    def chat(self, name: str, max_tokens: int, *messages: Message) -> Prompt:
        """A prompt of messages. Without a system turn the template writes its own."""
        tokens = self._tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, return_dict=False
        )
        return Prompt(name, tuple(tokens), max_tokens)

    def text(self, name: str, max_tokens: int, text: str) -> Prompt:
        """A prompt of text that the model continues."""
        return Prompt(name, tuple(self._tokenizer.encode(text)), max_tokens)

    def documentation(self, n_tokens: int) -> tuple[int, ...]:
        """The first tokens of the documentation's longest topics."""
        longest = sorted(topics.values(), key=len, reverse=True)
        text = "\n\n".join(longest)[: MOST_CHARACTERS * n_tokens]
        tokens = tuple(self._tokenizer.encode(text)[:n_tokens])
        assert len(tokens) == n_tokens
        return tokens

    def questions(self) -> Iterator[Prompt]:
        for at, question in enumerate(QUESTIONS):
            yield self.chat(f"question {at}", ANSWER_TOKENS, user(question))
            yield self.chat(f"terse question {at}", ANSWER_TOKENS, system(SYSTEM), user(question))

    def documents(self) -> Iterator[Prompt]:
        for topic in DOCUMENTS:
            document = topics[topic][:DOCUMENT_CHARACTERS]
            for at, question in enumerate(ASKED_OF_DOCUMENTS):
                asked = user(f"{document}\n\n{question}")
                yield self.chat(f"document {topic} {at}", ANSWER_TOKENS, asked)

    def code(self) -> Iterator[Prompt]:
        """Code to continue, cut within a line, and to repeat; tables and indents of many spaces."""
        sources = [inspect.getsource(function)[:CODE_CHARACTERS] for function in FUNCTIONS]
        for at, source in enumerate(sources):
            yield self.text(f"code {at}", ANSWER_TOKENS, source)
        for at, source in enumerate(sources[3:7]):
            yield self.chat(f"repeated code {at}", ANSWER_TOKENS, repeating(source))
        yield self.text("calendar", ANSWER_TOKENS, calendar.calendar(2026)[:600])
        yield self.text("indented", ANSWER_TOKENS, textwrap.indent(sources[4], " " * 40))
        yield self.text("tabs", ANSWER_TOKENS, textwrap.indent(sources[3], "\t" * 6))
        yield self.text("json", ANSWER_TOKENS, json.dumps(list(range(24)), indent=12))

    def conversations(self) -> Iterator[Prompt]:
        """Three turns of each conversation."""
        for at, first in enumerate(FIRST_TURNS):
            messages = [user(first)]
            for turn, following in enumerate((*LATER_TURNS, None)):
                prompt = self.chat(f"conversation {at} turn {turn}", ANSWER_TOKENS, *messages)
                yield prompt
                if following is not None:
                    answer = self._answer(prompt)
                    messages += [{"role": "assistant", "content": answer}, user(following)]

    def borders(self) -> Iterator[Prompt]:
        for n_tokens in BORDER_TOKENS:
            yield Prompt(f"{n_tokens} tokens", self.documentation(n_tokens), ANSWER_TOKENS)

    def unicode(self) -> Iterator[Prompt]:
        """Letters of many scripts, their names, combining marks, and symbols beyond 16 bits."""
        alphabets = (0x3B1, 0x430, 0x5D0, 0x627, 0x905, 0x3042, 0xAC00, 0x1F600)
        letters = ["".join(chr(first + at) for at in range(8)) for first in alphabets]
        names = [f"{row[0]} {unicodedata.name(row[0])}" for row in letters]
        decomposed = unicodedata.normalize("NFD", "Ångström, déjà vu, Üben, piñata. ")
        yield self.text("scripts", ANSWER_TOKENS, "\n".join(letters))
        yield self.text("names of letters", ANSWER_TOKENS, "\n".join(names))
        yield self.text("decomposed", ANSWER_TOKENS, decomposed * 3)
        yield self.chat("emoji", ANSWER_TOKENS, user("🙂🙃🙂🙃🙂🙃 What comes next?"))

    def hundred(self) -> list[Prompt]:
        """All of the above: 32 questions, 24 of documents, 16 of code, 18 turns, 10 others."""
        found = [
            *(*self.questions(), *self.documents(), *self.code(), *self.conversations()),
            *(*self.borders(), *self.unicode()),
        ]
        assert len(found) == len({prompt.name for prompt in found}) == 100
        return found

    def few(self) -> list[Prompt]:
        """One or two of each kind, for the fast tests."""
        kinds = (self.questions(), self.documents(), self.code(), self.borders(), self.unicode())
        counts = (2, 2, 1, 2, 1)
        return [prompt for kind, n in zip(kinds, counts, strict=True) for prompt in islice(kind, n)]

    def long(self) -> list[Prompt]:
        """Prompts whose answers are long; the code and the text repeat what there is."""
        sources = [
            inspect.getsource(function) for function in (textwrap.indent, calendar.monthrange)
        ]
        paragraph = topics["assert"][:300]
        return [
            *(
                self.chat(f"long code {at}", LONG_ANSWER_TOKENS, repeating(source))
                for at, source in enumerate(sources)
            ),
            self.text(
                "long text", LONG_ANSWER_TOKENS, f"{paragraph}\n\n{paragraph}\n\n{paragraph[:40]}"
            ),
            self.chat("long answer", LONG_ANSWER_TOKENS, user("Explain how a bicycle works.")),
        ]


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def system(content: str) -> Message:
    return {"role": "system", "content": content}


def repeating(source: str) -> Message:
    return user(f"Repeat this code exactly:\n\n```python\n{source}```")


def lengths(prompts: Sequence[Prompt]) -> int:
    """The tokens of all prompts."""
    return sum(len(prompt.tokens) for prompt in prompts)
