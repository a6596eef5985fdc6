"""What every client is put through: a question, a tool, and an object to fill. Standard library
alone, because the clients' environments have nothing else of ours."""

from typing import TypedDict

QUESTION = "What is the weather in Lisbon on Friday?"
CITY, DAY = "Lisbon", "Friday"
SKY, DEGREES = "sunny", 18
WEATHER = f'{{"sky": "{SKY}", "degrees": {DEGREES}}}'
SYSTEM = "Be brief."

REASONING = "Let me think."

SCRIPTED = "scripted"
MAX_TOKENS = 200


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
        assert SKY in answer, answer
        assert str(DEGREES) in answer, answer
        return answer
