"""Typed questions about one input, as requests to the engine, and what the log-probabilities of all
choices say.

The prompts of all questions begin with the input, which is computed once, before them. The choices
of a question are a tree of tokens: one request reads the log-probabilities of all tokens that may
come next at one node of it. It begins when the node before it has been computed, so that it adopts
all of its prompt but one token, and all nodes of a depth are computed in the same steps.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import exp, fsum, inf, log
from typing import Final, NamedTuple

from engine.values.model import Task
from engine.values.request import Request, SamplingParams
from engine.values.tokens import pack
from server.errors import SERVER, ApiError, InvalidField
from server.generation.choice import AnswerUsage, Choice
from server.generation.conversation import Conversation, Message, Text, check_messages, texts
from server.generation.history import Tokens, common_beginning
from server.generation.prompt import check_prompt, too_long
from server.generation.requests import ServedModel, check_task
from server.record import RequestRecord

MAX_TOKENS = 1 << 22
"""Of all prompts of a request: each repeats the input, so the body alone bounds no memory."""

END: Final = -1
"""Stands for the end of an answer in the tokens of a choice that another choice begins with."""


class ChoiceText(NamedTuple):
    """What the model answers for one choice, and the field that names it, for errors."""

    text: str
    param: str


@dataclass(frozen=True, slots=True)
class Question:
    """What the model is asked after the input, and the answers between which it decides."""

    text: str
    choices: Sequence[ChoiceText]
    param: str  # the field with the question's words, for errors


@dataclass(frozen=True, slots=True)
class DecisionInput:
    """The messages that all questions are about."""

    messages: Sequence[Message]
    cache_salt: str = ""
    priority: int = 0


Probabilities = Sequence[float]
"""Of the choices of one question, in their order. They sum to 1."""


@dataclass(frozen=True, slots=True)
class Decisions:
    """The engine's requests of a body's questions, and the results of the requests as answers.

    `after` has the request that must end before another begins, by their ids.
    """

    requests: Sequence[Request]
    after: Mapping[str, str]
    _questions: Sequence["_Tree"]
    _head_tokens: int
    _first: int  # the index of the first question's request

    def probabilities(self, choices: Sequence[Choice]) -> list[Probabilities]:
        """The probabilities of each question's choices, from the outputs of all requests."""
        outputs, found = iter(choices[self._first :]), list[Probabilities]()
        for tree in self._questions:
            logprobs = {path: dict(next(outputs).logprobs[0].top) for path in tree.nodes}
            found.append(tree.probabilities(logprobs))
        return found

    def usage(self, choices: Sequence[Choice]) -> AnswerUsage:
        """Tokens of the input once, and of each question. Those of choices do not count."""
        used = [choice.usage for choice in choices]
        prompt_tokens = cached_tokens = 0
        if self._first and (head := used[0]) is not None:
            prompt_tokens, cached_tokens = head.prompt_tokens, head.cached_tokens
        index = self._first
        for tree in self._questions:
            if (usage := used[index]) is not None:
                known = self._head_tokens if self._first else 0
                prompt_tokens += usage.prompt_tokens - known
                cached_tokens += max(usage.cached_tokens - known, 0)
            index += len(tree.nodes)
        return AnswerUsage(prompt_tokens, cached_tokens, completion_tokens=0)


@dataclass(frozen=True)
class _Tree:
    """The choices of a question as tokens. None is the beginning of another."""

    choices: Sequence[Tokens]
    ends: Tokens  # the tokens that END stands for

    @cached_property
    def nodes(self) -> Mapping[Tokens, Tokens]:
        """The beginnings of choices after which a token is read, each with the tokens that may come
        next; a beginning comes before those that continue it.
        """
        found = dict[Tokens, dict[int, None]]()
        for choice in self.choices:
            for n_tokens, token in enumerate(choice):
                found.setdefault(choice[:n_tokens], {})[token] = None
        return {path: tuple(found[path]) for path in sorted(found, key=len)}

    def read_tokens(self, path: Tokens) -> Tokens:
        """The tokens whose log-probabilities are read after this beginning."""
        listed = dict[int, None]()
        for token in self.nodes[path]:
            listed |= dict.fromkeys(self.ends if token == END else (token,))
        return tuple(listed)

    def probabilities(self, logprobs: Mapping[Tokens, Mapping[int, float]]) -> Probabilities:
        """The probabilities of the choices, given that the answer is one of them.

        Raises ApiError (500) where the model rules out all of them.
        """
        totals = [
            fsum(
                self._logprob(logprobs[choice[:n_tokens]], token)
                for n_tokens, token in enumerate(choice)
            )
            for choice in self.choices
        ]
        if (peak := max(totals)) == -inf:
            message = "The model gives none of a question's choices any probability."
            raise ApiError(500, message, type=SERVER, code="generation_failed")
        weights = [exp(total - peak) for total in totals]
        total = fsum(weights)
        return [weight / total for weight in weights]

    def _logprob(self, after: Mapping[int, float], token: int) -> float:
        if token != END:
            return after[token]
        mass = fsum(exp(after[end]) for end in self.ends)
        return log(mass) if mass else -inf


def prepare_decisions(
    given: DecisionInput, questions: Sequence[Question], model: ServedModel, record: RequestRecord
) -> Decisions:
    """The engine's requests: the input's, then for each question those of its tree.

    Raises ApiError (400) for what the model cannot serve.
    """
    check_task(model, Task.GENERATE)
    check_messages(given.messages, "input")
    prompts = _Prompts(given, model, record)
    head = prompts.head if len(questions) > 1 else ()
    template = Request(
        id="",
        prompt=pack(head),
        max_tokens=0,
        sampling=SamplingParams(temperature=0.0, seed=0, top_logprobs=0),
        speculate=False,
        client=record.client,
        priority=given.priority,
        cache_salt=record.cache_salt(given.cache_salt),
        adapter=model.adapter,
    )
    requests, after, trees = list[Request](), dict[str, str](), list[_Tree]()
    if head:
        requests.append(replace(template, id=f"{record.id}-0"))
    n_tokens = len(head)
    for question in questions:
        prompt, tree = prompts.question(question), prompts.tree(question)
        trees.append(tree)
        ids = dict[Tokens, str]()
        for path in tree.nodes:
            tokens = prompt + path
            n_tokens += len(tokens)
            if n_tokens > MAX_TOKENS:
                raise InvalidField(
                    question.param,
                    f"the prompts of all questions up to here have {n_tokens} tokens, each with "
                    f"the input; at most {MAX_TOKENS} in one request",
                )
            ids[path] = id = f"{record.id}-{len(requests)}"
            if path:
                after[id] = ids[path[:-1]]
            elif head:
                after[id] = requests[0].id
            is_continued = any((*path, token) in tree.nodes for token in tree.nodes[path])
            requests.append(
                replace(
                    template,
                    id=id,
                    prompt=pack(tokens),
                    max_tokens=1,
                    sampling=replace(template.sampling, logprob_token_ids=tree.read_tokens(path)),
                    shared_tokens=len(prompt) if path and not is_continued else None,
                )
            )
    return Decisions(requests, after, trees, len(head), bool(head))


SENTINELS = ("One", "Two")
"""Two questions, by which is found what the template writes around a question."""

ANSWERS = ("Yes", "No")
"""Two answers, by which is found what the template writes before an answer."""


class _Frame(NamedTuple):
    """The tokens that the template writes before and after a text."""

    before: Tokens
    after: Tokens

    @classmethod
    def of(cls, one: Tokens, other: Tokens) -> "_Frame":
        """What two renderings with different texts have in common."""
        n_before = common_beginning(one, other)
        left, right = one[n_before:], other[n_before:]
        n_after = common_beginning(left[::-1], right[::-1])
        return cls(one[:n_before], one[len(one) - n_after :])

    def text_in(self, whole: Tokens) -> Tokens | None:
        """The tokens of the text within a rendering; None where it has changed what is around."""
        n_before, n_after = len(self.before), len(self.after)
        stop = len(whole) - n_after
        if stop < n_before or whole[:n_before] != self.before or whole[stop:] != self.after:
            return None
        return whole[n_before:stop]


@dataclass(frozen=True)
class _Prompts:
    """Renders the input once, and each question and each choice by itself: the tokens are those of
    the template for the whole conversation, and cost what the questions are long.
    """

    given: DecisionInput
    model: ServedModel
    record: RequestRecord
    _answers: dict[str, Tokens | None] = field(default_factory=dict)

    @property
    def head(self) -> Tokens:
        """The tokens that all prompts begin with."""
        return self._frame.before

    @cached_property
    def _frame(self) -> _Frame:
        """What stands before a question, and between it and the answer."""
        around = self.given.messages
        one, other = (self._rendered(around, text, ANSWERS[0]) for text in SENTINELS)
        frame = _Frame.of(one, other)
        answer = common_beginning(one, self._rendered(around, SENTINELS[0], ANSWERS[1]))
        start = len(one) - len(frame.after)
        if answer < start:
            message = "its chat template cannot continue an answer, which a decision needs"
            raise InvalidField("model", message)
        return frame._replace(after=one[start:answer])

    @cached_property
    def _small(self) -> Sequence[Message]:
        """A conversation of one word, which ends as the input does."""
        *_, last = self.given.messages
        return [Message(role="user", parts=texts("A"))] if last.role == "user" else ()

    @cached_property
    def _small_question(self) -> _Frame:
        one, other = (self._rendered(self._small, text, ANSWERS[0]) for text in SENTINELS)
        return _Frame.of(one, other)

    @cached_property
    def _small_answer(self) -> _Frame:
        one, other = (self._rendered(self._small, SENTINELS[0], text) for text in ANSWERS)
        return _Frame.of(one, other)

    def question(self, question: Question) -> Tokens:
        """The prompt of a question. Raises ApiError (400) where it is too long."""
        rendered = self._rendered(self._small, question.text, ANSWERS[0], question.param)
        if (own := self._small_question.text_in(rendered)) is None:
            raise InvalidField(question.param, "the model's chat template does not keep it whole")
        prompt, card = (*self.head, *own, *self._frame.after), self.model.engine.card
        check_prompt(prompt, card, question.param)
        return prompt

    def tree(self, question: Question) -> _Tree:
        """The choices of a question as tokens. Raises ApiError (400) for those without tokens, and
        for two that the model would answer alike.
        """
        card, known = self.model.engine.card, dict[Tokens, str]()
        for text, param in question.choices:
            if text not in self._answers:
                rendered = self._rendered(self._small, SENTINELS[0], text, param)
                self._answers[text] = self._small_answer.text_in(rendered)
            tokens = self._answers[text]
            if not tokens:
                raise InvalidField(param, "the model cannot answer with this text alone")
            check_prompt(tokens, card, param)
            if (other := known.setdefault(tokens, param)) != param:
                raise InvalidField(param, f"to the model it is the same as {other}")
        beginnings = {tokens[:n] for tokens in known for n in range(len(tokens))}
        ends = tuple(sorted(end for end in card.eos_token_ids if end < card.vocab_size))
        if not ends and not beginnings.isdisjoint(known):
            *_, (_, param) = question.choices
            raise InvalidField(
                param, "another choice begins with it, and the model has no end token"
            )
        choices = [(*tokens, END) if tokens in beginnings else tokens for tokens in known]
        longest = max(map(len, choices))
        n_tokens = len(self.question(question)) + longest
        if n_tokens > card.max_sequence_tokens:
            raise too_long(str(n_tokens), card, question.param)
        return _Tree(choices, ends)

    def _rendered(
        self, around: Sequence[Message], question: str, answer: str, param: str = "input"
    ) -> Tokens:
        """The messages, the question in the user's last turn, and the beginning of an answer."""
        messages = _with_question(around, question)
        prompts, salt = self.model.prompts, self.record.cache_salt(self.given.cache_salt)
        if not self.model.engine.tokenizer.chat_template:
            shown = [message.text for message in messages]
            return prompts.text("\n\n".join([*shown, f"Answer: {answer}"]), param=param)
        conversation = Conversation(
            messages=[*messages, Message(role="assistant", parts=texts(answer))],
            thinks=False,
            continue_final_message=True,
            cache_salt=self.given.cache_salt,
        )
        return prompts.chat(conversation, self.model.replays, salt, param).tokens


def _with_question(messages: Sequence[Message], question: str) -> list[Message]:
    """The messages with a question at the end of the user's last turn, or in a turn of its own."""
    if not messages or messages[-1].role != "user":
        return [*messages, Message(role="user", parts=texts(question))]
    *before, last = messages
    *parts, end = last.parts or (Text(""),)
    if isinstance(end, Text) and end.text:
        return [*before, replace(last, parts=(*parts, Text(f"{end.text}\n\n{question}")))]
    return [*before, replace(last, parts=(*last.parts, Text(question)))]
