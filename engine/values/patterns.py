"""Patterns of generators that look around, and their equals that do not.

Grammars are automata, which have no look-arounds. These equals were compared with the originals on
random texts; `tests/unit/grammar/test_generated_schemas.py` does it again.
"""

import re

_TIME = r"T(?:\d+H(?:\d+M)?(?:\d+(?:[.,]\d+)?S)?|\d+M(?:\d+(?:[.,]\d+)?S)?|\d+(?:[.,]\d+)?S)"
_DAYS = r"(?:\d+Y(?:\d+M)?(?:\d+D)?|\d+M(?:\d+D)?|\d+D)"

_EQUALS = {
    # zod's email(), and that of zod-to-json-schema
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]"
    r"@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$": (
        r"^(?:[A-Za-z0-9_'+-]+\.)*[A-Za-z0-9_'+-]*[A-Za-z0-9_+-]"
        r"@(?:[A-Za-z0-9][A-Za-z0-9-]*\.)+[A-Za-z]{2,}$"
    ),
    # zod's duration()
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?"
    r"(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$": (rf"^P(?:\d+W|{_DAYS}(?:{_TIME})?|{_TIME})$"),
    # pydantic's Decimal
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": r"^[+-]?(?:\d+\.?\d*|\.\d+)$",
}
_DECIMAL_PLACES = re.compile(
    re.escape(r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d{0,") + r"(\d{1,3})" + re.escape(r"}0*$")
)
"""pydantic's Decimal with `decimal_places`."""


def without_look_arounds(pattern: str) -> str | None:
    """An equal pattern without look-arounds; None where none is known, or it has none."""
    if "(?" not in pattern:
        return None
    if (equal := _EQUALS.get(pattern)) is not None:
        return equal
    if found := _DECIMAL_PLACES.fullmatch(pattern):
        places = int(found[1])
        fraction = rf"(?:\d{{1,{places}}}0*|0+)" if places else "0+"
        return rf"^[+-]?(?:\d+(?:\.\d{{0,{places}}}0*)?|\.{fraction})$"
    return None
