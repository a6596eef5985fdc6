"""JSON Schemas as grammars take them: one reading of references, no keyword that forbids nothing.

Generators write what grammars have no form for: definitions whose names are escaped, `null` for an
absent keyword, `propertyNames: {}`, formats that are annotations, patterns that look around.
`plain` rewrites all of them to equals. What it leaves as it is means what it did.
"""

import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, TypeAlias
from urllib.parse import unquote

from engine.values.dependencies import as_alternatives
from engine.values.formats import FORMATS, FREE, KNOWN_TO_GRAMMARS, OTHER_NAMES
from engine.values.negations import without_not
from engine.values.one_of import as_any_of
from engine.values.patterns import implies, without_length_ahead, without_look_arounds

Schema: TypeAlias = Mapping[str, Any]

MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose value has schemas by name."""
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
"""Keywords whose value is a list of schemas."""
SINGLE = (
    *("additionalProperties", "additionalItems", "unevaluatedProperties", "unevaluatedItems"),
    *("items", "contains", "not", "if", "then", "else", "propertyNames"),
)
"""Keywords whose value is a schema; that of `items` may be a list, too."""

_DEFINITIONS = ("$defs", "definitions")
_NAME = re.compile(r"[A-Za-z0-9_]{1,64}")
_NULL_IS_A_VALUE = frozenset({"const", "default", "example"})
_ANNOTATIONS = frozenset(
    {"title", "description", "$comment", "default", "examples", "example", "deprecated"}
    | {"readOnly", "writeOnly", "$schema"}
)
_ENCODINGS = frozenset({"base64", "base64url"})
_ONLY_WITH = {"minContains": "contains", "maxContains": "contains", "additionalItems": "items"}


class LeadsNowhere(ValueError):
    """A `$ref` that names no schema."""


def target(reference: str, root: Schema) -> Any:
    """The schema that a `$ref` names: a JSON pointer (RFC 6901) or an anchor in a URI's fragment.
    It may be a reference itself, true or false. Raises LeadsNowhere.

    A fragment is percent-encoded. Many generators do not do that, so names count as they stand
    where the decoded ones do not exist. A reference may also be a plain name, an `$id`.
    """
    if "#" not in reference and (named := _named(reference, root)) is not None:
        return named
    document, separator, fragment = reference.partition("#")
    if not separator or (document and document != str(root.get("$id", "")).rstrip("#")):
        raise LeadsNowhere(f"$ref {shown(reference)} is not supported: it must begin with #")
    for pointer in dict.fromkeys((unquote(fragment), fragment)):
        if pointer and not pointer.startswith("/"):
            found = _anchored(pointer, root)
        else:
            try:
                found = _at(pointer, root)
            except LookupError:
                continue
        if isinstance(found, Mapping | bool):
            return found
    raise LeadsNowhere(f"$ref {shown(reference)} leads nowhere")


MAX_NAMED = 256
"""Definitions among which a name is looked for, and schemas among which an anchor is."""


def _named(reference: str, root: Schema) -> Schema | None:
    """The whole schema, or one of its definitions, whose `$id` is a plain name, as TypeBox writes
    them.
    """
    if _NAME.fullmatch(reference) is None:
        return None
    if root.get("$id") == reference:
        return root
    for place in _DEFINITIONS:
        definitions = root.get(place)
        if isinstance(definitions, Mapping) and len(definitions) <= MAX_NAMED:
            for one in definitions.values():
                if isinstance(one, Mapping) and one.get("$id") == reference:
                    return one
    return None


def _anchored(name: str, root: Schema) -> Schema | None:
    """The one schema that has the name as its `$anchor` or `$dynamicAnchor`, or `#name` as its
    `$id`, as it was until 2019; None where none or several have, or it is looked for too long.
    """
    waiting, found, n_left = deque[Any]([root]), list[Schema](), MAX_NAMED
    while waiting:
        schema = waiting.popleft()
        if not isinstance(schema, Mapping):
            continue
        n_left -= 1
        if n_left < 0:
            return None
        if name in (schema.get("$anchor"), schema.get("$dynamicAnchor")) or (
            schema.get("$id") == f"#{name}"
        ):
            found.append(schema)
        if schema is root or not _is_document(schema):
            waiting += islice(parts(schema), n_left + 1)
    return found[0] if len(found) == 1 else None


def _is_document(schema: Schema) -> bool:
    """Whether a schema has an `$id` to which references in it are relative."""
    id = schema.get("$id")
    return isinstance(id, str) and not id.startswith("#")


MAX_SHOWN_CHARACTERS = 80
"""Of a client's own words in an error."""


def shown(reference: object) -> str:
    """A reference as an error quotes it: its beginning, if it is long."""
    text = repr(reference)
    return text if len(text) <= MAX_SHOWN_CHARACTERS else f"{text[:MAX_SHOWN_CHARACTERS]}..."


def _at(pointer: str, root: Schema) -> Any:
    """Raises LookupError."""
    schema: Any = root
    for segment in pointer.split("/")[1:]:
        name = segment.replace("~1", "/").replace("~0", "~")
        if isinstance(schema, list):
            if not (name.isascii() and name.isdecimal() and len(name) < 10):
                raise LookupError(name)
            schema = schema[int(name)]
        elif isinstance(schema, Mapping):
            schema = schema[name]
        else:
            raise LookupError(name)
    return schema


def parts(schema: Schema) -> Iterator[Any]:
    """The schemas directly within a schema."""
    for key in MAPS:
        if isinstance(members := schema.get(key), Mapping):
            yield from members.values()
    for key in (*LISTS, "items"):
        if isinstance(several := schema.get(key), list):
            yield from several
    for key in SINGLE:
        if isinstance(one := schema.get(key), Mapping | bool):
            yield one


def refuse(error: LeadsNowhere) -> None:
    """For `plain`: a reference that leads nowhere is an error."""
    raise error


def ignore(error: LeadsNowhere) -> None:
    """For `plain`: a reference that leads nowhere allows anything."""


def plain(
    schema: Schema, root: Schema, lead_nowhere: Callable[[LeadsNowhere], None]
) -> dict[str, Any]:
    """An equal schema that can be used alone, though its references lead into `root`.

    Its definitions are those that it needs, under names of letters and digits. `lead_nowhere` is
    called for each reference that leads nowhere, which is dropped. Raises RecursionError for one
    that is nested too deeply.
    """
    return _Writer(root, lead_nowhere).whole(schema)


class _Writer:
    def __init__(self, root: Schema, lead_nowhere: Callable[[LeadsNowhere], None]) -> None:
        self._root = root
        self._lead_nowhere = lead_nowhere
        self._names = {id(schema): f"format.{name}" for name, schema in FORMATS.items()}
        """Of definitions, by the identity of what they define. A pattern of a format is written
        once, however many strings are of it."""
        self._targets: dict[str, Any] = {}  # what references lead to
        self._needed = set[str]()  # names of definitions
        self._waiting: list[tuple[str, Schema]] = []  # definitions that are to be written
        self._whole: Schema = {}

    def whole(self, schema: Schema) -> dict[str, Any]:
        self._whole = schema
        self._name_targets()
        written = self._body(schema)
        definitions = dict[str, Any]()
        while self._waiting:
            name, of_name = self._waiting.pop()
            definitions[name] = self._body(of_name)
        return {**written, "$defs": definitions} if definitions else written

    def _name_targets(self) -> None:
        """Name all that references lead to, so that each is written once, wherever it stands."""
        seen, names, followed = set[int](), set[str](), set[tuple[str, int]]()
        waiting: list[tuple[Any, Schema]] = [(self._whole, self._root)]
        referred = deque[tuple[Any, Schema]]()  # after all that stands in the schema itself
        while waiting or referred:
            schema, document = waiting.pop() if waiting else referred.popleft()
            if not isinstance(schema, Mapping) or id(schema) in seen:
                continue
            seen.add(id(schema))
            document = schema if _is_document(schema) else document
            waiting += [(one, document) for one in parts(schema)]
            reference = schema.get("$ref")
            if not isinstance(reference, str) or (reference, id(document)) in followed:
                continue
            followed.add((reference, id(document)))
            try:
                found, of_document = self._target(reference, document)
            except LeadsNowhere as error:
                self._lead_nowhere(error)
                continue
            self._targets[reference] = found
            referred.append((found, of_document))
            if isinstance(found, Mapping) and id(found) not in self._names:
                last = reference.rpartition("/")[2]
                name = last if _NAME.fullmatch(last) else "definition"
                name = name if name not in names else f"{name}.{len(names)}"
                names.add(name)
                self._names[id(found)] = name

    def _target(self, reference: str, document: Schema) -> tuple[Any, Schema]:
        """What a reference leads to, and the schema whose `$id` it is relative to: the one around
        it, or else the whole, because many generators put a type's name into `$id` and mean no
        document of its own. Raises LeadsNowhere where it leads to different schemas in these, or
        somewhere else than an equal reference.
        """
        is_inner = document is not self._root and reference.startswith("#")
        found = list[tuple[Any, Schema]]()
        for one in (document, self._root) if is_inner else (self._root,):
            try:
                found.append((target(reference, one), one))
            except LeadsNowhere:
                if one is self._root and not found:
                    raise
        known = self._targets.get(reference, found[0][0])
        if any(one is not known for one, _ in found):
            raise LeadsNowhere(f"$ref {shown(reference)} has two meanings, by an $id around it")
        return found[-1]

    def _schema(self, schema: Any) -> Any:
        """A schema within another: a reference if others refer to it."""
        if id(schema) in self._names and isinstance(schema, Mapping):
            return {"$ref": self._reference(schema)}
        return self._body(schema)

    def _reference(self, found: Schema) -> str:
        if found is self._whole:
            return "#"
        name = self._names[id(found)]
        if name not in self._needed:
            self._needed.add(name)
            self._waiting.append((name, found))
        return f"#/$defs/{name}"

    def _body(self, schema: Any) -> Any:
        if not isinstance(schema, Mapping):
            return schema
        written = dict[str, Any]()
        for key, value in self._equal(schema).items():
            if key in _DEFINITIONS or key == "$id":
                continue
            if key == "$ref" and isinstance(value, str):
                found = self._targets.get(value, True)
                if isinstance(found, Mapping):
                    written[key] = self._reference(found)
                elif found is False:
                    written["enum"] = []
            elif key in MAPS and isinstance(value, Mapping):
                written[key] = {name: self._schema(one) for name, one in value.items()}
            elif (key in LISTS or key == "items") and isinstance(value, list):
                written[key] = [self._schema(one) for one in value]
            elif key in SINGLE:
                written[key] = self._schema(value)
            else:
                written[key] = value
        return written

    def _equal(self, schema: Schema) -> dict[str, Any]:
        """The schema without keywords that forbid nothing, its names and patterns put so that
        grammars know them.
        """
        kept = {
            key: value
            for key, value in schema.items()
            if (value is not None or key in _NULL_IS_A_VALUE) and not _forbids_nothing(key, value)
        }
        for key, needed in _ONLY_WITH.items():
            if needed not in kept:
                kept.pop(key, None)
        if "if" not in kept or not {"then", "else"} & kept.keys():
            for key in ("if", "then", "else"):
                kept.pop(key, None)
        if kept.get("minContains") == 0 and "maxContains" not in kept:
            kept.pop("minContains")
            kept.pop("contains")
        _put_formats(kept)
        pattern = kept.get("pattern")
        if isinstance(pattern, str) and (equal := without_look_arounds(pattern)) is not None:
            kept["pattern"] = equal
        if isinstance(pattern, str) and (short := without_length_ahead(pattern)) is not None:
            kept["pattern"], length = short
            others = kept.get("allOf", [])
            kept["allOf"] = [*others, {"maxLength": length}] if isinstance(others, list) else others
        if "propertyNames" in kept:
            kept = self._with_named_members(kept)
        kept = without_not(as_alternatives(kept), self._followed)
        return as_any_of(kept, self._followed)

    def _followed(self, reference: str) -> Any:
        return self._targets.get(reference, True)

    def _with_named_members(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Without `propertyNames`, where it lists the names or is one pattern for them: the members
        are those that it allows.
        """
        names = schema["propertyNames"]
        while isinstance(names, Mapping) and isinstance(names.get("$ref"), str):
            if len(names.keys() - _ANNOTATIONS) > 1:
                return schema
            names = self._targets.get(names["$ref"], True)
        if names is False:
            names = {"enum": []}
        rest = {key: value for key, value in schema.items() if key != "propertyNames"}
        if names is True:
            return rest
        is_known = isinstance(names, Mapping) and _is_text(names)
        return _members_of(rest, self._equal(names)) or schema if is_known else schema


def _members_of(schema: dict[str, Any], names: Schema) -> dict[str, Any] | None:
    """The schema, its names limited by another schema; None where there is no form for that."""
    says = names.keys() - _ANNOTATIONS - {"type"}
    others, declared = schema.get("additionalProperties", {}), schema.get("properties", {})
    if not says:
        return schema
    if "patternProperties" in schema or not isinstance(declared, Mapping):
        return None
    allowed = names.get("enum", [names.get("const")])
    if says in ({"enum"}, {"const"}) and isinstance(allowed, list):
        members = {name: declared.get(name, others) for name in allowed if isinstance(name, str)}
        return {**schema, "properties": members, "additionalProperties": False}
    pattern = _name_pattern(names)
    if pattern is None or declared:
        return None
    return {**schema, "patternProperties": {pattern: others}, "additionalProperties": False}


def _is_text(names: Any) -> bool:
    return isinstance(names, Mapping) and names.get("type", "string") in ("string", ["string"])


def _name_pattern(names: Schema) -> str | None:
    """One pattern for all that a schema of names says; None where it takes two, or has none."""
    says = names.keys() - _ANNOTATIONS - {"type"}
    pattern = names.get("pattern")
    if says == {"pattern"} or (
        says == {"pattern", "format"} and implies(str(pattern), str(names["format"]))
    ):
        return pattern if isinstance(pattern, str) else None
    if says in ({"format"}, {"allOf"}):
        stated = names.get("allOf", [FORMATS.get(str(names.get("format")))])
        only = stated[0] if isinstance(stated, list) and len(stated) == 1 else None
        pattern = (
            only["pattern"] if isinstance(only, Mapping) and set(only) == {"pattern"} else None
        )
        return pattern if isinstance(pattern, str) else None
    if not says <= {"minLength", "maxLength"}:
        return None
    least, most = names.get("minLength") or 0, names.get("maxLength", "")
    if not isinstance(least, int) or not isinstance(most, int | str):
        return None
    return rf"^[\s\S]{{{least},{most}}}$"


def _forbids_nothing(key: str, value: Any) -> bool:
    is_nothing = _NOTHING.get(key)
    return is_nothing is not None and is_nothing(value)


def _asks(value: Any) -> bool:
    """Whether the value of a name in a keyword may ask for anything."""
    return value is not True and value not in ({}, [])


def _names_nothing(value: Any) -> bool:
    return isinstance(value, Mapping) and not any(map(_asks, value.values()))


_NOTHING: Mapping[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("uniqueItems", "not"), lambda value: value is False),
    **dict.fromkeys(
        ("propertyNames", "unevaluatedProperties", "unevaluatedItems"),
        lambda value: value is True or value == {},
    ),
    **dict.fromkeys(("dependentSchemas", "dependencies", "dependentRequired"), _names_nothing),
    **dict.fromkeys(
        ("minLength", "minItems", "minProperties"),
        lambda value: value == 0 and not isinstance(value, bool),
    ),
    "allOf": lambda value: value == [],
    "patternProperties": lambda value: value == {},
    **dict.fromkeys(("contentMediaType", "contentSchema"), lambda _: True),
    **dict.fromkeys(("$anchor", "$dynamicAnchor", "$recursiveAnchor"), lambda _: True),  # alone
}
"""Which values of a keyword forbid nothing."""


def _put_formats(schema: dict[str, Any]) -> None:
    """Put a format of strings under a name that grammars know, or as its pattern. Drop one that is
    an annotation: of no string, one of programs and forms, and one that a generator has of its own
    next to the pattern that says what it means (of base64url, whether it is padded).
    """
    encoding = schema.pop("contentEncoding", None)
    is_known = isinstance(encoding, str) and encoding in _ENCODINGS
    stated = schema.pop("format", encoding if is_known else None)
    kinds = schema.get("type", "string")
    allowed = kinds if isinstance(kinds, list) else [kinds]
    if not isinstance(stated, str) or "string" not in allowed:
        return
    name = OTHER_NAMES.get(stated, stated)
    if name in KNOWN_TO_GRAMMARS:
        schema["format"] = name
    elif name in FORMATS and not (name == "base64url" and "pattern" in schema):
        if isinstance(others := schema.get("allOf", []), list):
            schema["allOf"] = [*others, FORMATS[name]]
    elif name not in FREE and "pattern" not in schema:
        schema["format"] = stated
