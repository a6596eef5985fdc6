"""Random schemas, regular expressions and grammars of large depth, repetition and reference."""

import random
from collections.abc import Callable
from typing import Any

from tests.hostile.cases import Body, Case, completion, in_all_dialects
from tests.schemas.generate import PATTERNS

SIZES = (0, 1, 2, 7, 40, 300, 5_000, 100_000, 99_999_989)
MOST_CHARACTERS = 32_000
CLASSES = ("a", "b", ".", r"\w", r"\s", r"\d", r"\p{L}", "[^a]", "[a-z]", r"[\w\s]", "ab", "é")


class Drawer:
    """Draws from one seed."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._random = random.Random(seed)

    def case(self) -> Case:
        draw, name = self._random, f"seed {self._seed}"
        match draw.randrange(3):
            case 0:
                return draw.choice(in_all_dialects(name, self.schema()))
            case 1:
                return completion(name, guided_regex=self.regex(draw.randrange(1, 9)))
        return completion(name, guided_grammar=self.lark())

    def schema(self) -> Body:
        """An object whose definitions refer to each other, and to themselves perhaps."""
        draw = self._random
        n = draw.choice((1, 3, 30, 300))
        self._names = [str(at) for at in range(n)]
        links = {name: self._link(int(name)) for name in self._names}
        return {
            "type": "object",
            "properties": {"v": self._value(draw.randrange(12)), "w": {"$ref": "#/$defs/0"}},
            "required": draw.sample(["v", "w"], draw.randrange(3)),
            "$defs": links,
        }

    def regex(self, depth: int) -> str:
        draw = self._random
        if depth == 0:
            return draw.choice(CLASSES)
        depths = [depth - draw.randrange(1, depth + 1) for _ in range(draw.randrange(1, 4))]
        text = draw.choice(("", "|")).join(map(self.regex, depths))
        text = f"({text}){self._repeat()}"
        if draw.random() < 0.05 and len(text) < 200:
            text *= draw.choice((2, 20, 500))
        return text if len(text) < MOST_CHARACTERS else draw.choice(CLASSES)

    def lark(self) -> str:
        """Rules that hold each other, each with parts that may be nothing."""
        draw = self._random
        names = ["start", *(f"r{at}" for at in range(draw.choice((1, 3, 8, 60))))]
        lines = []
        for at, name in enumerate(names):
            options = []
            for _ in range(draw.randrange(1, 4)):
                parts = [self._part(names, at) for _ in range(draw.randrange(1, 4))]
                options.append(" ".join(parts))
            lines.append(f"{name}: {' | '.join(options)}")
        return "\n".join(lines)

    def _part(self, names: list[str], at: int) -> str:
        draw = self._random
        behind = names[at + 1 :]
        kinds = ['"x"', '"y"', f"/{draw.choice(CLASSES)}{self._repeat()}/"]
        kinds += [draw.choice(behind)] * 4 if behind else []
        kinds += [draw.choice(names)] if draw.random() < 0.3 else []  # itself, perhaps
        return draw.choice(kinds) + self._repeat()

    def _repeat(self) -> str:
        draw = self._random
        least = draw.choice(SIZES[:6])
        most = least + draw.choice(SIZES[:7])
        return draw.choice(("", "", "?", "*", "+", f"{{{least},{most}}}", f"{{{least}}}"))

    def _link(self, at: int) -> Any:
        draw = self._random
        names = self._names
        target = names[min(at + 1, len(names) - 1)] if draw.random() < 0.9 else draw.choice(names)
        following = {"$ref": f"#/$defs/{target}"}
        if target == str(at):
            return self._value(2)
        return draw.choice(
            (
                following,
                {"properties": {"a": following, "b": self._value(1)}},
                {"anyOf": [following, self._value(1)]},
                {"allOf": [following, self._value(1)]},
                {"items": following, "minItems": draw.choice(SIZES)},
                {"additionalProperties": following},
                {"patternProperties": {"^x": following}},
            )
        )

    def _value(self, depth: int) -> Any:
        draw = self._random
        if depth == 0:
            return {"type": draw.choice(("integer", "string", "null"))}
        size, next_one = draw.choice(SIZES), depth - 1
        options: tuple[Callable[[], Body], ...] = (
            lambda: {"type": "integer", "multipleOf": max(size, 1)},
            lambda: {"type": "integer", "minimum": -size, "maximum": size * 7},
            lambda: {"type": "string", "minLength": size // 7, "maxLength": size},
            lambda: {"type": "string", "pattern": draw.choice(PATTERNS)},
            lambda: {"type": "string", "pattern": f"^{self.regex(draw.randrange(1, 6))}$"},
            lambda: {"enum": [f"{at}" * 7 for at in range(min(size + 1, 300))]},
            lambda: {"type": "array", "items": self._value(next_one), "maxItems": size},
            lambda: {"type": "array", "items": self._value(next_one), "minItems": size},
            lambda: {"properties": {f"p{at}": self._value(0) for at in range(min(size, 300))}},
            lambda: {"anyOf": [self._value(next_one) for _ in range(draw.randrange(1, 3))]},
            lambda: {"allOf": [self._value(next_one) for _ in range(draw.randrange(1, 3))]},
            lambda: {"$ref": f"#/$defs/{draw.choice(self._names)}"},
        )
        return draw.choice(options)()
