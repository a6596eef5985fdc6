"""What every client is put through: a conversation, a question with a tool, an object to fill, and
an answer without an end. Standard library alone, because the clients' environments have nothing
else of ours.
"""

import json
from typing import TypedDict

GREETING, FAREWELL = "Who are you?", "Goodbye."
QUESTION = "What is the weather in Lisbon on Friday?"
CITY, DAY = "Lisbon", "Friday"
SKY, DEGREES = "sunny", 18
WEATHER = f'{{"sky": "{SKY}", "degrees": {DEGREES}}}'
SYSTEM = "Be brief."
ENDLESS = "Count until I stop you."
"""The scripted model begins to, and never comes to an end."""

REASONING = "Let me think."

SCRIPTED = "scripted"
UNKNOWN = "nonesuch"
MAX_TOKENS = 200

WEATHER_COMMAND = f'echo \'{{"sky": "{SKY}", "degrees": \'$(({DEGREES // 2} * 2))\'}}\''
"""What the scripted model runs where the tool is a shell. It prints WEATHER."""

FORECAST, UNKNOWN_FORECAST = f"It will be {SKY}, with {DEGREES} degrees.", "Nobody knows."
"""A file to edit, before and after, for clients that have their edits as text."""

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
            "scripted": SCRIPTED,
            "unknown": UNKNOWN,
            "maxTokens": MAX_TOKENS,
        }
    )
