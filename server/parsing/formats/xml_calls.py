"""Families whose parameters stand between tags, and become JSON by the function's schema."""

from collections.abc import Set
from dataclasses import replace

from server.parsing.answer import ReadCalls, ToolFormat
from server.parsing.calls import Calls
from server.parsing.formats.json_calls import enclosed_object
from server.parsing.lark import CallSyntax, Function, Lark
from server.parsing.reader import Reader, Reading
from server.parsing.tagged_calls import (
    CDATA,
    EXACT,
    LINES,
    NAME,
    STRIPPED,
    Attributes,
    Tag,
    Tags,
    attributes,
    only_name,
    tagged_calls,
)
from server.parsing.tagged_lark import Layout, Quotes, tagged_call, tagged_parameters

_TEXT = {"type": "string"}


def _or_object(read: ReadCalls, end: str) -> ReadCalls:
    """Reads `{"name": ..., "arguments": ...}` where it stands in place of a call."""
    read_object = enclosed_object(end)

    def read_either(reader: Reader, marker: str, calls: Calls) -> Reading[None]:
        yield from reader.skip_space()
        is_object = (yield from reader.peek()) == "{"
        yield from (read_object if is_object else read)(reader, marker, calls)

    return read_either


def _key_and_value(prefix: str) -> Tags:
    """`<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`."""
    return Tags(
        call=Tag(f"<{prefix}tool_call>", "", f"</{prefix}tool_call>"),
        parameter=Tag(f"<{prefix}arg_key>", f"</{prefix}arg_key>", f"</{prefix}arg_value>"),
        value_begin=f"<{prefix}arg_value>",
        trim=STRIPPED,
        pattern=NAME,
        attributes=only_name,
    )


def _key_and_value_format(name: str, prefix: str, line: str) -> ToolFormat:
    """The family with `prefix` in its tags. Between tags the model writes `line`."""
    tags = _key_and_value(prefix)
    begin, end = tags.call.begin, tags.call.end
    layout = Layout(
        named=line,
        parameter=lambda key, kind: (
            f"<{prefix}arg_key>{key}</{prefix}arg_key>{line}<{prefix}arg_value>"
        ),
        end=f"</{prefix}arg_value>",
        behind=line,
    )
    return ToolFormat(
        name,
        [begin],
        _or_object(tagged_calls(tags), end),
        CallSyntax(tagged_call(layout), begin=begin, end=end, between=line),
    )


def _invoke(namespace: str, section: str) -> Tags:
    """`<invoke name="name"><parameter name="key">value</parameter></invoke>` in a section."""
    return Tags(
        section=(f"<{section}>", f"</{section}>"),
        call=Tag(f"<{namespace}invoke ", ">", f"</{namespace}invoke>"),
        parameter=Tag(f"<{namespace}parameter ", ">", f"</{namespace}parameter>"),
        trim=STRIPPED,
    )


def _invoke_format(name: str, tags: Tags, layout: Layout) -> ToolFormat:
    assert tags.section
    opens, closes = tags.section
    return ToolFormat(
        name,
        [opens],
        tagged_calls(tags),
        CallSyntax(
            tagged_call(layout),
            opens=f"{opens}\n",
            begin=f'{tags.call.begin}name="',
            end=f"{tags.call.end}\n",
            closes=closes,
        ),
    )


def _invoke_layout(tags: Tags) -> Layout:
    return Layout(
        named='">\n',
        parameter=lambda key, kind: f'{tags.parameter.begin}name="{key}">',
        end=tags.parameter.end,
        behind="\n",
    )


def _dsml_kinds(attributes: Attributes) -> Set[str] | None:
    match attributes.get("string"):
        case "true":
            return {"string"}
        case "false":
            return set()
        case _:
            return None


def _kimi_attributes(head: str) -> Attributes:
    return {
        name: value.replace("&quot;", '"').replace("&amp;", "&")
        for name, value in attributes(head).items()
    }


def _kimi_kinds(attributes: Attributes) -> Set[str]:
    return {"string"} if attributes.get("type", "string") == "string" else set()


def _kimi_parameter(key: str, kind: str) -> str:
    escaped = key.replace("&", "&amp;").replace('"', "&quot;")
    kind = "number" if kind == "integer" else kind
    return f'<|open|>argument key="{escaped}" type="{kind}"<|sep|>'


_KIMI_LAYOUT = Layout(named="<|sep|>", parameter=_kimi_parameter, end="<|close|>argument<|sep|>")


def _kimi_call(lark: Lark, function: Function) -> str:
    """The name, which index it likes, and the parameters."""
    name = lark.text(f'{function.name}" index="')
    named = lark.text(f'"{_KIMI_LAYOUT.named}')
    return f"{name} /[0-9]{{1,3}}/ {named} {tagged_parameters(lark, function, _KIMI_LAYOUT)}"


QWEN3_CODER = ToolFormat(
    "qwen3_coder",
    ["<tool_call>", "<function="],
    tagged_calls(
        Tags(
            section=("<tool_call>", "</tool_call>"),
            call=Tag("<function=", ">", "</function>"),
            parameter=Tag("<parameter=", ">", "</parameter>"),
            trim=LINES,
            pattern=NAME,
            attributes=only_name,
            undeclared=_TEXT,
        )
    ),
    CallSyntax(
        tagged_call(
            Layout(
                named=">\n",
                parameter=lambda key, kind: f"<parameter={key}>\n",
                before="\n",
                end="</parameter>",
                behind="\n",
            )
        ),
        begin="<tool_call>\n<function=",
        end="</function>\n</tool_call>",
        between="\n",
    ),
)
"""`<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`: Qwen3-Coder,
Qwen 3.5, Nemotron 3, Step 3.5. The outer tag is sometimes forgotten.
"""

GLM47 = _key_and_value_format("glm47", "", "")
"""`<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`: GLM 4.7."""

GLM45 = _key_and_value_format("glm45", "", "\n")
"""The same with line breaks: GLM 4.5 and 4.6."""

LAGUNA = replace(GLM47, name="laguna")
"""Poolside's Laguna writes as GLM does."""

LONGCAT = _key_and_value_format("longcat", "longcat_", "\n")

_MINIMAX_TAGS = replace(_invoke("", "minimax:tool_call"), undeclared=_TEXT)
MINIMAX_M2 = _invoke_format("minimax_m2", _MINIMAX_TAGS, _invoke_layout(_MINIMAX_TAGS))
"""`<invoke name="name"><parameter name="key">value</parameter></invoke>`: MiniMax M2."""

_MUSE_TAGS = _invoke("atem:", "atem:function_calls")
MUSE_SPARK = _invoke_format("muse_spark", _MUSE_TAGS, _invoke_layout(_MUSE_TAGS))
"""`<atem:invoke name="name"><atem:parameter name="key">...`: Muse Spark."""

_DSML_TAGS = replace(_invoke("｜DSML｜", "｜DSML｜function_calls"), trim=EXACT, kinds=_dsml_kinds)
DEEPSEEK_V32 = _invoke_format(
    "deepseek_v32",
    _DSML_TAGS,
    replace(
        _invoke_layout(_DSML_TAGS),
        parameter=lambda key, kind: (
            f'<｜DSML｜parameter name="{key}" string="{str(kind == "string").lower()}">'
        ),
    ),
)
"""`<｜DSML｜invoke name="name"><｜DSML｜parameter name="key" string="true">...`: DeepSeek V3.2."""

_MINICPM_TAGS = Tags(
    call=Tag("<function ", ">", "</function>"),
    parameter=Tag("<param ", ">", "</param>"),
    trim=CDATA,
    undeclared=_TEXT,
)
MINICPM5 = ToolFormat(
    "minicpm5",
    ["<function "],
    tagged_calls(_MINICPM_TAGS),
    CallSyntax(
        tagged_call(
            Layout(
                named='">',
                parameter=lambda key, kind: f'<param name="{key}">',
                end="</param>",
                quotes=(Quotes(pattern="[^<&\n]*"), Quotes(begin="<![CDATA[", end="]]>")),
            )
        ),
        begin='<function name="',
        end="</function>",
    ),
)
"""`<function name="name"><param name="key">value</param></function>`: MiniCPM 5."""

KIMI_K3 = ToolFormat(
    "kimi_k3",
    ["<|open|>tools<|sep|>"],
    tagged_calls(
        Tags(
            section=("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
            call=Tag("<|open|>call", "<|sep|>", "<|close|>call<|sep|>"),
            parameter=Tag("<|open|>argument", "<|sep|>", "<|close|>argument<|sep|>"),
            whole=Tag("<|open|>json", "<|sep|>", "<|close|>json<|sep|>"),
            trim=EXACT,
            attributes=_kimi_attributes,
            name="tool",
            key="key",
            kinds=_kimi_kinds,
        )
    ),
    CallSyntax(
        _kimi_call,
        opens="<|open|>tools<|sep|>",
        begin='<|open|>call tool="',
        end="<|close|>call<|sep|>",
        closes="<|close|>tools<|sep|>",
    ),
)
"""`<|open|>call tool="name" index="1"<|sep|>`, and for each parameter
`<|open|>argument key="key" type="string"<|sep|>`: Kimi K3.
"""
