"""What generators of schemas write: the kept corpora, and values to try them with.

`tests/unit/grammar/generated/` has one file for each generator, a type on each line.
"""

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_origin

import pydantic
import pydantic.networks
import pydantic.types
import yaml
from llguidance import LLTokenizer
from pydantic.errors import PydanticUserError
from pydantic.json_schema import JsonSchemaMode

from engine.grammar.worker import GrammarError, compile_grammar

DIRECTORY = Path(__file__).parents[1] / "unit/grammar/generated"


def kept() -> dict[str, Any]:
    """Schemas by generator and type."""
    found = dict[str, Any]()
    for path in sorted(DIRECTORY.glob("*.json")):
        types = json.loads(path.read_text("utf-8"))
        found |= {f"{path.stem}: {name}": schema for name, schema in types.items()}
    return found


def by_hand() -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows of a schema with texts that it allows and others, or with the reason why it is refused,
    by name.
    """
    rows = yaml.safe_load((DIRECTORY.parent / "generated_schemas.yaml").read_text("utf-8"))
    for generator, types in rows.items():
        for name, row in types.items():
            yield f"{generator}: {name}", row


VALUES: list[Any] = json.loads((DIRECTORY.parent / "values.json").read_text("utf-8"))
"""Each is valid under the schemas of some types and invalid under others."""


def exported_by_pydantic() -> Iterator[tuple[str, Any]]:
    """The types among the names that pydantic exports; some have no schema."""
    for module in (pydantic, pydantic.types, pydantic.networks):
        for name in module.__all__:
            exported = getattr(module, name)
            if isinstance(exported, type) or get_origin(exported):
                yield name, exported


def of_pydantic(type_: Any, mode: JsonSchemaMode) -> dict[str, Any] | None:
    """None for what is no type, or none that pydantic describes."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return pydantic.TypeAdapter[Any](type_).json_schema(mode=mode)
    except (PydanticUserError, AttributeError, TypeError, ImportError):
        return None


def taken(tokenizer: LLTokenizer) -> dict[str, Any]:
    """Of all schemas here those that a grammar takes, and that validators read: they have no form
    for `null` in place of a keyword's value.
    """
    found = kept() | {name: row["schema"] for name, row in by_hand()}
    for name, type_ in exported_by_pydantic():
        if (schema := of_pydantic(type_, "validation")) is not None:
            found[f"pydantic: {name}"] = schema
    return {name: schema for name, schema in found.items() if _is_taken(tokenizer, schema)}


def _is_taken(tokenizer: LLTokenizer, schema: Any) -> bool:
    if isinstance(schema, dict) and None in schema.values():
        return False
    try:
        compile_grammar(tokenizer, "json_schema", json.dumps(schema))
    except GrammarError:
        return False
    return True
