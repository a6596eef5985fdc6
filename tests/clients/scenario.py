"""What every client is put through: a conversation, a question with a tool, an object to fill, and
an answer without an end. Standard library alone, because the clients' environments have nothing
else of ours.
"""

import base64
import json
import struct
import zlib
from collections.abc import Callable
from typing import TypedDict

GREETING, FAREWELL = "Who are you?", "Goodbye."
QUESTION = "What is the weather in Lisbon on Friday?"
CITY, DAY = "Lisbon", "Friday"
SKY, DEGREES = "sunny", 18
WEATHER = f'{{"sky": "{SKY}", "degrees": {DEGREES}}}'
SYSTEM = "Be brief."
ENDLESS = "Count until I stop you."
"""The scripted model begins to, and never comes to an end."""

PICTURE_QUESTION = "How large is this picture?"
PICTURE_SIZE = (12, 8)
PICTURE_ANSWER = f"It has {PICTURE_SIZE[0]} x {PICTURE_SIZE[1]} pixels."
READ_PICTURE = "Read the picture {path} and say how large it is."
"""What is asked of an agent with a tool that reads files."""

REASONING = "Let me think."

SEARCH, DEFERRED = "Stop the task 1 with a tool that you have to fetch.", "TaskStop"
"""What is asked of a client that defers tools, and the one that it must fetch for it."""

SCRIPTED = "scripted"
ALIAS = "gpt-5.6-sol"
"""The scripted model by a name for which Codex has tools of its own."""

UNKNOWN = "nonesuch"
MAX_TOKENS = 200

WEATHER_COMMAND = f'echo \'{{"sky": "{SKY}", "degrees": \'$(({DEGREES // 2} * 2))\'}}\''
"""What the scripted model runs where the tool is a shell. It prints WEATHER."""

FORECAST, UNKNOWN_FORECAST = f"It will be {SKY}, with {DEGREES} degrees.", "Nobody knows."
"""A file to edit, before and after, for clients that have their edits as text."""

LIBRARY = {
    "Where does the cat sleep?": "The cat sleeps on the warm mat by the door.",
    "What did the ship carry across the sea?": "The ship carried salt and grain across the sea.",
    "When does the train to the city leave?": "The train to the city leaves at nine.",
    "Who baked the bread?": "The baker bakes bread before the sun comes up.",
    "How cold was the winter in the mountains?": "The winter in the mountains was full of snow.",
    "Which tree grows in the garden?": "An old apple tree grows in the garden behind the house.",
}
"""Texts for a small index, each with the question that it answers."""


def found_in(search: Callable[[str], str]) -> str:
    """What an index over the library finds first. A text's own words must find it; a question is
    for the model to understand, so that is counted and no more.
    """
    for text in LIBRARY.values():
        assert (first := search(text)) == text, f"{text!r} finds {first!r}"
    right = sum(search(question) == text for question, text in LIBRARY.items())
    return f"{len(LIBRARY)} by their own words, {right} of {len(LIBRARY)} by a question"


WEATHER_TOOL = {
    "name": "get_weather",
    "description": "Get the weather.",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "The city."},
            "day": {"type": "string", "description": "The day."},
        },
        "required": ["city", "day"],
        "additionalProperties": False,
    },
}
"""As JSON Schema, for clients that make none of a function."""


class Asked(TypedDict):
    """The arguments of one call."""

    city: str
    day: str


class WeatherStation:
    """The tool, and what it was asked."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []

    def get_weather(self, city: str, day: str) -> str:
        """Get the weather.

        Args:
            city: The city.
            day: The day.
        """
        self.asked.append({"city": city, "day": day})
        return WEATHER

    def check(self, answer: str) -> str:
        """It was asked once, as declared, and the answer knows what it said."""
        assert self.asked == [{"city": CITY, "day": DAY}], self.asked
        return knows_the_weather(answer)


def knows_the_weather(answer: str) -> str:
    """The answer, which must have what the tool said."""
    assert SKY in answer, answer
    assert str(DEGREES) in answer, answer
    return answer


def picture() -> bytes:
    """A PNG file of one colour."""
    width, height = PICTURE_SIZE
    row = b"\0" + bytes((200, 30, 30)) * width
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        (
            _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
            _chunk(b"IDAT", zlib.compress(row * height)),
            _chunk(b"IEND", b""),
        )
    )


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def picture_base64() -> str:
    return base64.b64encode(picture()).decode()


def picture_url() -> str:
    return f"data:image/png;base64,{picture_base64()}"


def saw_the_picture(answer: str) -> str:
    """The answer, which must have the size of the picture."""
    assert PICTURE_ANSWER in answer, answer
    return answer


def as_json() -> str:
    """All of it, for scripts in another language."""
    return json.dumps(
        {
            "greeting": GREETING,
            "farewell": FAREWELL,
            "question": QUESTION,
            "asked": {"city": CITY, "day": DAY},
            "sky": SKY,
            "degrees": DEGREES,
            "weather": WEATHER,
            "tool": WEATHER_TOOL,
            "endless": ENDLESS,
            "picture": picture_base64(),
            "pictureQuestion": PICTURE_QUESTION,
            "pictureAnswer": PICTURE_ANSWER,
            "scripted": SCRIPTED,
            "unknown": UNKNOWN,
            "maxTokens": MAX_TOKENS,
        }
    )
