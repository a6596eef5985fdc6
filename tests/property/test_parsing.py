"""In whatever pieces an answer comes, its calls have the values that were written, as mlx-lm's
parsers of whole texts read them, and no markup is shown.

mlx-lm's parsers are compared on `plain` calls alone. They differ where
- a string has a marker in it (hermes, mistral), or the end tag of the whole call (minimax_m2,
  minicpm5, there even within CDATA): it ends there;
- an argument of functiongemma is an object or a list: it ends at the first brace or comma;
- gemma4's text has what looks like a key, as in `<|"|>{a:<|"|>`, or its key is no word;
- white space stands around a string (all with tags but qwen3_coder): it is dropped;
- a string is written as `null` (qwen3_coder, minimax_m2, minicpm5), or as any JSON (muse_spark), or
  may be null and is written as JSON or a Python literal (glm47, longcat, qwen3_coder): it becomes
  that;
- a call has no parameters (longcat): it raises AttributeError;
- an integer is larger than what a float holds (qwen3_coder): it is rounded.
"""

import ast
import json
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from keyword import iskeyword
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.tool_parsers import (
    function_gemma,
    gemma4,
    glm47,
    json_tools,
    kimi_k2,
    kimi_k3,
    laguna,
    longcat,
    minicpm5,
    minimax_m2,
    mistral,
    muse_spark,
    pythonic,
    qwen3_coder,
)

from server.parsing.answer import MAX_REPARSE_CHARACTERS, MarkedFormat, ReasoningFormat, ToolFormat
from server.parsing.formats import harmony
from server.parsing.json_text import is_cut_off
from server.parsing.registry import REASONING_FORMATS, TOOL_FORMATS, AnswerFormat
from tests.profiles import examples
from tests.unit.parsing.answers import Answer, parsed, pieces

Schema = dict[str, Any]
Call = tuple[str, dict[str, Any]]
Calls = tuple[list[Call], dict[str, Schema]]
"""Names and arguments, and the schema of each function."""

CUTS = st.lists(st.integers(0, 4000), max_size=20)
CONTENT = st.sampled_from(["", "Let me look.", "I < you, {and} [more]", "<tool", "two\n\nlines"])
SPACE = st.builds(operator.mul, st.sampled_from(["\n", " \t"]), st.integers(1, 700))
REASONING = st.sampled_from(["", "Hm, <tool_call> or {?", "step\n\nby step"])
PUNCTUATION = st.sampled_from("ab {}[]()<>'\"\\:=,|\n")
SOME = settings(max_examples=examples(40), deadline=None)
THINK = ReasoningFormat("<think>", "</think>")

NAMES = st.from_regex(r"[a-z][a-z0-9_]{0,12}", fullmatch=True).filter(
    lambda name: not iskeyword(name)  # which mlx-lm's parser of Python's syntax cannot read
)
ODD = ["", '"', "'", "\\", "\\n", "}", "]", ")]", "]]", "\n", " a ", "<", "</", "<|", "null", "nu"]
ODD += ["12", "[1]", "a, b=1", "é\n", "```", "<p>\n</p>\n"]
MARKUP = ["</tool_call>", "</function>", "</invoke>", "<parameter=", "<arg_value>", "<|close|>"]
MARKUP += ["[ARGS]", "[TOOL_CALLS]", "<tool_call|>", "<|call|>", "<think>"]
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    ODD + MARKUP
)
TEXT = TEXT.filter(lambda text: '<|"|>' not in text and "<escape>" not in text)
PLAIN_TEXT = st.text(st.sampled_from("ab .é'\\"), max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-1000, 1000) | st.floats(-10, 10) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)
TYPED = st.one_of(
    st.tuples(st.just({"type": "string"}), TEXT),
    st.tuples(st.just({"anyOf": [{"type": "string"}, {"type": "null"}]}), TEXT | st.none()),
    st.tuples(st.just({"type": "integer"}), st.integers(-(2**53), 2**53)),
    st.tuples(st.just({"type": "number"}), st.floats(allow_nan=False, allow_infinity=False)),
    st.tuples(st.just({"type": "boolean"}), st.booleans()),
    st.tuples(st.just({"type": "object"}), st.dictionaries(TEXT, VALUES, max_size=3)),
    st.tuples(st.just({"type": "array"}), st.lists(VALUES, max_size=3)),
)


def anything(value: Any) -> bool:
    return True


def calls_of(
    values: st.SearchStrategy[Any],
    is_plain: Callable[[Any], bool] = anything,
    keys: st.SearchStrategy[str] = NAMES,
    least: int = 0,
) -> st.SearchStrategy[Calls]:
    """Calls of functions that take anything."""
    arguments = st.dictionaries(keys, values.filter(is_plain), min_size=least, max_size=3)
    calls = st.lists(st.tuples(NAMES, arguments), min_size=1, max_size=3)
    return calls.map(lambda calls: (calls, {name: {} for name, _ in calls}))


def typed_calls(
    is_plain: Callable[[Any], bool] = anything, least: int = 0
) -> st.SearchStrategy[Calls]:
    """Calls of functions whose parameters have types."""

    def told(drawn: list[tuple[str, dict[str, tuple[Schema, Any]]]]) -> Calls:
        calls = [(name, {key: value for key, (_, value) in typed.items()}) for name, typed in drawn]
        schemas: dict[str, Schema] = {
            name: {"type": "object", "properties": {key: typed[key][0] for key in typed}}
            for name, typed in drawn
        }
        return calls, schemas

    values = TYPED.filter(lambda typed: is_plain(typed[1]))
    arguments = st.dictionaries(NAMES, values, min_size=least, max_size=3)
    drawn = st.lists(
        st.tuples(NAMES, arguments), min_size=1, max_size=3, unique_by=operator.itemgetter(0)
    )
    return drawn.map(told)


Write = Callable[[Sequence[Call]], str]
Meaning = Callable[[str, Any], Any]


@dataclass(frozen=True)
class Family:
    """How its models write calls, and what is read of a string. `meaning` is mlx-lm's parser, for
    `plain` calls: of the whole text, or of what `write_one` writes of each call, up to `tail`.
    """

    name: str
    calls: st.SearchStrategy[Calls]
    write: Write
    plain: st.SearchStrategy[Calls]
    meaning: Meaning | None = None
    write_one: Callable[[Call], str] | None = None
    tail: str = ""
    read: Callable[[str, Schema], str | None] = lambda text, schema: text

    @property
    def tools(self) -> ToolFormat:
        return TOOL_FORMATS[self.name]

    @property
    def format(self) -> AnswerFormat:
        is_harmony = self.tools is harmony.TOOLS
        return harmony.Harmony(self.tools) if is_harmony else MarkedFormat(THINK, self.tools)

    def answer(self, reasoning: str, content: str, written: str) -> str:
        if self.tools is harmony.TOOLS:
            thought = f"<|channel|>analysis<|message|>{reasoning}<|end|><|start|>assistant"
            said = f"<|channel|>commentary<|message|>{content}<|end|>"
            return f"{thought if reasoning else ''}{said if content else ''}{written}"
        thought = f"<think>\n{reasoning}\n</think>\n\n" if reasoning else ""
        return f"{thought}{content}{written}"

    def values(self, calls: Calls) -> list[Call]:
        """What is read of calls."""

        def value_of(name: str, key: str, value: Any) -> Any:
            schema = calls[1][name].get("properties", {}).get(key, {})
            return self.read(value, schema) if isinstance(value, str) else value

        return [
            (name, {key: value_of(name, key, value) for key, value in arguments.items()})
            for name, arguments in calls[0]
        ]


def dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def as_text(value: object) -> str:
    return value if isinstance(value, str) else dumps(value)


def has_no_marker(value: Any) -> bool:
    return "[ARGS]" not in dumps(value) and "[TOOL_CALLS]" not in dumps(value)


def in_json(
    name: str, call: str, between: str = "", around: str = "{}", meaning: Meaning | None = None
) -> Family:
    """Calls whose arguments are JSON, `between` them and `around` all of them. In `call` stand the
    name, the arguments and the number of the call.
    """

    def write(calls: Sequence[Call]) -> str:
        texts = (
            call.replace("NAME", name).replace("INDEX", str(index)).replace("JSON", dumps(given))
            for index, (name, given) in enumerate(calls)
        )
        return around.replace("{}", between.join(texts))

    return Family(
        name, calls_of(VALUES, keys=TEXT), write, calls_of(VALUES, has_no_marker), meaning
    )


def hermes_meaning(text: str, tools: Any) -> Any:
    blocks = text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
    return list(map(json_tools.parse_tool_call, blocks.split("\n</tool_call>\n<tool_call>\n")))


def mistral_meaning(text: str, tools: Any) -> Any:
    return mistral.parse_tool_call(text.removeprefix("[TOOL_CALLS]"))


def on_lines(calls: Sequence[Call]) -> str:
    """A list over several lines, each call with its number before the name."""
    objects = ",\n".join(
        "    " + dumps({"tool_call_id": str(index), "tool_name": name, "parameters": given})
        for index, (name, given) in enumerate(calls)
    )
    return f"<|START_ACTION|>[\n{objects}\n]<|END_ACTION|>"


DEEPSEEK = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"
JSON_FAMILIES = [
    in_json(
        "hermes",
        '<tool_call>\n{"name": "NAME", "arguments": JSON}\n</tool_call>',
        "\n",
        meaning=hermes_meaning,
    ),
    in_json("generic", '<tool_call>\n{"name": "NAME", "arguments": JSON}\n</tool_call>', "\n"),
    in_json("llama3_json", '{"name": "NAME", "parameters": JSON}', "; "),
    in_json(
        "mistral",
        '{"name": "NAME", "arguments": JSON}',
        ", ",
        "[TOOL_CALLS][{}]",
        meaning=mistral_meaning,
    ),
    in_json("mistral_args", "[TOOL_CALLS]NAME[ARGS]JSON"),
    in_json(
        "kimi_k2",
        "<|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>JSON<|tool_call_end|>",
        around="<|tool_calls_section_begin|>{}<|tool_calls_section_end|>",
        meaning=kimi_k2.parse_tool_call,
    ),
    in_json(
        "deepseek_v3",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nJSON\n```<｜tool▁call▁end｜>",
        "\n",
        DEEPSEEK,
    ),
    in_json(
        "deepseek_v31",
        "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>JSON<｜tool▁call▁end｜>",
        around=DEEPSEEK,
    ),
    in_json(
        "hunyuan_a13b",
        '{"name": "NAME", "arguments": JSON}',
        ", ",
        "<tool_calls>[{}]</tool_calls>",
    ),
    in_json(
        "minimax",
        '{"name": "NAME", "arguments": JSON}\n',
        around="<tool_calls>\n{}</tool_calls>",
    ),
    in_json(
        "nemotron_json",
        '{"name": "NAME", "arguments": JSON}',
        ", ",
        "<TOOLCALL>[{}]</TOOLCALL>",
    ),
    in_json(
        "granite",
        '{\n    "arguments": JSON,\n    "name": "NAME"\n}',
        ",\n",
        "<|tool_call|>[\n{}\n]",
    ),
    in_json("phi4_mini_json", '{"name": "NAME", "arguments": JSON}', ", ", "functools[{}]"),
    Family("cohere_command3", calls_of(VALUES, keys=TEXT), on_lines, calls_of(VALUES)),
    in_json("gigachat3", '<|function_call|>{"name": "NAME", "arguments": JSON}'),
    in_json(
        "solar_open",
        "<|tool_call:begin|>00000id00INDEX<|tool_call:name|>NAME<|tool_call:args|>JSON"
        "<|tool_call:end|>",
        around="<|tool_calls|>{}<|calls|>",
    ),
    in_json(
        "plamo3",
        "<|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>NAME"
        "<|plamo:end_tool_name:plamo|><|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json"
        "<|plamo:msg|>JSON<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|>",
        around="<|plamo:begin_tool_requests:plamo|>{}<|plamo:end_tool_requests:plamo|>",
    ),
    in_json("apertus", '{"NAME": JSON}', ", ", "<|tools_prefix|>[{}]<|tools_suffix|>"),
    in_json(
        "openai",
        "<|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>"
        "JSON<|call|>",
    ),
]


def gemma_value(quote: str, value: Any) -> str:
    match value:
        case str():
            return f"{quote}{value}{quote}"
        case list():
            return f"[{','.join(gemma_value(quote, item) for item in value)}]"
        case dict():
            items = (f"{quote}{key}{quote}:{gemma_value(quote, of)}" for key, of in value.items())
            return f"{{{','.join(items)}}}"
        case _:
            return json.dumps(value)


def gemma(begin: str, end: str, quote: str, calls: Sequence[Call]) -> str:
    return "".join(
        f"{begin}call:{name}{{"
        + ",".join(f"{key}:{gemma_value(quote, value)}" for key, value in arguments.items())
        + f"}}{end}"
        for name, arguments in calls
    )


def function_gemma_meaning(text: str, tools: Any) -> Any:
    blocks = text.split("<start_function_call>")[1:]
    return [function_gemma.parse_tool_call(block) for block in blocks]


def python(calls: Sequence[Call]) -> str:
    written = (
        f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
        for name, arguments in calls
    )
    return f"[{', '.join(written)}]"


def lfm2(calls: Sequence[Call]) -> str:
    return f"<|tool_call_start|>{python(calls)}<|tool_call_end|>"


def olmo3(calls: Sequence[Call]) -> str:
    written = (
        f"{name}({', '.join(f'{key}={dumps(value)}' for key, value in arguments.items())})"
        for name, arguments in calls
    )
    return "<function_calls>{}</function_calls>".format("\n".join(written))


ANYTHING = calls_of(VALUES)
FLAT = st.integers() | PLAIN_TEXT
LITERAL_FAMILIES = [
    Family(
        "gemma4",
        ANYTHING,
        partial(gemma, "<|tool_call>", "<tool_call|>", '<|"|>'),
        calls_of(st.lists(FLAT, max_size=3) | FLAT),
        gemma4.parse_tool_call,
    ),
    Family(
        "functiongemma",
        ANYTHING,
        partial(gemma, "<start_function_call>", "<end_function_call>", "<escape>"),
        calls_of(st.booleans() | st.none() | FLAT),
        function_gemma_meaning,
    ),
    Family("lfm2", ANYTHING, lfm2, ANYTHING, pythonic.parse_tool_call),
    Family("olmo3", ANYTHING, olmo3, ANYTHING),
    Family("pythonic", ANYTHING, python, ANYTHING, pythonic.parse_tool_call),
]


def is_no_literal(value: Any) -> bool:
    """Whether mlx-lm's parsers keep to the schema of a typed value, see above."""
    if not isinstance(value, str):
        return "<" not in dumps(value)
    text = value.strip()
    if text != value:
        return False
    if "<" in text or text.lower() in ("null", "none", "nil"):
        return False
    for read in (json.loads, ast.literal_eval):
        try:
            read(text)
            return False
        except (ValueError, SyntaxError):
            pass
    return True


def null_or_text(text: str, schema: Schema) -> str | None:
    return None if text == "null" and "anyOf" in schema else text


def python_null_or_text(text: str, schema: Schema) -> str | None:
    return None if text in ("null", "None") and "anyOf" in schema else text


def said_to_be_text(text: str, schema: Schema) -> str:
    """The tags say that it is a string."""
    return text


def tagged(
    name: str,
    head: str,
    argument: Callable[[str, Any], str],
    tail: str,
    *,
    around: str = "{}",
    between: str = "",
    read: Callable[[str, Schema], str | None] = null_or_text,
    meaning: Meaning | None = None,
) -> Family:
    """A family that writes a call's name, each argument and its end in tags."""

    def write_one(call: Call) -> str:
        name, arguments = call
        written = (argument(key, value) for key, value in arguments.items())
        return head.replace("NAME", name) + "".join(written) + tail

    def write(calls: Sequence[Call]) -> str:
        return around.replace("{}", between.join(map(write_one, calls)))

    plain = typed_calls(is_no_literal, least=1)
    return Family(name, typed_calls(), write, plain, meaning, write_one, tail, read)


def between_tags(argument: str, key: str, value: Any) -> str:
    return argument.replace("KEY", key).replace("VALUE", as_text(value))


def with_python_words(argument: str, key: str, value: Any) -> str:
    """As templates write that convert what is no text, object or list to a string."""
    written = str(value) if value is None or isinstance(value, bool) else as_text(value)
    return argument.replace("KEY", key).replace("VALUE", written)


def in_cdata(key: str, value: Any) -> str:
    is_odd = isinstance(value, str) and (set("<&\n") & set(value) or value != value.strip())
    text = f"<![CDATA[{value}]]>" if is_odd else as_text(value)
    text = str(value) if value is None or isinstance(value, bool) else text
    return f'<param name="{key}">{text}</param>'


def dsml_argument(prefix: str, key: str, value: Any) -> str:
    is_string = str(isinstance(value, str)).lower()
    head = f'<{prefix}parameter name="{key}" string="{is_string}">'
    return f"{head}{as_text(value)}</{prefix}parameter>\n"


def dsml(name: str, prefix: str, section: str) -> Family:
    return tagged(
        name,
        f'<{prefix}invoke name="NAME">\n',
        partial(dsml_argument, prefix),
        f"</{prefix}invoke>\n",
        around=f"<{section}>\n{{}}</{section}>",
        read=said_to_be_text,
    )


KIMI_TYPES = {str: "string", bool: "boolean", type(None): "null", dict: "object", list: "array"}


def kimi_k3_argument(key: str, value: Any) -> str:
    head = f'<|open|>argument key="{key}" type="{KIMI_TYPES.get(type(value), "number")}"<|sep|>'
    return f"{head}{as_text(value)}<|close|>argument<|sep|>"


def kimi_k3_meaning(text: str, tools: Any) -> Any:
    return kimi_k3.parse_tool_call(text, tools)[0]


def within(begin: str, end: str, parse: Meaning, text: str, tools: Any) -> Any:
    return parse(text.removeprefix(begin).removesuffix(end), tools)


def glm(name: str, parser: Any, prefix: str = "", line: str = "") -> Family:
    begin, end = f"<{prefix}tool_call>", f"</{prefix}tool_call>"
    key = f"<{prefix}arg_key>KEY</{prefix}arg_key>{line}"
    value = f"<{prefix}arg_value>VALUE</{prefix}arg_value>{line}"
    return tagged(
        name,
        f"{begin}NAME{line}",
        partial(between_tags, key + value),
        end,
        between="\n",
        meaning=partial(within, begin, end, parser.parse_tool_call),
    )


def invoke(name: str, prefix: str, section: str, parser: Any) -> Family:
    return tagged(
        name,
        f'<{prefix}invoke name="NAME">\n',
        partial(between_tags, f'<{prefix}parameter name="KEY">VALUE</{prefix}parameter>\n'),
        f"</{prefix}invoke>\n",
        around=f"<{section}>\n{{}}</{section}>",
        meaning=parser.parse_tool_call,
    )


TAGGED_FAMILIES = [
    tagged(
        "qwen3_coder",
        "<tool_call>\n<function=NAME>\n",
        partial(with_python_words, "<parameter=KEY>\nVALUE\n</parameter>\n"),
        "</function>\n</tool_call>",
        between="\n",
        read=python_null_or_text,
        meaning=partial(within, "<tool_call>\n", "\n</tool_call>", qwen3_coder.parse_tool_call),
    ),
    tagged(
        "seed_oss",
        "<seed:tool_call>\n<function=NAME>\n",
        partial(with_python_words, "<parameter=KEY>VALUE</parameter>\n"),
        "</function>\n</seed:tool_call>",
        between="\n",
        read=python_null_or_text,
    ),
    glm("glm47", glm47),
    glm("glm45", glm47, line="\n"),
    glm("laguna", laguna),
    glm("longcat", longcat, "longcat_", "\n"),
    invoke("minimax_m2", "", "minimax:tool_call", minimax_m2),
    invoke("muse_spark", "atem:", "atem:function_calls", muse_spark),
    tagged(
        "minicpm5",
        '<function name="NAME">',
        in_cdata,
        "</function>",
        between="\n",
        read=python_null_or_text,
        meaning=minicpm5.parse_tool_call,
    ),
    dsml("deepseek_v32", "｜DSML｜", "｜DSML｜function_calls"),
    dsml("deepseek_v4", "｜DSML｜", "｜DSML｜tool_calls"),
    dsml("deepseek_v41", "｜DSML｜ ", "｜DSML｜ calls"),
    dsml("gigachat35", "｜GCML｜", "｜GCML｜tool_calls"),
    tagged(
        "mimo",
        "<tool_call><function=NAME>",
        partial(between_tags, "<parameter=KEY>VALUE</parameter>"),
        "</function></tool_call>",
    ),
    tagged(
        "solar_open2",
        "<|tool_call:start|>NAME\n",
        partial(between_tags, "<|tool_arg:start|>KEY<|tool_arg:value|>VALUE<|tool_arg:end|>\n"),
        "<|tool_call:end|>",
        between="\n",
    ),
    tagged(
        "hy_v3",
        "<tool_call:opensource>NAME<tool_sep:opensource>\n",
        partial(
            between_tags,
            "<arg_key:opensource>KEY</arg_key:opensource>\n"
            "<arg_value:opensource>VALUE</arg_value:opensource>\n",
        ),
        "</tool_call:opensource>\n",
        around="<tool_calls:opensource>\n{}</tool_calls:opensource>",
    ),
    tagged(
        "kimi_k3",
        '<|open|>call tool="NAME" index="1"<|sep|>',
        kimi_k3_argument,
        "<|close|>call<|sep|>",
        around="<|open|>tools<|sep|>{}<|close|>tools<|sep|>",
        read=said_to_be_text,
        meaning=kimi_k3_meaning,
    ),
]
M3 = "]<]minimax[>["


def nested_tags(value: Any) -> str:
    """A value as MiniMax M3's template writes it, which leaves members out that are null."""
    match value:
        case dict():
            members = {key: of for key, of in value.items() if of is not None}
            return "".join(
                f"{M3}<{key}>{nested_tags(of)}{M3}</{key}>" for key, of in members.items()
            )
        case list():
            return "".join(f"{M3}<item>{nested_tags(of)}{M3}</item>" for of in value)
        case bool():
            return dumps(value)
        case _:
            return "" if value is None else str(value)


def minimax_m3(calls: Sequence[Call]) -> str:
    written = (
        f'{M3}<invoke name="{name}">{nested_tags(arguments)}{M3}</invoke>\n'
        for name, arguments in calls
    )
    return f"{M3}<tool_call>\n{''.join(written)}{M3}</tool_call>"


TYPED_LEAF = st.one_of(
    st.tuples(st.just({"type": "string"}), TEXT),
    st.tuples(st.just({"anyOf": [{"type": "string"}, {"type": "integer"}]}), st.integers()),
    st.tuples(st.just({"type": "integer"}), st.integers(-(2**53), 2**53)),
    st.tuples(st.just({"type": "number"}), st.floats(allow_nan=False, allow_infinity=False)),
    st.tuples(st.just({"type": "boolean"}), st.booleans()),
    st.tuples(st.just({"type": ["string", "null"]}), TEXT.filter(lambda text: text != "null")),
    st.tuples(st.just({}), st.integers() | st.booleans() | PLAIN_TEXT.map("a{}".format)),
)


def typed_object(members: dict[str, tuple[Schema, Any]]) -> tuple[Schema, Any]:
    properties = {key: schema for key, (schema, _) in members.items()}
    return {"type": "object", "properties": properties}, {k: of for k, (_, of) in members.items()}


def typed_tuple(items: list[tuple[Schema, Any]]) -> tuple[Schema, Any]:
    return {"type": "array", "prefixItems": [one for one, _ in items]}, [of for _, of in items]


def typed_list(typed: tuple[Schema, Any], n_items: int) -> tuple[Schema, Any]:
    return {"type": "array", "items": typed[0]}, [typed[1]] * n_items


NESTED = st.recursive(
    TYPED_LEAF,
    lambda inner: st.one_of(
        st.dictionaries(NAMES, inner, max_size=3).map(typed_object),
        st.lists(inner, max_size=3).map(typed_tuple),
        st.builds(typed_list, inner, st.integers(0, 3)),
    ),
    max_leaves=6,
)


def nested_calls(drawn: list[tuple[str, dict[str, tuple[Schema, Any]]]]) -> Calls:
    typed = [(name, typed_object(members)) for name, members in drawn]
    return [(name, value) for name, (_, value) in typed], {name: one for name, (one, _) in typed}


NESTED_CALLS = st.lists(
    st.tuples(NAMES, st.dictionaries(NAMES, NESTED, max_size=3)),
    min_size=1,
    max_size=3,
    unique_by=operator.itemgetter(0),
).map(nested_calls)
NESTED_FAMILIES = [
    Family(
        "minimax_m3",
        NESTED_CALLS,
        minimax_m3,
        NESTED_CALLS,
        tail=f"{M3}</invoke>\n{M3}</tool_call>",
    )
]
FAMILIES = {
    family.name: family
    for family in (*JSON_FAMILIES, *LITERAL_FAMILIES, *TAGGED_FAMILIES, *NESTED_FAMILIES)
}
BY_NAME = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
LEADING = ("llama3_json", "pythonic")
"""A call stands in place of an answer there."""


def test_every_format_is_there() -> None:
    assert FAMILIES.keys() == TOOL_FORMATS.keys()


@BY_NAME
@SOME
@given(data=st.data(), content=CONTENT, reasoning=REASONING, space=SPACE, cuts=CUTS)
def test_an_answer_in_pieces_has_the_values_that_were_written(
    family: Family,
    data: st.DataObject,
    content: str,
    reasoning: str,
    space: str,
    cuts: list[int],
) -> None:
    calls = data.draw(family.calls)
    content = "" if family.name in LEADING else content
    text = family.answer(reasoning, content, space + family.write(calls[0]) + space)
    answer = parsed(family.format, pieces(text, cuts), calls[1])
    assert answer.content == content
    assert answer.reasoning == reasoning
    assert answer.calls == family.values(calls)


def as_mlx_lm_reads(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values with null as a text: where a text or null may stand, mlx-lm reads the `None` that
    templates write for null as a text.
    """
    return {key: "None" if value is None else value for key, value in values.items()}


@pytest.mark.parametrize("name", [name for name in FAMILIES if FAMILIES[name].meaning])
@SOME
@given(data=st.data(), cuts=CUTS)
def test_mlx_lm_reads_the_same(name: str, data: st.DataObject, cuts: list[int]) -> None:
    family = FAMILIES[name]
    assert family.meaning is not None
    calls, schemas = data.draw(family.plain)
    written = family.write(calls)
    answer = parsed(family.format, pieces(written, cuts), schemas)
    tools = [
        {"type": "function", "function": {"name": name, "parameters": schema}}
        for name, schema in schemas.items()
    ]
    texts = [written] if family.write_one is None else map(family.write_one, calls)
    found = list[Any]()
    for text in texts:
        meant = family.meaning(text, tools)
        found += meant if isinstance(meant, list) else [meant]
    assert [(name, as_mlx_lm_reads(values)) for name, values in answer.calls] == [
        (call["name"], as_mlx_lm_reads(call["arguments"])) for call in found
    ]


@BY_NAME
@SOME
@given(data=st.data(), cuts=CUTS, end=st.integers(0, 2000))
def test_an_answer_that_is_cut_off_has_the_begin_of_what_the_whole_has(
    family: Family, data: st.DataObject, cuts: list[int], end: int
) -> None:
    calls, schemas = data.draw(family.calls)
    written = family.write(calls)
    text = written[: end % (len(written) + 1)]
    answer = parsed(family.format, pieces(text, cuts), schemas)
    assert answer == parsed(family.format, [text], schemas)
    assert answer.names == [name for name, _ in calls][: len(answer.names)]
    assert text.endswith(answer.content)
    assert answer.names or answer.content == text or family.tools is harmony.TOOLS
    assert not answer.reasoning
    whole = parsed(family.format, [written], schemas)
    last = len(answer.arguments) - 1
    # Gemma's quotes are tokens of their own, which are not cut; arguments may be left out.
    if last >= 0 and answer.arguments[last] != "{}" and "gemma" not in family.name:
        is_whole = answer.arguments[last] == whole.arguments[last]
        assert is_cut_off(answer.arguments[last]) is not is_whole
    if family.write_one is None:
        return  # a text may be an escape that is cut off
    for arguments, all_arguments in zip(answer.arguments, whole.arguments, strict=False):
        assert all_arguments.startswith(arguments)


READ_OBJECTS = {family.name for family in JSON_FAMILIES}
READ_OBJECTS -= {"kimi_k2", "deepseek_v3", "deepseek_v31", "solar_open", "plamo3", "apertus"}
READ_OBJECTS -= {"openai"}
READ_OBJECTS |= {"glm45", "glm47", "laguna", "longcat"}
"""Their calls may be objects, which have the name anywhere."""

THOUGHTS = st.sampled_from(
    [format for format in REASONING_FORMATS.values() if format is not harmony.REASONING]
)


@BY_NAME
@SOME
@given(data=st.data(), reasoning=THOUGHTS, cuts=CUTS)
def test_an_object_that_is_cut_off_before_its_name_is_content_as_it_stands(
    family: Family, data: st.DataObject, reasoning: ReasoningFormat, cuts: list[int]
) -> None:
    markers = [reasoning.begin, reasoning.end, *reasoning.around, "{", '"', "\\", "\n", "a "]
    strings = st.lists(st.sampled_from(markers), min_size=1, max_size=4).map("".join)
    arguments = st.dictionaries(strings, strings | st.lists(strings, max_size=2), max_size=2)
    early = [
        ("id", strings),
        ("type", strings),
        ("arguments", arguments),
        ("parameters", arguments),
    ]
    members = {
        key: data.draw(of)
        for key, of in data.draw(st.lists(st.sampled_from(early), min_size=1, unique=True))
    }
    call = dumps({**members, "name": "f", "index": 0})
    marker = data.draw(st.sampled_from([*family.tools.begins, *family.tools.leading]))
    text = marker.removesuffix("{") + call
    format = (
        family.format if family.tools is harmony.TOOLS else MarkedFormat(reasoning, family.tools)
    )
    tools = {"f": Schema()}
    is_call = family.name in READ_OBJECTS
    n_before_name = len(marker.removesuffix("{")) + call.index('"name": "f"') + len('"name": "f"')
    for end in range(len(text) + 1):
        answer = parsed(format, [text[:end]], tools)
        assert parsed(format, pieces(text[:end], cuts), tools) == answer
        if is_call and end < n_before_name:
            assert answer == Answer(content=text[:end])
        elif is_call:
            assert (answer.names, answer.content, answer.reasoning) == (["f"], "", "")


@pytest.mark.parametrize("name", ["lfm2", "olmo3", "pythonic"])
@pytest.mark.parametrize("reasoning", ["<think>", "</think>"])
def test_a_call_that_is_cut_off_in_its_first_key_is_content_as_it_stands(
    name: str, reasoning: str
) -> None:
    family = FAMILIES[name]
    text, _, _ = family.write([("f", {f'"what {reasoning} is"': 1})]).partition("=")
    for end in range(len(text) + 1):
        expected = Answer(content=text[:end])
        assert parsed(family.format, [text[:end]], {"f": {}}) == expected
        assert parsed(family.format, list(text[:end]), {"f": {}}) == expected


@BY_NAME
@SOME
@given(text=st.text(PUNCTUATION, max_size=60), cuts=CUTS)
def test_whatever_is_no_call_is_content_as_it_stands(
    family: Family, text: str, cuts: list[int]
) -> None:
    text = f"So{text}"
    assert parsed(family.format, pieces(text, cuts)).content == text


BEHIND = ["", "call:f{", "[f(", "f<|message|>{", '[f(a="', 'call:f{a:<|"|>']


@pytest.mark.parametrize("family", [*JSON_FAMILIES, *LITERAL_FAMILIES])
@SOME
@given(behind=st.sampled_from(BEHIND), junk=st.text(PUNCTUATION, max_size=40), cuts=CUTS)
def test_a_marker_before_anything_reads_alike_in_pieces(
    family: Family, behind: str, junk: str, cuts: list[int]
) -> None:
    text = f"{family.tools.begins[0]}{behind}{junk}"
    answer = parsed(family.format, pieces(text, cuts))
    assert answer == parsed(family.format, [text])
    if family.tools is not harmony.TOOLS:
        assert answer.names or answer.content == text


JUNK = ["<", ">", "</", "=", '"', "name", "key", "{", "\n", "<b>", "<parameter=", "<parameter "]
JUNK += ["<param ", "<arg_key>", "</arg_key>", "</parameter>", "<|open|>argument", "<|sep|>"]
JUNK += ["<![CDATA["]


@pytest.mark.parametrize(
    "family", [*TAGGED_FAMILIES, *NESTED_FAMILIES], ids=lambda family: family.name
)
@SOME
@given(junk=st.lists(st.sampled_from(JUNK), max_size=12), cuts=CUTS)
def test_a_call_that_breaks_off_shows_none_of_its_markup(
    family: Family, junk: list[str], cuts: list[int]
) -> None:
    begun, _, _ = family.write([("f", {"key": "text"})]).partition(family.tail)
    text = f"{begun}{''.join(junk)}"
    answer = parsed(family.format, pieces(text, cuts))
    assert answer == parsed(family.format, [text])
    assert answer.names == ["f"]
    assert answer.arguments[0].startswith('{"key": "text"')
    assert not answer.content


SOUP = {
    "hermes": [
        '<tool_call>{"id":[\\"',
        "<think>",
        '"<',
        '{"arguments":{"k":"',
        '<tool_call>{"name": "f", "arguments": {}}</tool_call>',
    ],
    "granite": [
        '<|tool_call|>[{"arguments": {"q": "what <think> is',
        '"',
        '{"name": "<think>", ',
        '"name": "f"}]',
        "</think>",
        "<|tool_call|>",
    ],
    "mistral": ['[TOOL_CALLS][{"id":[\\"', '"]', "[TOOL_CALLS]f[ARGS]{}", "[CALL_ID]"],
    "llama3_json": ['<|python_tag|>{"id":[\\"', '"<', '<think></think>{"id":"', "{"],
    "lfm2": ["<|tool_call_start|>[f(", "k=1", ")]", '"k\\"'],
    "minimax_m2": ["<minimax:tool_call>", "<invoke ", 'name="f"', ">"],
}
SPACES = [" " * 200, "\n" * MAX_REPARSE_CHARACTERS, "k" * 200, " "]


@pytest.mark.parametrize("name", SOUP)
@SOME
@given(data=st.data(), cuts=st.lists(st.integers(0, 20_000), max_size=20))
def test_what_is_no_call_is_content_wherever_it_is_cut(
    name: str, data: st.DataObject, cuts: list[int]
) -> None:
    drawn = st.tuples(st.sampled_from([*SOUP[name], *SPACES]), st.integers(1, 3))
    text = "".join(part * n for part, n in data.draw(st.lists(drawn, max_size=12)))
    format, tools = FAMILIES[name].format, {"f": Schema()}
    whole = parsed(format, [text], tools)
    assert parsed(format, pieces(text, cuts), tools) == whole
    assert whole.names or whole.reasoning or shown(whole.content) == shown(text)


def shown(text: str) -> str:
    """Without white space, which is dropped around reasoning, and without markers of reasoning."""
    return "".join(text.split()).replace("<think>", "").replace("</think>", "")
