"""How often a model calls the right function: `python -m load_tests.bench.tool_calls --target URL
[--model NAME] [--choice auto --choice required] [--json PATH]`.

Each question of tool_questions.yaml is a conversation of its own, greedy, with two or three
functions, the right one now first and now last among them. Counted are the answers with a call,
those whose first call is of the right function, and those whose first call also has all values that
the question names. Text is compared without regard to case.
"""

import asyncio
import dataclasses
import json
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
import yaml
from pydantic import BaseModel

from load_tests.client import Target, TargetError, discover
from load_tests.report import Table
from load_tests.terminal import fail, show_figures

QUESTIONS = Path(__file__).with_name("tool_questions.yaml")
AT_ONCE = 4
MAX_TOKENS = 64


class Declaration(BaseModel):
    """A function. All of its parameters are required."""

    description: str
    parameters: dict[str, dict[str, str]]


class Question(BaseModel):
    """A question, and the values of the call that answers it, which is of the first function."""

    ask: str
    offers: list[str]
    values: dict[str, str | float]


class Questions(BaseModel):
    """The file of questions."""

    functions: dict[str, Declaration]
    questions: list[Question]


@dataclasses.dataclass(frozen=True, slots=True)
class Grade:
    """What an answer's first call has."""

    choice: str
    question: str
    calls: Sequence[tuple[str, str]]  # names and arguments, as they came
    content: str
    is_right_function: bool
    has_values: bool


def load_questions() -> Questions:
    """The questions of the file."""
    return Questions.model_validate(yaml.safe_load(QUESTIONS.read_text()))


def tools_of(questions: Questions, index: int) -> list[dict[str, Any]]:
    """The functions that a question offers, rotated by its place in the file."""
    names = questions.questions[index].offers
    turn = index % len(names)
    return [_tool(name, questions.functions[name]) for name in (*names[turn:], *names[:turn])]


def _tool(name: str, declared: Declaration) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": declared.parameters,
        "required": list(declared.parameters),
    }
    function = {"name": name, "description": declared.description, "parameters": schema}
    return {"type": "function", "function": function}


def grade(choice: str, question: Question, message: Mapping[str, Any]) -> Grade:
    """The grade of an answer, given as the message of a chat completion."""
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    calls = [(function["name"], function["arguments"]) for function in functions]
    is_right = bool(calls) and calls[0][0] == question.offers[0]
    has_values = is_right and _has_values(calls[0][1], question.values)
    return Grade(choice, question.ask, calls, message.get("content") or "", is_right, has_values)


def _has_values(arguments: str, values: Mapping[str, str | float]) -> bool:
    try:
        given = json.loads(arguments)
    except ValueError:  # cut off
        return False
    if not isinstance(given, dict):
        return False
    return all(_plain(given.get(name)) == _plain(value) for name, value in values.items())


def _plain(value: object) -> object:
    return value.strip().lower() if isinstance(value, str) else value


async def ask(target: Target, choice: str, questions: Questions) -> list[Grade]:
    """The grades of the answers to all questions. Raises TargetError."""
    headers = {"Authorization": f"Bearer {target.api_key}"} if target.api_key else {}
    turns = asyncio.Semaphore(AT_ONCE)
    async with httpx.AsyncClient(
        headers=headers, timeout=target.stall_seconds, trust_env=False
    ) as http:

        async def graded(index: int, question: Question) -> Grade:
            body = {
                "model": target.model,
                "messages": [{"role": "user", "content": question.ask}],
                "tools": tools_of(questions, index),
                "tool_choice": choice,
                "temperature": 0,
                "max_tokens": MAX_TOKENS,
            }
            async with turns:
                response = await http.post(f"{target.base_url}/chat/completions", json=body)
            if response.status_code != httpx.codes.OK:
                raise TargetError(f"HTTP {response.status_code}: {response.text[:500]}")
            return grade(choice, question, response.json()["choices"][0]["message"])

        asked = enumerate(questions.questions)
        return await asyncio.gather(*(graded(index, question) for index, question in asked))


def table(grades: Sequence[Grade]) -> Table:
    """A row for each choice."""
    rows = []
    for choice in dict.fromkeys(one.choice for one in grades):
        given = [one for one in grades if one.choice == choice]
        counts = (
            len(given),
            sum(bool(one.calls) for one in given),
            sum(one.is_right_function for one in given),
            sum(one.has_values for one in given),
        )
        rows.append((choice, *map(str, counts)))
    columns = ("tool_choice", "questions", "with a call", "right function", "and all values")
    return Table(columns, tuple(rows))


def main(
    target: Annotated[str, typer.Option(help="Base URL, such as http://127.0.0.1:8000/v1.")],
    model: Annotated[str, typer.Option(help="The first one listed, by default.")] = "",
    choices: Annotated[list[str] | None, typer.Option("--choice", help="auto and required")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="For all answers.")] = None,
) -> None:
    """Ask all questions with each choice."""
    questions = load_questions()

    async def all_grades() -> list[Grade]:
        found = await discover(target)
        chosen = dataclasses.replace(found, model=model) if model else found
        given = [await ask(chosen, one, questions) for one in choices or ["auto", "required"]]
        return [*chain(*given)]

    try:
        grades = asyncio.run(all_grades())
    except TargetError as error:
        raise typer.Exit(fail(str(error))) from error
    show_figures(table(grades), grades, json_file)


if __name__ == "__main__":
    typer.run(main)
