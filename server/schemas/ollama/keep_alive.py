"""How long a model is to stay loaded, as Ollama's clients say it."""

import math
import re
from datetime import timedelta
from typing import Annotated

from pydantic import PlainValidator
from pydantic_core import PydanticCustomError

UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}

_PART = r"(\d+(?:\.\d+)?)(h|ms|m|us|µs|ns|s)"
_DURATION = re.compile(rf"(-?)((?:{_PART})+)")
_NUMBER = re.compile(r"-?\d+(\.\d+)?")
_MOST_SECONDS = timedelta.max.total_seconds()


def _seconds(value: object) -> float:
    """A number of seconds, or a duration as Go writes it; what is negative has no end."""
    if isinstance(value, str):
        value = _read(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        message = "must be a number of seconds or a duration such as '5m' or '1h30m', or -1"
        raise PydanticCustomError("keep_alive", message)
    return math.inf if value < 0 or value >= _MOST_SECONDS else float(value)


def _read(text: str) -> float | None:
    if len(text) > 64:
        return None
    if _NUMBER.fullmatch(text):
        return float(text)
    if not (found := _DURATION.fullmatch(text)):
        return None
    seconds = sum(float(number) * UNITS[unit] for number, unit in re.findall(_PART, found[2]))
    return -seconds if found[1] else seconds


KeepAlive = Annotated[
    float,
    PlainValidator(_seconds, json_schema_input_type=float | str),
]
"""Seconds; infinite where the model is to stay."""
