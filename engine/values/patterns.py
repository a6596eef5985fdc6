"""Patterns of generators that look around, and their equals that do not.

Grammars are automata, which have no look-arounds. These equals were compared with the originals on
random texts; `tests/unit/grammar/test_generated_schemas.py` does it again.
"""

import re

_TIME = r"T(?:\d+H(?:\d+M)?(?:\d+(?:[.,]\d+)?S)?|\d+M(?:\d+(?:[.,]\d+)?S)?|\d+(?:[.,]\d+)?S)"
_DAYS = r"(?:\d+Y(?:\d+M)?(?:\d+D)?|\d+M(?:\d+D)?|\d+D)"

_EMOJI = r"[\p{Extended_Pictographic}\p{Emoji_Component}]"

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
    # zod's iban()
    r"^[A-Z]{2}(?!00|01|99)\d{2}[A-Z0-9]{11,30}$": (
        r"^[A-Z]{2}(?:0[2-9]|[1-8]\d|9[0-8])[A-Z0-9]{11,30}$"
    ),
    # zod's emoji()
    r"^(?=[\s\S]*[\p{Extended_Pictographic}\p{Regional_Indicator}\u20E3])"
    r"[\p{Extended_Pictographic}\p{Emoji_Component}]+$": (
        rf"^{_EMOJI}*[\p{{Extended_Pictographic}}\p{{Regional_Indicator}}\u20E3]{_EMOJI}*$"
    ),
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


_AT_MOST = re.compile(r"\^\(\?=\.\{1,([0-9]{1,4})\}(?:\\\.\?)?\$\)")
"""The look-ahead at the length in zod's hostname()."""


def without_length_ahead(pattern: str) -> tuple[str, int] | None:
    """The pattern without a look-ahead at its length, and that length; None without any. Together
    they may allow one character less: a dot at the end.
    """
    found = _AT_MOST.match(pattern)
    return None if found is None else (f"^{pattern[found.end() :]}", int(found[1]))


_GROUPS = re.escape("-[0-9a-fA-F]{4}")
_UUID = re.compile(
    rf"\^\({re.escape('[0-9a-fA-F]{8}')}{_GROUPS}-(?:{re.escape('[0-9a-fA-F]{4}')}"
    rf"|(?:[1-8]|\[1-8\]){re.escape('[0-9a-fA-F]{3}')})"
    rf"-(?:{re.escape('[0-9a-fA-F]{4}')}|{re.escape('[89abAB][0-9a-fA-F]{3}')})"
    rf"{re.escape('-[0-9a-fA-F]{12}')}(?:\|[0f]{{8}}(?:-[0f]{{4}}){{3}}-[0f]{{12}})*\)\$"
)
_DATE = (
    r"^(?:(?:\d\d[2468][048]|\d\d[13579][26]|\d\d0[48]|[02468][048]00|[13579][26]00)-02-29|\d{4}-"
    r"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|(?:02)-"
    r"(?:0[1-9]|1\d|2[0-8])))$"
)


def implies(pattern: str, format: str) -> bool:
    """Whether all that a pattern of zod allows is of a format."""
    return bool(format == "uuid" and _UUID.fullmatch(pattern)) or (
        format == "date" and pattern == _DATE
    )
