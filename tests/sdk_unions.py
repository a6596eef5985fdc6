"""The least instance of each kind in the unions of OpenAI's and Anthropic's Python libraries.

These are the kinds that a client may keep in a history, whatever version is installed.
"""

import types
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, NotRequired, Required, Union, get_args, get_origin

from typing_extensions import get_type_hints, is_typeddict

PLAIN: Mapping[object, object] = {str: "one", int: 1, float: 1.0, bool: True, object: {}, Any: {}}


def instances(union: object) -> Iterator[dict[str, Any]]:
    """One instance of each TypedDict in the union."""
    for each in get_args(union):
        if is_typeddict(each):
            yield _least(each)


def _least(type: Any) -> Any:
    """The least value of a type: required fields alone, empty lists, the first of each choice."""
    if type in PLAIN:
        return PLAIN[type]
    if is_typeddict(type):
        return dict(_required(type))
    origin, arguments = get_origin(type), get_args(type)
    if origin in {Literal, Annotated, Required, Union, types.UnionType}:
        return arguments[0] if origin is Literal else _least(arguments[0])
    return {} if origin is dict else []


def _required(type: Any) -> Iterator[tuple[str, Any]]:
    """The fields that a value needs. A type whose annotations are texts does not know them."""
    for name, hint in get_type_hints(type, include_extras=True).items():
        kind: Any = get_origin(hint)
        is_left_out = kind is NotRequired or not type.__total__
        if kind is Required or not is_left_out:
            yield name, _least(hint)
