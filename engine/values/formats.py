"""Formats of strings, as patterns that grammars can follow.

Each string that a pattern allows is of the format, as the standard that defines it says and as the
validators of common languages read it. Some patterns allow less than the format does: dates have no
leap seconds, names and addresses are ASCII.
"""

from collections.abc import Mapping
from typing import Any

_HEX = "[0-9a-fA-F]"
_MONTHS = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_DATE = f"(?:{_YEAR}-{_MONTHS}|{_LEAP_YEAR}-02-29)"
_LOCAL_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?"
_TIME = _LOCAL_TIME + "(?:[Zz]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"

_N = "[0-9]{1,6}"  # more overflow the durations of most languages
_CLOCK = f"T(?:{_N}H(?:{_N}M(?:{_N}S)?)?|{_N}M(?:{_N}S)?|{_N}S)"
_CALENDAR = f"(?:{_N}Y(?:{_N}M(?:{_N}D)?)?|{_N}M(?:{_N}D)?|{_N}D)"
_DURATION = f"P(?:{_CALENDAR}(?:{_CLOCK})?|{_CLOCK}|{_N}W)"

_LABEL = (
    "[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,2}[a-zA-Z0-9]"
    "|[a-zA-Z0-9-](?:[a-zA-Z0-9][a-zA-Z0-9-]|-[a-zA-Z0-9])[a-zA-Z0-9-]{0,58}[a-zA-Z0-9])?"
)

_ATOM = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]"
_MAILBOX = f"(?:{_ATOM}{{1,64}}|{_ATOM}(?:{_ATOM}|[.]{_ATOM}){{0,31}})"  # at most 64 characters

_UUID_END = f"{_HEX}{{3}}-[89abAB]{_HEX}{{3}}-{_HEX}{{12}}"

_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_OCTET}(?:\.{_OCTET}){{3}}"
_IPV4_PREFIX = "/(?:3[0-2]|[12]?[0-9])"
_GROUP = f"{_HEX}{{1,4}}"
_IPV6 = "(?:{})".format(
    "|".join(
        [
            f"(?:{_GROUP}:){{7}}{_GROUP}",
            f"(?:{_GROUP}:){{1,7}}:",
            *(f"(?:{_GROUP}:){{1,{7 - n}}}(?::{_GROUP}){{1,{n}}}" for n in range(1, 7)),
            f":(?::{_GROUP}){{1,7}}",
            "::",
        ]
    )
)
_IPV6_PREFIX = "/(?:12[0-8]|1[01][0-9]|[1-9]?[0-9])"


def _numbers(numbers: range) -> str:
    """In decimal, those with the same last digits together."""
    last_digits = dict[str, str]()
    for number in numbers:
        first = str(number)[:-1]
        last_digits[first] = last_digits.get(first, "") + str(number)[-1]
    kinds = dict[str, list[str]]()
    for first, last in last_digits.items():
        kinds.setdefault(last, []).append(first)
    return "|".join(f"(?:{'|'.join(firsts)})[{last}]" for last, firsts in kinds.items())


def _ipv4_network() -> str:
    """An address whose bits after the prefix are zero."""
    kinds = [rf"{_IPV4}(?:/32)?"]
    for n_octets in range(4):
        ends = [
            f"(?:{_numbers(range(0, 256, 2 ** (8 - n_bits)))})"
            f"{'[.]0' * (3 - n_octets)}/{8 * n_octets + n_bits}"
            for n_bits in range(8)
        ]
        kinds.append(f"(?:{_OCTET}[.]){{{n_octets}}}(?:{'|'.join(ends)})")
    return "|".join(kinds)


def _ipv6_group(n_bits: int) -> str:
    """A group of which all bits after the first n_bits are zero."""
    n_digits, rest = divmod(n_bits, 4)
    digit = f"[{'0123456789abcdef'[:: 2 ** (4 - rest)]}]"
    return f"{_HEX}{{0,{n_digits}}}{digit}{'0' * (3 - n_digits)}"


def _ipv6_networks() -> list[str]:
    """Those of eight groups; those that end with `::` after as many as the prefix needs."""
    last = "|".join(f"{_ipv6_group(n_bits)}/{112 + n_bits}" for n_bits in range(1, 16))
    last_but_one = "|".join(f"{_ipv6_group(n_bits)}:0/{96 + n_bits}" for n_bits in range(1, 16))
    last = f"{_GROUP}:(?:{last}|0/(?:{_numbers(range(112, 129))}))"
    long = f"{_IPV6}(?:/128)?|(?:{_GROUP}:){{6}}(?:{last}|{last_but_one})"
    short = [f"::{_IPV6_PREFIX}"]
    for n_groups in range(1, 8):
        ends = [f"{_GROUP}::/(?:{_numbers(range(16 * n_groups, 129))})"]
        first = 16 * (n_groups - 1)
        ends += [f"{_ipv6_group(n_bits)}::/{first + n_bits}" for n_bits in range(1, 16)]
        short.append(f"(?:{_GROUP}:){{{n_groups - 1}}}(?:{'|'.join(ends)})")
    return [long, "|".join(short)]


_ESCAPED = f"%{_HEX}{{2}}"
_NAME = rf"(?:[A-Za-z0-9._~!$&'()*+,;=-]|{_ESCAPED})"
_PCHAR = rf"(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|{_ESCAPED})"
_SCHEME = "[a-zA-Z][a-zA-Z0-9+.-]*"
_PORT = ":(?:[1-5][0-9]{4}|[0-9]{1,4})"
_HOST = f"(?:{_LABEL}(?:[.]{_LABEL})*)(?:{_PORT})?"
_USER = f"(?:(?:{_NAME}|:)+@)?"
_QUERY = rf"(?:\?(?:{_PCHAR}|[/?])*)?(?:#(?:{_PCHAR}|[/?])*)?"
_PATHS = f"(?:/{_PCHAR}*)*"
_ROOTED = f"/(?:{_PCHAR}+{_PATHS})?"
_URI_REFERENCE = (
    f"(?:(?:{_SCHEME}:)?(?://{_USER}{_HOST}{_PATHS}|{_ROOTED})"
    f"|{_SCHEME}:{_PCHAR}+{_PATHS}|(?:{_NAME}|@)+{_PATHS})?{_QUERY}"
)
_VARIABLE = "[A-Za-z0-9_]+(?:[.][A-Za-z0-9_]+)*(?::[1-9][0-9]{0,3}|[*])?"
_TEMPLATE = (
    rf"(?:[A-Za-z0-9._~:/?#@!$&()*+,;=-]|{_ESCAPED}"
    rf"|\{{[+#./;?&]?{_VARIABLE}(?:,{_VARIABLE})*\}})*"
)
_POINTER = r"(?:/(?:[ -.0-}¡-퟿]|~[01])*)*"
_FRAGMENT_POINTER = rf"#(?:/(?:[A-Za-z0-9._!$&'()*+,;=:@?-]|{_ESCAPED}|~[01])*)*"

_COLORS = (
    "aqua|black|blue|fuchsia|gray|green|lime|maroon|navy|olive|orange|purple|red|silver|teal|white"
    "|yellow"
)

_PATTERNS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}[Tt]{_TIME}",
    "duration": _DURATION,
    "uuid": f"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}",
    **{
        f"uuid{version}": f"{_HEX}{{8}}-{_HEX}{{4}}-{version}{_UUID_END}" for version in range(1, 9)
    },
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "ipv4interface": f"{_IPV4}(?:{_IPV4_PREFIX})?",
    "ipv6interface": f"{_IPV6}(?:{_IPV6_PREFIX})?",
    "ipv4network": _ipv4_network(),
    "ipvanyaddress": f"(?:{_IPV4}|{_IPV6})",
    "ipvanyinterface": f"(?:{_IPV4}(?:{_IPV4_PREFIX})?|{_IPV6}(?:{_IPV6_PREFIX})?)",
    "base64": "(?:{0}{{4}})*(?:{0}{{2}}==|{0}{{3}}=)?".format("[A-Za-z0-9+/]"),
    "base64url": "(?:{0}{{4}})*(?:{0}{{2}}==|{0}{{3}}=)?".format("[A-Za-z0-9_-]"),
    "hex": f"(?:{_HEX}{{2}})*",
    "color": f"(?:#{_HEX}{{3}}|#{_HEX}{{6}}|{_COLORS})",
    "fraction": "-?[0-9]+(?:/0*[1-9][0-9]*)?",
    "decimal": r"-?[0-9]+(?:\.[0-9]+)?",
    "char": r"[ !#-\[\]-~¡-퟿]",
    "int32": "-?(?:0|[1-9][0-9]{0,8})",
    "uint32": "(?:0|[1-9][0-9]{0,8})",
    "int64": "-?(?:0|[1-9][0-9]{0,17})",
    "uint64": "(?:0|[1-9][0-9]{0,18})",
    "multi-host-uri": f"{_SCHEME}://{_USER}{_HOST}(?:,{_HOST})*{_PATHS}{_QUERY}",
    "uri-reference": _URI_REFERENCE,
    "uri-template": _TEMPLATE,
    "json-pointer": _POINTER,
    "relative-json-pointer": f"(?:0|[1-9][0-9]*)(?:#|{_POINTER})",
    "json-pointer-uri-fragment": _FRAGMENT_POINTER,
    "date-time-local": f"{_DATE}T{_LOCAL_TIME}",
    "time-local": _LOCAL_TIME,
}
_ALONE = {name: {"pattern": f"^(?:{pattern})$"} for name, pattern in _PATTERNS.items()}
_IPV6_NETWORKS = [{"pattern": f"^(?:{pattern})$"} for pattern in _ipv6_networks()]

FORMATS: Mapping[str, Mapping[str, Any]] = {
    **_ALONE,
    "ipv6network": {"anyOf": _IPV6_NETWORKS},
    "ipvanynetwork": {"anyOf": [_ALONE["ipv4network"], *_IPV6_NETWORKS]},
    "hostname": {"pattern": rf"^{_LABEL}(?:\.{_LABEL})*$", "maxLength": 253},
    "email": {"pattern": rf"^{_MAILBOX}@(?:{_LABEL}\.)+[a-zA-Z]{{2,63}}$", "maxLength": 254},
}
"""Schemas of the formats that have a pattern here."""

OTHER_NAMES: Mapping[str, str] = {
    "guid": "uuid",
    "byte": "base64",
    "url": "uri",
    "iri": "uri",
    "iri-reference": "uri-reference",
    "idn-email": "email",
    "idn-hostname": "hostname",
    "iso-date-time": "date-time",
    "iso-time": "time",
    "local-date-time": "date-time-local",
    "local-time": "time-local",
}
"""Formats that another one stands for; it is the same, or allows some of the same strings."""

KNOWN_TO_GRAMMARS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)
"""Formats that llguidance reads itself."""

FREE = frozenset(
    {"password", "binary", "path", "file-path", "directory-path", "json-string"}
    | {"textarea", "multiline", "html", "markdown", "commonmark"}
)
"""Formats that are for people, or say how a program stores the text."""
