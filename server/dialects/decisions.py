"""`POST /v1/decisions`, as OpenAI has it: up to 400 typed questions about one input. It has no
stream.
"""

import json
from collections.abc import Iterator, Sequence
from functools import partial
from sys import getsizeof
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, StrictBool, StrictStr, field_validator, model_validator
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import PydanticCustomError, to_json
from typing_extensions import TypedDict

from server.dialects.endpoint import Endpoints
from server.dialects.job import Job
from server.errors import InvalidField
from server.generation.choice import AnswerUsage, Choice
from server.generation.conversation import MAX_MESSAGES, MAX_PARTS, ROLES, Message, texts
from server.generation.decisions import (
    ChoiceText,
    DecisionInput,
    Decisions,
    Probabilities,
    Question,
    prepare_decisions,
)
from server.generation.request_fields import PrioritizedRequest, PromptRequest
from server.generation.requests import ServedModel
from server.generation.tools import ToolCall, custom_arguments
from server.json_model import ByType, ReadAs, RequestModel, refused
from server.record import RequestRecord

MAX_QUESTIONS = 400
MAX_CHOICES = 255
MAX_LEVELS = 255
MAX_ALL_CHOICES = 20_000
"""Of all questions: each is rendered and looked up by itself."""
MAX_JSON_BYTES = 256 * 1024

NoStream = SkipJsonSchema[Annotated[bool, refused("a decision is answered whole")]]


class InputText(RequestModel):
    type: Literal["input_text", "output_text"]
    text: str

    def value(self) -> str:
        return self.text


class InputRefusal(RequestModel):
    """What an assistant said when it refused."""

    type: Literal["refusal"]
    refusal: str

    def value(self) -> str:
        return self.refusal


class InputJson(RequestModel):
    """An object, or a list of objects, which the model reads as JSON."""

    type: Literal["input_json"]
    data: dict[str, Any] | list[dict[str, Any]]

    def value(self) -> str:
        text = json.dumps(self.data, ensure_ascii=False)
        if len(text.encode("utf-8", "surrogatepass")) > MAX_JSON_BYTES:
            message = "has more than {most} bytes of JSON"
            raise PydanticCustomError("input_json", message, {"most": MAX_JSON_BYTES})
        return text


_Parts = Annotated[
    list[
        Annotated[
            str,
            ReadAs(
                Annotated[
                    InputText | InputRefusal | InputJson,
                    ByType(
                        InputText,
                        unknown="parts of type '{kind}' are not supported, only text and JSON",
                    ),
                ]
            ),
        ]
    ],
    Field(min_length=1, max_length=MAX_PARTS, fail_fast=True),
]


def _as_parts(content: object) -> object:
    """A string as one part."""
    return [{"type": "input_text", "text": content}] if isinstance(content, str) else content


Parts = Annotated[_Parts, BeforeValidator(_as_parts, json_schema_input_type=str | _Parts)]
"""Texts and JSON, each part as a text."""


class InputMessage(RequestModel):
    type: Literal["message"] = "message"
    role: Literal["user", "developer", "system", "assistant"]
    content: Parts

    def value(self) -> Message:
        return Message(role=ROLES[self.role], parts=texts("\n".join(self.content)))


class _InputCall(RequestModel):
    call_id: str = Field(max_length=256)
    name: str = Field(min_length=1, max_length=256)

    def called(self, arguments: str) -> Message:
        return Message(role="assistant", calls=[ToolCall(self.call_id, self.name, arguments)])


class InputFunctionCall(_InputCall):
    type: Literal["function_call"]
    arguments: str

    def value(self) -> Message:
        return self.called(self.arguments)


class InputCustomToolCall(_InputCall):
    type: Literal["custom_tool_call"]
    input: str

    def value(self) -> Message:
        return self.called(custom_arguments(self.input))


class InputToolOutput(RequestModel):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str = Field(max_length=256)
    output: Parts

    def value(self) -> Message:
        text = "\n".join(self.output)
        return Message(role="tool", parts=texts(text), answered_call=self.call_id)


_Items = Annotated[
    list[
        Annotated[
            Message,
            ReadAs(
                Annotated[
                    InputMessage | InputFunctionCall | InputCustomToolCall | InputToolOutput,
                    ByType(
                        InputMessage,
                        unknown="items of type '{kind}' are not supported, only messages, calls of "
                        "functions and custom tools, and their outputs",
                    ),
                ]
            ),
        ]
    ],
    Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
]


def _as_items(given: object) -> object:
    """A string as a message of the user."""
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


Items = Annotated[_Items, BeforeValidator(_as_items, json_schema_input_type=str | _Items)]

QuestionName = Annotated[str, Field(max_length=256)]


class _Question(RequestModel):
    instructions: Parts
    name: QuestionName | None = None

    @field_validator("instructions")
    @classmethod
    def _says_something(cls, parts: list[str]) -> list[str]:
        if not any(part.strip() for part in parts):
            raise PydanticCustomError("instructions", "must not be empty")
        return parts

    @property
    def words(self) -> str:
        return "\n".join(self.instructions).strip()


class PredicateQuestion(_Question):
    """How likely it is that a statement about the input is true."""

    type: Literal["predicate"]

    def question(self, at: str) -> Question:
        text = f"Statement: {self.words}\n\nIs this statement true of the above? Answer Yes or No."
        choices = [ChoiceText(word, f"{at}.type") for word in ("Yes", "No")]
        return Question(text, choices, f"{at}.instructions")


class OneChoice(RequestModel):
    value: StrictStr | StrictBool
    description: str | None = None


class ChoiceQuestion(_Question):
    """Which of the choices fits the input."""

    type: Literal["choice"]
    choices: list[OneChoice] = Field(min_length=2, max_length=MAX_CHOICES, fail_fast=True)

    @field_validator("choices")
    @classmethod
    def _each_once(cls, choices: list[OneChoice]) -> list[OneChoice]:
        known = set[tuple[type, str | bool]]()
        for index, choice in enumerate(choices):
            typed = type(choice.value), choice.value
            if typed in known:
                message = "choice {index} has the value of an earlier one"
                raise PydanticCustomError("choices", message, {"index": index})
            known.add(typed)
        return choices

    def question(self, at: str) -> Question:
        values = [one.value for one in self.choices]
        plain = [value if isinstance(value, str) else _json(value) for value in values]
        if len({text.strip() for text in plain}) < len(plain):  # such as true and "true"
            plain = [_json(value) for value in values]
        listed = _list(zip(plain, (one.description for one in self.choices), strict=True))
        text = (
            f"Question: {self.words}\n\nChoices:\n{listed}\n\n"
            "Answer with one of these choices, exactly as it is written, and nothing else."
        )
        choices = [
            ChoiceText(text, f"{at}.choices[{index}].value") for index, text in enumerate(plain)
        ]
        return Question(text, choices, f"{at}.instructions")


class Level(RequestModel):
    label: str = Field(min_length=1)
    description: str | None = None


class ScoreQuestion(_Question):
    """Which of some ordered levels the input has."""

    type: Literal["score"]
    levels: list[Level] = Field(min_length=2, max_length=MAX_LEVELS, fail_fast=True)

    @field_validator("levels")
    @classmethod
    def _each_once(cls, levels: list[Level]) -> list[Level]:
        if len({level.label.strip() for level in levels}) < len(levels):
            raise PydanticCustomError("levels", "two levels have the same label")
        return levels

    def question(self, at: str) -> Question:
        listed = _list((level.label, level.description) for level in self.levels)
        text = (
            f"Question: {self.words}\n\nLevels, from the lowest to the highest:\n{listed}\n\n"
            "Answer with one of these levels, exactly as it is written, and nothing else."
        )
        choices = [
            ChoiceText(level.label, f"{at}.levels[{index}].label")
            for index, level in enumerate(self.levels)
        ]
        return Question(text, choices, f"{at}.instructions")


def _json(value: str | bool) -> str:
    return json.dumps(value, ensure_ascii=False)


def _list(entries: Iterator[tuple[str, str | None]]) -> str:
    return "\n".join(f"- {text}: {about}" if about else f"- {text}" for text, about in entries)


TypedQuestion = PredicateQuestion | ChoiceQuestion | ScoreQuestion
OneQuestion = Annotated[
    TypedQuestion,
    ByType(
        PredicateQuestion,
        unknown="there are no questions of type '{kind}', only predicate, choice and score",
    ),
]


class DecisionRequest(PromptRequest, PrioritizedRequest):
    EXAMPLE: ClassVar = {
        "input": "The parcel came two days late, and the cup was broken.",
        "questions": [
            {"type": "predicate", "name": "late", "instructions": "It came late."},
            {
                "type": "choice",
                "name": "team",
                "instructions": "Which team should answer?",
                "choices": [{"value": "shipping"}, {"value": "billing"}],
            },
        ],
    }

    input: Items
    questions: list[OneQuestion] = Field(min_length=1, max_length=MAX_QUESTIONS, fail_fast=True)
    stream: NoStream = False

    @model_validator(mode="after")
    def _check_all(self) -> Self:
        _check_items(self.input)
        n_choices = sum(_n_choices(question) for question in self.questions)
        if n_choices > MAX_ALL_CHOICES:
            message = "all questions have {n} choices; at most {most}"
            numbers = {"n": n_choices, "most": MAX_ALL_CHOICES}
            raise PydanticCustomError("questions", message, numbers)
        return self


def _n_choices(question: TypedQuestion) -> int:
    match question:
        case ChoiceQuestion():
            return len(question.choices)
        case ScoreQuestion():
            return len(question.levels)
        case _:
            return 2


def _check_items(items: Sequence[Message]) -> None:
    """Raise ApiError (400) for items without a text, and for the output of a call that no earlier
    item has made.
    """
    if not any(item.text or item.calls for item in items):
        raise InvalidField("input", "must not be empty")
    known = set[str]()
    for index, item in enumerate(items):
        known |= {call.id for call in item.calls}
        if item.role == "tool" and item.answered_call not in known:
            raise InvalidField(f"input[{index}].call_id", "no item before it has made this call")


class PredicateAnswer(TypedDict):
    type: Literal["predicate"]
    name: str | None
    probability: float


class ChoiceProbability(TypedDict):
    value: str | bool
    probability: float


class ChoiceAnswer(TypedDict):
    type: Literal["choice"]
    name: str | None
    choice: str | bool
    confidence: float  # the probability of the choice
    probabilities: list[ChoiceProbability]


class LevelProbability(TypedDict):
    value: int  # the level's index
    label: str
    probability: float


class ScoreAnswer(TypedDict):
    type: Literal["score"]
    name: str | None
    score: float  # the mean of the values, weighted by their probabilities
    confidence: float  # the probability of the likeliest level
    probabilities: list[LevelProbability]


Answer = PredicateAnswer | ChoiceAnswer | ScoreAnswer


class DecisionInputDetails(TypedDict):
    cached_tokens: int
    cache_write_tokens: int


class DecisionOutputDetails(TypedDict):
    reasoning_tokens: int


class DecisionUsage(TypedDict):
    """The input counts once, and each question by itself."""

    input_tokens: int
    input_tokens_details: DecisionInputDetails
    output_tokens: int
    output_tokens_details: DecisionOutputDetails
    total_tokens: int


class Decision(TypedDict):
    answers: list[Answer]
    model: str
    usage: DecisionUsage


def _answer(question: TypedQuestion, found: Probabilities) -> Answer:
    best = max(range(len(found)), key=found.__getitem__)  # of equal ones the first
    match question:
        case PredicateQuestion():
            return {"type": "predicate", "name": question.name, "probability": found[0]}
        case ChoiceQuestion(choices=choices):
            return {
                "type": "choice",
                "name": question.name,
                "choice": choices[best].value,
                "confidence": found[best],
                "probabilities": [
                    {"value": one.value, "probability": probability}
                    for one, probability in zip(choices, found, strict=True)
                ],
            }
        case ScoreQuestion(levels=levels):
            return {
                "type": "score",
                "name": question.name,
                "score": sum(value * probability for value, probability in enumerate(found)),
                "confidence": found[best],
                "probabilities": [
                    {"value": value, "label": level.label, "probability": probability}
                    for value, (level, probability) in enumerate(zip(levels, found, strict=True))
                ],
            }


def _rendered(
    questions: Sequence[TypedQuestion],
    model: str,
    decisions: Decisions,
    choices: Sequence[Choice],
    usage: AnswerUsage,
) -> bytes:
    """The JSON of a Decision."""
    found = decisions.probabilities(choices)
    answer: Decision = {
        "answers": [_answer(*pair) for pair in zip(questions, found, strict=True)],
        "model": model,
        "usage": {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": usage.cached_tokens,
                "cache_write_tokens": usage.prompt_tokens - usage.cached_tokens,
            },
            "output_tokens": 0,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt_tokens,
        },
    }
    return to_json(answer)


router = Endpoints()


@router.generation("/v1/decisions", body=DecisionRequest, answer=Decision)
def create_decision(body: DecisionRequest, model: ServedModel, record: RequestRecord) -> Job:
    """The probabilities of the choices are those of their whole texts as the model's answer, given
    that it answers one of them.
    """
    given = DecisionInput(body.input, body.cache_salt, body.priority)
    questions = [one.question(f"questions[{i}]") for i, one in enumerate(body.questions)]
    decisions = prepare_decisions(given, questions, model, record)
    return Job(
        model=model,
        requests=decisions.requests,
        render=partial(_rendered, body.questions, model.name, decisions),
        form_bytes=sum(_kept_bytes(question) for question in body.questions),
        after=decisions.after,
        count=decisions.usage,
    )


def _kept_bytes(question: TypedQuestion) -> int:
    """The memory of the texts of a question, and of its choices."""
    own: list[str | bool | None] = [*question.instructions, question.name]
    match question:
        case ChoiceQuestion():
            own += [text for one in question.choices for text in (one.value, one.description)]
        case ScoreQuestion():
            own += [text for one in question.levels for text in (one.label, one.description)]
    return sum(map(getsizeof, own))
