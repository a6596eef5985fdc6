"""The lines of a batch's input file, and the lines of its results."""

from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import jiter
from pydantic_core import to_json

from server.batches.store import BatchUsage, LineError
from server.json_size import check_json_size

MAX_LINES = 50_000
MAX_ERRORS = 100  # of one file
MAX_ID_CHARACTERS = 256
MAX_MESSAGE_CHARACTERS = 200  # a client's own keys can be in it

PROMPT_FIELDS = ("model", "tools", "system", "instructions", "messages", "prompt", "input")
"""Fields of a body in the order in which a prompt has them."""

UNSERVED = {
    "stream": "a line of a batch is answered whole",
    "background": "a line of a batch runs in the background as it is",
}
"""Fields of a body that no line may have, and why."""

FIRST_KEY_BYTES = 256
KEY_GROWTH = 1.25
KEY_DIGEST_BYTES = 6


class Line(NamedTuple):
    """Where a request is in its file, and the name that its client gave it."""

    start: int
    n_bytes: int
    custom_id: str
    key: bytes  # see `prefix_key`


class WrongLines(Exception):
    """A file from which no batch can be made."""

    def __init__(self, errors: Sequence[LineError]) -> None:
        super().__init__(f"{len(errors)} wrong lines")
        self.errors = errors


def read_lines(path: Path, endpoint: str, max_line_bytes: int) -> tuple[list[Line], str | None]:
    """The lines of a file in the order in which they are to run, and the model of the first.
    Lines whose prompts begin alike follow one another. Raises WrongLines, and OSError.
    """
    errors, lines, numbers = list[LineError](), list[Line](), dict[str, int]()
    first_model: str | None = None
    with path.open("rb") as file:
        number = start = 0
        while text := file.readline(max_line_bytes + 1):
            number += 1
            if len(text) > max_line_bytes and not text.endswith(b"\n"):
                message = f"A line has more than {max_line_bytes} bytes (max_body_bytes)."
                errors.append(_error("line_too_long", message, number))
                break
            if text.strip():
                line = _line(text, start, number, endpoint, numbers, errors)
                if line is not None:
                    lines.append(line[0])
                    first_model = line[1] if len(lines) == 1 else first_model
            if len(lines) > MAX_LINES:
                message = f"A batch has at most {MAX_LINES} lines."
                errors.append(_error("too_many_lines", message, number))
            if len(lines) > MAX_LINES or len(errors) >= MAX_ERRORS:
                break
            start += len(text)
    if not lines and not errors:
        errors.append(LineError(code="empty_file", message="No line.", line=None, param=None))
    if errors:
        raise WrongLines(errors)
    return sorted(lines, key=lambda line: line.key), first_model


class LineBody(NamedTuple):
    """The body of a line as JSON, and the first of UNSERVED that it asks for."""

    json: bytes
    unserved: str | None


def request_body(text: bytes) -> LineBody:
    """The body of a line that `read_lines` has accepted."""
    body: dict[str, Any] = jiter.from_json(text)["body"]
    return LineBody(to_json(body), next((name for name in UNSERVED if body.get(name)), None))


def prefix_key(body: Mapping[str, Any]) -> bytes:
    """Sorts prompts so that those with a common beginning are next to one another: the digests of
    its first 256 bytes, of its first 320, and so on.
    """
    text = to_json([body.get(name) for name in PROMPT_FIELDS])
    digest, key, end, size = blake2b(digest_size=KEY_DIGEST_BYTES), b"", 0, FIRST_KEY_BYTES
    while end < len(text):
        digest.update(text[end:size])
        key += digest.copy().digest()
        end, size = size, int(size * KEY_GROWTH)
    return key


def _line(
    text: bytes,
    start: int,
    number: int,
    endpoint: str,
    numbers: dict[str, int],
    errors: list[LineError],
) -> tuple[Line, str | None] | None:
    """A line and its model, or None after adding what is wrong with it to `errors`."""
    try:
        check_json_size(text)
        value = jiter.from_json(text, allow_inf_nan=False, catch_duplicate_keys=True)
        if not isinstance(value, dict):
            raise ValueError("it is no object")
    except ValueError as error:
        problem = str(error)[:MAX_MESSAGE_CHARACTERS]
        message = f"This line cannot be read as JSON: {problem}."
        errors.append(_error("invalid_json_line", message, number))
        return None
    custom_id, body = value.get("custom_id"), value.get("body")
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_ID_CHARACTERS:
        message = f"custom_id: must be a string of 1 to {MAX_ID_CHARACTERS} characters."
        wrong = _error("invalid_custom_id", message, number, "custom_id")
    elif (before := numbers.setdefault(custom_id, number)) != number:
        message = f"custom_id: line {before} has the same."
        wrong = _error("duplicate_custom_id", message, number, "custom_id")
    elif value.get("method", "POST") != "POST":
        wrong = _error("invalid_method", "method: must be POST.", number, "method")
    elif value.get("url") != endpoint:
        message = f"url: must be the endpoint of the batch, {endpoint}."
        wrong = _error("mismatched_url", message, number, "url")
    elif not isinstance(body, dict):
        wrong = _error("invalid_body", "body: must be an object.", number, "body")
    else:
        model = body.get("model")
        named = model[:MAX_ID_CHARACTERS] if isinstance(model, str) else None
        return Line(start, len(text), custom_id, prefix_key(body)), named
    errors.append(wrong)
    return None


def _error(code: str, message: str, line: int, param: str | None = None) -> LineError:
    return LineError(code=code, message=message, line=line, param=param)


class ResultLine(NamedTuple):
    """A line of results: whose it is, what it says, and where it ends in its file."""

    custom_id: str
    value: dict[str, Any]
    end: int


def read_results(path: Path) -> Iterator[ResultLine]:
    """The whole lines of results, up to the first that is not: a process has died as it wrote, or
    the machine before it was on the disk. Raises OSError.
    """
    end = 0
    with path.open("rb") as file:
        for text in file:
            end += len(text)
            try:
                value = jiter.from_json(text)
                custom_id = value["custom_id"]
            except (ValueError, KeyError, TypeError):
                return
            if not text.endswith(b"\n") or not isinstance(custom_id, str):
                return
            yield ResultLine(custom_id, value, end)


def add_usage(total: BatchUsage, result: Mapping[str, Any]) -> None:
    """Add the tokens of a line of results, of whatever dialect."""
    answer = result.get("response") or result.get("result") or {}
    body = answer.get("body") or answer.get("message") or {}
    usage = body.get("usage") or {}
    prompt = usage.get("prompt_tokens", usage.get("input_tokens", 0))
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    written = usage.get("completion_tokens_details") or usage.get("output_tokens_details") or {}
    total.input_tokens += prompt
    total.cached_tokens += details.get("cached_tokens", 0)
    total.output_tokens += usage.get("completion_tokens", usage.get("output_tokens", 0))
    total.reasoning_tokens += written.get("reasoning_tokens", 0)


def outcome_of(result: Mapping[str, Any]) -> str:
    """What came of the request of a line of results: `completed`, `failed`, or `unanswered`."""
    if (answer := result.get("result")) is not None:  # of Messages
        kinds = {"succeeded": "completed", "errored": "failed"}
        return kinds.get(answer.get("type"), "unanswered")
    if (answer := result.get("response")) is None:
        return "unanswered"
    return "completed" if answer.get("status_code") == 200 else "failed"
