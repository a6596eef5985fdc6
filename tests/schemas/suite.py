"""Public collections of schemas with instances, valid and not: how many are supported, and rightly
read. A file has a list of cases, as in the JSON-Schema test suite, or one, as in MaskBench, whose
schemas are those of JSONSchemaBench.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llguidance import LLMatcher

from engine.api import InvalidRequest
from engine.values.request import Grammar, GrammarKind
from tests.grammars import LocalGrammars, demo_tokenizer

MOST_REASONS = 30
_DETAIL = re.compile(r"'[^']*'|\d+")
_SCHEMAS = ("schemas refused", "schemas supported")


@dataclass(slots=True)
class Tally:
    """Of one keyword's schemas and of the instances that the suite judges by them."""

    counts: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)  # why schemas are refused
    wrong: list[str] = field(default_factory=list)
    narrow: list[str] = field(default_factory=list)

    def judge(self, test: dict[str, Any], what: str, accepted: bool) -> None:
        verdict = "accepted" if accepted else "refused"
        self.counts["valid " + verdict if test["valid"] else "invalid " + verdict] += 1
        if accepted and not test["valid"]:
            self.wrong.append(what)
        elif test["valid"] and not accepted:
            self.narrow.append(what)


class Reader:
    """Compiles schemas as the engine does, with the demonstration model's tokens."""

    def __init__(self) -> None:
        self._tokenizer = demo_tokenizer(2)
        self._grammars = LocalGrammars(self._tokenizer, frozenset())

    def matcher(self, schema: object) -> LLMatcher:
        """Raises InvalidRequest for a schema that is not supported."""
        return self._grammars.matcher(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)))

    def accepts(self, matcher: LLMatcher, instance: object) -> bool:
        """Whether the instance, as json.dumps spells it, may be generated."""
        tokens = self._tokenizer.tokenize_str(json.dumps(instance, ensure_ascii=False))
        mine = matcher.deep_copy()
        return mine.try_consume_tokens(tokens) == len(tokens) and mine.is_accepting()


def read_suite(directory: Path) -> Iterator[tuple[str, Tally]]:
    """One tally for each file of a draft's directory, those in its subdirectories included."""
    reader = Reader()
    for path in sorted(directory.rglob("*.json")):
        tally = Tally()
        found = json.loads(path.read_text("utf-8"))
        for case in found if isinstance(found, list) else [found]:
            _read_case(reader, case, tally)
        yield str(path.relative_to(directory)), tally


def _read_case(reader: Reader, case: dict[str, Any], tally: Tally) -> None:
    try:
        matcher = reader.matcher(case["schema"])
    except InvalidRequest as refusal:
        tally.counts["schemas refused"] += 1
        tally.reasons[_DETAIL.sub("_", str(refusal))[:80]] += 1
        return
    tally.counts["schemas supported"] += 1
    for test in case["tests"]:
        what = f"{case['description']}: {test['description']}: {json.dumps(test['data'])[:120]}"
        tally.judge(test, what, reader.accepts(matcher, test["data"]))


def report(directory: Path) -> bool:
    """Print the tallies, those of files with several schemas one by one; whether no invalid
    instance was accepted.
    """
    total, reasons = Counter[str](), Counter[str]()
    sound = True
    for name, tally in read_suite(directory):
        total += tally.counts
        reasons += tally.reasons
        sound = sound and not tally.wrong
        is_of_one = sum(tally.counts[key] for key in _SCHEMAS) == 1
        if not is_of_one or tally.wrong:
            print(f"{name}: " + ", ".join(f"{k} {n}" for k, n in sorted(tally.counts.items()) if n))
        for what in tally.wrong:
            print(f"    ACCEPTED, though invalid: {what}")
        for what in () if is_of_one else tally.narrow:
            print(f"    refused, though valid: {what}")
    print("all: " + ", ".join(f"{name} {n}" for name, n in sorted(total.items())))
    for reason, count in reasons.most_common(MOST_REASONS):
        print(f"    refused {count}: {reason}")
    return sound
