"""Formats of strings: what grammars allow is of the format, as independent readers read it."""

import base64
import ipaddress
import json
import random
import re
import uuid
from collections.abc import Callable
from datetime import datetime, time
from decimal import Decimal
from fractions import Fraction

import jsonschema_rs
import pytest
from llguidance import LLMatcher
from pydantic_core import MultiHostUrl

from engine.grammar.worker import GrammarError, compile_grammar
from engine.values.formats import FORMATS, FREE, KNOWN_TO_GRAMMARS, OTHER_NAMES
from tests.grammars import demo_tokenizer
from tests.schemas.sampling import Sampler

END_TOKEN = 2
TOKENIZER = demo_tokenizer(END_TOKEN)
N_TEXTS = 40
N_NETWORKS = 100


def grammar(schema: object) -> LLMatcher:
    """Raises GrammarError."""
    return compile_grammar(TOKENIZER, "json_schema", json.dumps(schema))


def of_format(name: str) -> LLMatcher:
    return grammar({"type": "string", "format": name})


def allows(matcher: LLMatcher, value: str) -> bool:
    copy, tokens = (
        matcher.deep_copy(),
        TOKENIZER.tokenize_str(json.dumps(value, ensure_ascii=False)),
    )
    return bool(copy.try_consume_tokens(tokens) == len(tokens) and copy.is_accepting())


def standard(name: str) -> Callable[[str], object]:
    """A format of JSON Schema, as another implementation reads it."""
    validator = jsonschema_rs.Draft202012Validator({"format": name}, validate_formats=True)
    assert not validator.is_valid("\n")
    return validator.validate


def matching(pattern: str) -> Callable[[str], object]:
    return lambda value: re.fullmatch(pattern, value) or pytest.fail(value)


def bounded(bits: int, *, signed: bool) -> Callable[[str], object]:
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1)) if signed else (0, 2**bits)
    return lambda value: low <= int(value) < high or pytest.fail(value)


def versioned(version: int) -> Callable[[str], object]:
    def read(value: str) -> None:
        assert uuid.UUID(value).version == version

    return read


READERS: dict[str, Callable[[str], object]] = {
    **{
        name: standard(name)
        for name in (
            *("date", "time", "date-time", "duration", "email", "hostname", "idn-email", "uuid"),
            *("idn-hostname", "ipv4", "ipv6", "uri", "uri-reference", "iri", "iri-reference"),
            *("json-pointer", "relative-json-pointer", "uri-template"),
        )
    },
    "guid": standard("uuid"),
    "url": standard("uri"),
    "iso-date-time": standard("date-time"),
    "iso-time": standard("time"),
    "ipv4interface": ipaddress.IPv4Interface,
    "ipv6interface": ipaddress.IPv6Interface,
    "ipv4network": ipaddress.IPv4Network,
    "ipv6network": ipaddress.IPv6Network,
    "ipvanyaddress": ipaddress.ip_address,
    "ipvanyinterface": ipaddress.ip_interface,
    "ipvanynetwork": ipaddress.ip_network,
    "base64": lambda value: base64.b64decode(value, validate=True),
    "byte": lambda value: base64.b64decode(value, validate=True),
    "base64url": lambda value: base64.b64decode(value, b"-_", validate=True),
    "hex": bytes.fromhex,
    "color": matching("#[0-9a-fA-F]{3}|#[0-9a-fA-F]{6}|[a-z]{3,7}"),
    "fraction": Fraction,
    "decimal": Decimal,
    "char": matching("."),
    **{f"int{bits}": bounded(bits, signed=True) for bits in (32, 64)},
    **{f"uint{bits}": bounded(bits, signed=False) for bits in (32, 64)},
    "multi-host-uri": MultiHostUrl,
    "json-pointer-uri-fragment": matching("#(/.*)?"),
    **dict.fromkeys(("date-time-local", "local-date-time"), datetime.fromisoformat),
    **dict.fromkeys(("time-local", "local-time"), time.fromisoformat),
    **{f"uuid{version}": versioned(version) for version in range(1, 9)},
}


@pytest.mark.parametrize("name", sorted({*FORMATS, *KNOWN_TO_GRAMMARS, *OTHER_NAMES}))
def test_what_a_format_allows_is_of_the_format(name: str) -> None:
    texts = list(Sampler(TOKENIZER, END_TOKEN, seed=3).texts(of_format(name), N_TEXTS))
    assert texts
    for text in texts:
        READERS[name](json.loads(text))


@pytest.mark.parametrize(
    ("name", "allowed", "forbidden"),
    [
        ("base64", ["", "YQ==", "YWI="], ["YQ", "YQ=", "Y!=="]),
        ("base64url", ["", "_-==", "_-_-"], ["YQ", "+/=="]),
        ("byte", ["YWI="], ["YWI"]),
        ("char", ["a", "é"], ["", "ab"]),
        ("color", ["#fff", "#00FF00", "red"], ["#ffff", "reddish", ""]),
        ("date", ["2024-02-29"], ["2023-02-29", "2024-2-29"]),
        ("date-time-local", ["2024-02-29T01:02:03"], ["2024-02-29T01:02:03Z"]),
        ("decimal", ["-1.50", "7"], ["1e5", ".5", "1."]),
        ("duration", ["P1DT2H", "P3W", "PT5S"], ["P", "PT", "P1DT", "P1234567D"]),
        ("email", ["a.b@example.org"], ["a@b", ".a@example.org", "a..b@example.org"]),
        ("email", [f"{'a' * 64}@x.org"], [f"{'a' * 65}@x.org", f"a@{'b' * 64}.org"]),
        ("fraction", ["1/3", "-2"], ["1/0", "1/", "/3"]),
        ("hex", ["", "0aF1"], ["0", "0g"]),
        ("idn-email", ["a@example.org"], ["a"]),
        ("int64", ["-5", "0"], ["05", "1.0", "9" * 19]),
        ("ipv4network", ["10.0.0.0/8", "1.2.3.4"], ["10.0.0.1/8", "10.0.0.0/33"]),
        ("ipv6network", ["2001:db8::/32", "::/0"], ["2001:db8::1/32", "2001:db8::/31x"]),
        ("ipv6interface", ["2001:db8::1/64", "::1"], ["2001:db8::1/129", "1::2::3"]),
        ("ipvanyaddress", ["1.2.3.4", "::1"], ["1.2.3", "1.2.3.4/5"]),
        ("json-pointer", ["", "/a/0/~0~1", "/Größe"], ["a", "/~", "/~2"]),
        ("relative-json-pointer", ["0", "1/a", "2#"], ["01", "/a", "-1"]),
        ("multi-host-uri", ["mongodb://u:p@a:1,b:2/c?d=e"], ["a", "mongodb://"]),
        ("uri-reference", ["../a?b#c", "", "//h/p", "http://a.b/c"], ["a b", "1:2", "%zz"]),
        ("uri-template", ["/a/{b}{?c*,d:3}", ""], ["{", "{}", "{a b}"]),
        ("url", ["http://a.b/c"], ["a"]),
    ],
)
def test_what_is_no_format_is_not_allowed(
    name: str, allowed: list[str], forbidden: list[str]
) -> None:
    matcher = of_format(name)
    assert [value for value in allowed if not allows(matcher, value)] == []
    assert [value for value in forbidden if allows(matcher, value)] == []


@pytest.mark.parametrize(("version", "bits"), [(4, 32), (6, 128)])
def test_a_network_has_no_bits_after_its_prefix(version: int, bits: int) -> None:
    """One that ends with other than zeros in its text is written in another way."""
    draw = random.Random(version)
    one, every = of_format(f"ipv{version}network"), of_format("ipvanynetwork")
    for _ in range(N_NETWORKS):
        length = draw.randrange(1, bits + 1)
        address = draw.getrandbits(bits) | 1 << bits - length
        make = ipaddress.IPv4Interface if version == 4 else ipaddress.IPv6Interface
        within = make((address, length))
        is_network = within.ip == within.network.network_address
        assert allows(one, str(within)) is allows(every, str(within)) is is_network
        network = str(within.network)
        assert allows(one, network), network
        assert allows(every, network), network


def test_a_generators_own_format_is_the_pattern_next_to_it() -> None:
    for own in ("cuid2", "x-of-mine", "base64url"):
        matcher = grammar({"type": "string", "format": own, "pattern": "^[a-c]{3}$"})
        assert allows(matcher, "abc")
        assert not allows(matcher, "abcd")
    with pytest.raises(GrammarError, match="Unknown format: x-of-mine"):
        of_format("x-of-mine")


@pytest.mark.parametrize("name", ["date", "ipv4network", "color", "byte", "decimal"])
def test_a_format_holds_next_to_a_pattern(name: str) -> None:
    matcher = grammar({"type": "string", "format": name, "pattern": "^[^1-9]"})
    for text in Sampler(TOKENIZER, END_TOKEN, seed=5).texts(matcher, 5):
        READERS[name](json.loads(text))
        assert json.loads(text)[0] not in "123456789"
    assert not allows(matcher, "ab c")


def test_bytes_that_a_schema_says_are_base64_are() -> None:
    """As Go and zod write them."""
    for encoding in ("base64", "base64url"):
        matcher = grammar({"type": ["string", "null"], "contentEncoding": encoding})
        assert allows(matcher, "YWI=")
        assert not allows(matcher, "YWI")
    assert allows(grammar({"type": "string", "contentEncoding": "quoted-printable"}), "x y")


@pytest.mark.parametrize("name", sorted(FREE))
def test_a_format_of_programs_and_forms_asks_for_nothing(name: str) -> None:
    assert allows(of_format(name), "any text, at all")


@pytest.mark.parametrize("name", ["date", "uuid", "ipv4", "duration", "ipv4network", "byte"])
def test_the_names_of_members_are_of_a_format(name: str) -> None:
    names = {"type": "string", "format": name}
    matcher = grammar({"type": "object", "propertyNames": names, "minProperties": 1})
    for text in Sampler(TOKENIZER, END_TOKEN, seed=5).texts(matcher, 5):
        for member in json.loads(text):
            READERS[name](member)
