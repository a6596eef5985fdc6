"""What pydantic writes for all of its built-in types, as input and as output.

The walk takes every type that this pydantic has: one that a new version brings is found here.
"""

import datetime as dt
import enum
import ipaddress
import json
import os
import re
import uuid
import zoneinfo
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Generator, Hashable, Iterator, Mapping, Sequence
from collections.abc import Set as AnySet
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePath
from types import EllipsisType, GenericAlias
from typing import Annotated, Any, Literal, NamedTuple

import jsonschema
import pydantic
import pytest
from llguidance import LLMatcher
from pydantic.json_schema import JsonSchemaMode
from typing_extensions import TypedDict

from engine.grammar.worker import GrammarError, compile_grammar
from tests.grammars import demo_tokenizer
from tests.schemas.corpora import exported_by_pydantic, of_pydantic
from tests.schemas.sampling import Sampler

END_TOKEN = 2
TOKENIZER = demo_tokenizer(END_TOKEN)
N_TEXTS = 6

MODES: tuple[JsonSchemaMode, ...] = ("validation", "serialization")


def grammar(schema: object) -> LLMatcher:
    """Raises GrammarError."""
    return compile_grammar(TOKENIZER, "json_schema", json.dumps(schema))


def allows(schema: object, text: str) -> bool:
    matcher, tokens = grammar(schema), TOKENIZER.tokenize_str(text)
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Size(enum.IntEnum):
    SMALL = 1
    LARGE = 2


class Point(NamedTuple):
    x: int
    y: str = "a"


class Movie(TypedDict, total=False):
    year: int


class Node(pydantic.BaseModel):
    a: int
    child: "Node | None" = None


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]
    n: int


class Dog(pydantic.BaseModel):
    kind: Literal["dog"]
    s: str


class Flexible(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow")
    a: int


class Numbers(pydantic.RootModel[list[int]]):
    pass


Pet = Annotated[Cat | Dog, pydantic.Field(discriminator="kind")]
SECOND = dt.datetime(2020, 2, 29, 1, 2, 3, tzinfo=dt.UTC)

VALUES: list[tuple[Any, Any]] = [
    *((int, 5), (float, 1.5), (str, "a"), (bool, True), (bytes, b"ab"), (None, None)),
    *((Any, [{"a": 1}]), (object, "a"), (list, [1]), (dict, {"a": 1}), (tuple, (1, "a"))),
    (Decimal, Decimal("1.50")),
    (Fraction, Fraction(1, 3)),
    (dt.date, dt.date(2020, 2, 29)),
    (dt.datetime, SECOND),
    (dt.time, dt.time(1, 2, 3, tzinfo=dt.UTC)),
    (dt.timedelta, dt.timedelta(days=1, seconds=5)),
    (uuid.UUID, uuid.UUID(int=5)),
    (pydantic.UUID4, uuid.UUID("12345678-1234-4234-8234-123456789012")),
    (Path, Path("/a")),
    (ipaddress.IPv4Address, ipaddress.ip_address("1.2.3.4")),
    (ipaddress.IPv6Address, ipaddress.ip_address("::1")),
    (ipaddress.IPv4Interface, ipaddress.ip_interface("1.2.3.4/24")),
    (ipaddress.IPv6Interface, ipaddress.ip_interface("2001:db8::1/64")),
    (ipaddress.IPv4Network, ipaddress.ip_network("10.32.0.0/11")),
    (ipaddress.IPv6Network, ipaddress.ip_network("2001:db8:a000::/35")),
    (pydantic.IPvAnyAddress, ipaddress.ip_address("1.2.3.4")),
    (pydantic.IPvAnyInterface, ipaddress.ip_interface("::/3")),
    (pydantic.IPvAnyNetwork, ipaddress.ip_network("10.0.0.0/8")),
    *((Color, Color.RED), (Size, Size.LARGE)),
    (Literal["a", 1], 1),
    *((list[int], [1]), (tuple[int, str], (1, "a")), (tuple[int, ...], (1, 2))),
    *((deque[int], deque([1])), (Sequence[int], [1])),
    *((dict[str, int], {"a": 1}), (dict[int, str], {1: "a"}), (Mapping[str, int], {"a": 1})),
    (dict[Literal["a", "b"], int], {"a": 1}),
    (dict[Color, int], {Color.RED: 1}),
    (dict[dt.date, int], {dt.date(2020, 2, 29): 1}),
    (dict[dt.timedelta, int], {dt.timedelta(days=1): 1}),
    (dict[uuid.UUID, int], {uuid.UUID(int=5): 1}),
    (dict[ipaddress.IPv4Address, int], {ipaddress.ip_address("1.2.3.4"): 1}),
    (dict[bytes, int], {b"a": 1}),
    (Counter[str], Counter("a")),
    *((int | None, None), (int | str, "a"), (Point, Point(1)), (Movie, Movie(year=1))),
    *((Node, Node(a=1, child=Node(a=2))), (Pet, Cat(kind="cat", n=1)), (Numbers, Numbers([1]))),
    (Flexible, Flexible.model_validate({"a": 1, "b": [2]})),
    *((pydantic.SecretStr, pydantic.SecretStr("x")), (pydantic.Base64Bytes, b"ab")),
    *((pydantic.SecretBytes, pydantic.SecretBytes(b"x")), (pydantic.Base64UrlStr, "ab?")),
    (pydantic.AnyUrl, pydantic.AnyUrl("http://a.b/c")),
    (pydantic.PostgresDsn, pydantic.PostgresDsn("postgres://u:p@a.b:5432,c.d:5433/x?y=z")),
    (pydantic.MongoDsn, pydantic.MongoDsn("mongodb://a.b,c.d/x")),
    *((pydantic.PositiveInt, 1), (pydantic.NegativeFloat, -1.0), (pydantic.ByteSize, 5)),
    *((pydantic.JsonValue, {"a": [1]}), (pydantic.Json[list[int]], [1])),
    (pydantic.AwareDatetime, SECOND),
    (Annotated[str, pydantic.StringConstraints(pattern="^a+$", max_length=3)], "aa"),
    (Annotated[list[int], pydantic.Field(min_length=1, max_length=3)], [1]),
    (Annotated[Decimal, pydantic.Field(max_digits=5, decimal_places=2)], Decimal("1.50")),
    (Annotated[int, pydantic.Field(gt=3, multiple_of=5)], 10),
    (Annotated[dict[str, int], pydantic.Field(min_length=1)], {"a": 1}),
]
"""Types that pydantic describes, and a value of each."""


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("type_", "value"), VALUES, ids=[str(type_) for type_, _ in VALUES])
def test_what_pydantic_writes_of_a_value_is_allowed_by_what_it_writes_of_its_type(
    type_: Any, value: object, mode: JsonSchemaMode
) -> None:
    adapter = pydantic.TypeAdapter[Any](type_)
    schema = adapter.json_schema(mode=mode)
    text = adapter.dump_json(value, round_trip=mode == "validation").decode()
    assert allows(schema, text), (text, schema)


def built_in() -> Iterator[tuple[str, Any]]:
    """All that pydantic exports, and the types of the standard library that it knows."""
    yield from exported_by_pydantic()
    standard: tuple[Any, ...] = (
        *(int, float, str, bool, bytes, bytearray, None, object, complex, Any, Hashable),
        *(list, dict, tuple, set, frozenset, AnySet[int], type[int], Literal["a"], Color, Size),
        *(dt.date, dt.datetime, dt.time, dt.timedelta, zoneinfo.ZoneInfo, uuid.UUID, Decimal),
        *(Fraction, Path, PurePath, os.PathLike[str], re.Pattern[str], deque, Counter, OrderedDict),
        *(
            defaultdict[str, int],
            Generator[int],
            Iterator[int],
            EllipsisType,
            Point,
            Movie,
            Pet,
            Numbers,
        ),
        *(ipaddress.IPv4Address, ipaddress.IPv4Interface, ipaddress.IPv4Network),
        *(ipaddress.IPv6Address, ipaddress.IPv6Interface, ipaddress.IPv6Network),
        *(
            GenericAlias(dict, (key, int))
            for key in (str, int, float, bool, bytes, Decimal, Color, dt.date)
        ),
        *(
            GenericAlias(dict, (key, int))
            for key in (dt.datetime, dt.time, dt.timedelta, uuid.UUID, Literal["a"])
        ),
    )
    for type_ in standard:
        yield str(type_), type_


def described() -> Iterator[Any]:
    seen = set[str]()
    for name, type_ in built_in():
        for mode in MODES:
            schema = of_pydantic(type_, mode)
            if schema is not None and f"{name}, {mode}" not in seen:
                seen.add(f"{name}, {mode}")
                yield pytest.param(
                    name, pydantic.TypeAdapter[Any](type_), schema, id=f"{name}, {mode}"
                )


REFUSED = {
    **dict.fromkeys((str(set), str(frozenset), str(AnySet[int])), "uniqueItems"),
    str(re.Pattern[str]): "Unknown format: regex",
    **dict.fromkeys(("constr", "StringConstraints"), "Unknown format: regex"),
    str(zoneinfo.ZoneInfo): "Unknown format: zoneinfo",
}
LOOSE = frozenset(
    {"FilePath", "DirectoryPath", "SocketPath", "ImportString", "Json", "PaymentCardNumber"}
    | {"ByteSize", "PastDate", "FutureDate", "PastDatetime", "FutureDatetime", "NaiveDatetime"}
    | {str(complex), str(Decimal), "OnErrorOmit", "NewPath", "Base64Str", "Base64UrlStr"}
    | {str(Hashable), str(type[int])}
    | {str(GenericAlias(dict, (key, int))) for key in (int, float, bool, Decimal)}
)
"""Types of which pydantic's schema allows what its validator does not. DSNs are some, too."""


@pytest.mark.parametrize(("name", "adapter", "schema"), list(described()))
def test_every_type_is_taken_or_refused_with_the_reason_and_what_is_allowed_is_of_the_type(
    name: str, adapter: pydantic.TypeAdapter[Any], schema: dict[str, Any]
) -> None:
    if name in REFUSED:
        with pytest.raises(GrammarError, match=REFUSED[name]):
            grammar(schema)
        return
    formats = jsonschema.Draft202012Validator.FORMAT_CHECKER
    validator = jsonschema.Draft202012Validator(schema, format_checker=formats)
    is_whole = name not in LOOSE and not name.endswith(("Dsn", "Url"))
    for text in Sampler(TOKENIZER, END_TOKEN, seed=7).texts(grammar(schema), N_TEXTS):
        validator.validate(json.loads(text))
        if is_whole:
            adapter.validate_json(text)


def test_most_of_pydantic_is_walked() -> None:
    assert len(list(described())) > 250
