"""Families whose parameters stand between tags, and become JSON by the function's schema."""

from collections.abc import Set
from dataclasses import replace

from server.parsing.answer import ReadCalls, ToolFormat
from server.parsing.call_grammars import tagged_call, tagged_parameters
from server.parsing.formats.json_calls import enclosed_object
from server.parsing.lark import CallSyntax, Function, Lark, WriteCall
from server.parsing.reader import Calls, Reader, Reading
from server.parsing.tagged_calls import (
    BARE,
    CDATA,
    EXACT,
    LINES,
    NAMED,
    PYTHON_WORDS,
    Attributes,
    Heads,
    Quotes,
    Section,
    Tag,
    Tags,
    attributes,
    tagged_calls,
)

_TEXT = {"type": "string"}


def _or_object(read: ReadCalls, end: str) -> ReadCalls:
    """Reads `{"name": ..., "arguments": ...}` where it stands in place of a call."""
    read_object = enclosed_object(end)

    def read_either(reader: Reader, marker: str, calls: Calls) -> Reading[None]:
        yield from reader.skip_space()
        is_object = (yield from reader.peek()) == "{"
        yield from (read_object if is_object else read)(reader, marker, calls)

    return read_either


def _format(name: str, tags: Tags, write: WriteCall | None = None) -> ToolFormat:
    """The format of these tags. `write` makes the grammar of a call that has more than they say."""
    section, begin = tags.section, tags.call.begin + tags.heads.call[0]
    syntax = CallSyntax(
        write or tagged_call(tags), begin=begin, end=tags.call.end, between=tags.line
    )
    if section is None:
        begins, ends = [tags.call.begin], [tags.call.end]
    elif section.calls == "one":
        begins, ends = [section.begin, tags.call.begin], [section.end, tags.call.end]
        syntax = replace(
            syntax,
            begin=section.begin + tags.line + begin,
            end=tags.call.end + tags.line + section.end,
        )
    else:
        begins, ends = [section.begin], [section.end]
        syntax = replace(
            syntax,
            opens=section.begin + tags.line,
            end=tags.call.end + tags.line,
            between="",
            closes=section.end,
        )
    return ToolFormat(name, begins, tagged_calls(tags), syntax, ends=ends)


def _key_and_value(name: str, prefix: str, line: str) -> ToolFormat:
    """`<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`, with the
    prefix in the tags.
    """
    tags = Tags(
        call=Tag(f"<{prefix}tool_call>", "", f"</{prefix}tool_call>"),
        parameter=Tag(f"<{prefix}arg_key>", f"</{prefix}arg_key>", f"</{prefix}arg_value>"),
        heads=BARE,
        trim=EXACT,
        value_begin=f"<{prefix}arg_value>",
        line=line,
    )
    format = _format(name, tags)
    return replace(format, read=_or_object(format.read, tags.call.end))


def _invoke(namespace: str, section: str) -> Tags:
    """`<invoke name="name"><parameter name="key">value</parameter></invoke>` in a section."""
    return Tags(
        section=Section(f"<{section}>", f"</{section}>"),
        call=Tag(f"<{namespace}invoke ", ">", f"</{namespace}invoke>"),
        parameter=Tag(f"<{namespace}parameter ", ">", f"</{namespace}parameter>"),
        heads=NAMED,
        trim=EXACT,
        line="\n",
    )


def _dsml_kinds(attributes: Attributes) -> Set[str] | None:
    match attributes.get("string"):
        case "true":
            return {"string"}
        case "false":
            return set()
        case _:
            return None


_DSML = replace(
    NAMED,
    parameter=lambda key, kind: f'name="{key}" string="{str(kind == "string").lower()}"',
    kinds=_dsml_kinds,
)


def _kimi_attributes(head: str) -> Attributes:
    return {
        name: value.replace("&quot;", '"').replace("&amp;", "&")
        for name, value in attributes(head).items()
    }


def _kimi_kinds(attributes: Attributes) -> Set[str]:
    return {"string"} if attributes.get("type", "string") == "string" else set()


def _kimi_parameter(key: str, kind: str) -> str:
    escaped = key.replace("&", "&amp;").replace('"', "&quot;")
    return f' key="{escaped}" type="{"number" if kind == "integer" else kind}"'


_KIMI = Tags(
    section=Section("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
    call=Tag("<|open|>call", "<|sep|>", "<|close|>call<|sep|>"),
    parameter=Tag("<|open|>argument", "<|sep|>", "<|close|>argument<|sep|>"),
    whole=Tag("<|open|>json", "<|sep|>", "<|close|>json<|sep|>"),
    heads=Heads(
        read=_kimi_attributes,
        call=(' tool="', '"'),
        parameter=_kimi_parameter,
        name="tool",
        key="key",
        kinds=_kimi_kinds,
    ),
    trim=EXACT,
)


def _kimi_call(lark: Lark, function: Function) -> str:
    """The name, any index, and the parameters."""
    name, end = lark.text(f'{function.name}" index="'), lark.text(f'"{_KIMI.call.head_end}')
    return f"{name} /[0-9]{{1,3}}/ {end} {tagged_parameters(lark, function, _KIMI)}"


QWEN3_CODER = _format(
    "qwen3_coder",
    Tags(
        section=Section("<tool_call>", "</tool_call>", calls="one"),
        call=Tag("<function=", ">", "</function>"),
        parameter=Tag("<parameter=", ">", "</parameter>"),
        heads=BARE,
        trim=LINES,
        undeclared=_TEXT,
        line="\n",
        words=PYTHON_WORDS,
    ),
)
"""`<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`: Qwen3-Coder,
Qwen 3.5, Nemotron 3, Step 3.5. The outer tag is sometimes forgotten.
"""

SEED_OSS = _format(
    "seed_oss",
    Tags(
        section=Section("<seed:tool_call>", "</seed:tool_call>", calls="one"),
        call=Tag("<function=", ">", "</function>"),
        parameter=Tag("<parameter=", ">", "</parameter>"),
        heads=BARE,
        trim=EXACT,
        undeclared=_TEXT,
        line="\n",
        words=PYTHON_WORDS,
    ),
)
"""`<seed:tool_call><function=name><parameter=key>value</parameter></function></seed:tool_call>`:
ByteDance's Seed-OSS. Qwen3-Coder's tags in a section of its own, and no lines around values.
"""

MIMO = _format(
    "mimo",
    Tags(
        section=Section("<tool_call>", "</tool_call>", calls="one"),
        call=Tag("<function=", ">", "</function>"),
        parameter=Tag("<parameter=", ">", "</parameter>"),
        heads=BARE,
        trim=EXACT,
        undeclared=_TEXT,
    ),
)
"""Qwen3-Coder's tags without line breaks between them or around values: Xiaomi's MiMo 2."""

SOLAR_OPEN2 = _format(
    "solar_open2",
    Tags(
        call=Tag("<|tool_call:start|>", "", "<|tool_call:end|>"),
        parameter=Tag("<|tool_arg:start|>", "<|tool_arg:value|>", "<|tool_arg:end|>"),
        heads=BARE,
        trim=EXACT,
        undeclared=_TEXT,
        line="\n",
    ),
)
"""`<|tool_call:start|>name`, and on a line of its own for each parameter
`<|tool_arg:start|>key<|tool_arg:value|>value<|tool_arg:end|>`: Upstage's Solar Open 2.
"""

GLM47 = _key_and_value("glm47", prefix="", line="")
"""`<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`: GLM 4.7."""

GLM45 = _key_and_value("glm45", prefix="", line="\n")
"""GLM 4.5 and 4.6: the tags of GLM 4.7, with line breaks between them."""

LAGUNA = replace(GLM47, name="laguna")
"""Poolside's Laguna writes as GLM does."""

LONGCAT = _key_and_value("longcat", prefix="longcat_", line="\n")
"""`<longcat_tool_call>name<longcat_arg_key>key</longcat_arg_key>...`: LongCat."""

HY_V3 = _format(
    "hy_v3",
    Tags(
        section=Section("<tool_calls:opensource>", "</tool_calls:opensource>"),
        call=Tag("<tool_call:opensource>", "<tool_sep:opensource>", "</tool_call:opensource>"),
        parameter=Tag("<arg_key:opensource>", "</arg_key:opensource>", "</arg_value:opensource>"),
        heads=BARE,
        trim=EXACT,
        value_begin="<arg_value:opensource>",
        line="\n",
    ),
)
"""GLM's tags with `:opensource` in them, and a section around the calls: Tencent's Hy 3."""

MINIMAX_M2 = _format("minimax_m2", replace(_invoke("", "minimax:tool_call"), undeclared=_TEXT))
"""`<invoke name="name"><parameter name="key">value</parameter></invoke>`: MiniMax M2."""

MUSE_SPARK = _format("muse_spark", _invoke("atem:", "atem:function_calls"))
"""`<atem:invoke name="name"><atem:parameter name="key">...`: Muse Spark."""

DEEPSEEK_V32 = _format(
    "deepseek_v32",
    replace(_invoke("｜DSML｜", "｜DSML｜function_calls"), heads=_DSML),
)
"""`<｜DSML｜invoke name="name"><｜DSML｜parameter name="key" string="true">...`: DeepSeek V3.2."""

DEEPSEEK_V4 = _format(
    "deepseek_v4", replace(_invoke("｜DSML｜", "｜DSML｜tool_calls"), heads=_DSML)
)
"""`<｜DSML｜tool_calls>` around the calls of DeepSeek V3.2: DeepSeek V4."""

DEEPSEEK_V41 = _format("deepseek_v41", replace(_invoke("｜DSML｜ ", "｜DSML｜ calls"), heads=_DSML))
"""DeepSeek V4's tags, with a space before the name of each: `<｜DSML｜ calls>`. DeepSeek V4.1."""

GIGACHAT35 = _format("gigachat35", replace(_invoke("｜GCML｜", "｜GCML｜tool_calls"), heads=_DSML))
"""`<｜GCML｜tool_calls>`, and DeepSeek V4's tags with this prefix: GigaChat 3.5."""

_minicpm5 = _format(
    "minicpm5",
    Tags(
        call=Tag("<function ", ">", "</function>"),
        parameter=Tag("<param ", ">", "</param>"),
        heads=NAMED,
        trim=CDATA,
        undeclared=_TEXT,
        quotes=(Quotes(pattern="[^<&\n]*"), Quotes(begin="<![CDATA[", end="]]>")),
        words=PYTHON_WORDS,
    ),
)
MINICPM5 = replace(_minicpm5, syntax=replace(_minicpm5.syntax, between="\n"))
"""`<function name="name"><param name="key">value</param></function>`: MiniCPM 5."""

KIMI_K3 = _format("kimi_k3", _KIMI, _kimi_call)
"""`<|open|>call tool="name" index="1"<|sep|>`, and for each parameter
`<|open|>argument key="key" type="string"<|sep|>`: Kimi K3.
"""
