"""All formats by name, and the detection of those of a model.

Formats have the names of vLLM's parsers, if it has one.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from server.parsing.answer import MarkedFormat, ReasoningFormat, ToolFormat
from server.parsing.formats import (
    harmony,
    json_calls,
    literal_calls,
    nested_calls,
    xml_calls,
)

TOOL_FORMATS: Mapping[str, ToolFormat] = {
    format.name: format
    for module in (json_calls, xml_calls, nested_calls, literal_calls, harmony)
    for format in vars(module).values()
    if isinstance(format, ToolFormat)
}
"""All that these modules define."""

REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    "apriel": ReasoningFormat(
        "Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]", around=["[END FINAL RESPONSE]"]
    ),
    "cohere_command3": ReasoningFormat(
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        content="<|START_RESPONSE|>",
        around=["<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"],
    ),
    "deepseek_r1": ReasoningFormat("<think>", "</think>"),
    "ernie45": ReasoningFormat("<think>", "</think>", content="<response>", around=["</response>"]),
    "gemma4": ReasoningFormat("<|channel>thought", "<channel|>"),
    "hy_v3": ReasoningFormat("<think:opensource>", "</think:opensource>"),
    "kimi_k3": ReasoningFormat(
        "<|open|>think<|sep|>",
        "<|close|>think<|sep|>",
        content="<|open|>response<|sep|>",
        around=["<|close|>response<|sep|>", "<|close|>message<|sep|>", "<|end_of_msg|>"],
    ),
    "longcat": ReasoningFormat("<longcat_think>", "</longcat_think>"),
    "minimax_m3": ReasoningFormat("<mm:think>", "</mm:think>"),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "openai_gptoss": harmony.REASONING,
    "plamo3": ReasoningFormat(
        "<|plamo:begin_think:plamo|>", "<|plamo:end_think:plamo|>", around=["<|plamo:tag|>"]
    ),
    "seed_oss": ReasoningFormat("<seed:think>", "</seed:think>"),
    "solar_open": ReasoningFormat(
        "<|think|>",
        "<|end|>",
        content="<|content|>",
        around=["<|begin|>assistant", "<|flush|>"],
        before_calls="<|begin|>assistant",
    ),
    "solar_open2": ReasoningFormat("<|think:start|>", "<|think:end|>"),
}

Format = TypeVar("Format", ToolFormat, ReasoningFormat)

AnswerFormat: TypeAlias = MarkedFormat | harmony.Harmony
"""How a family of models writes an answer."""

_HARMONY = (harmony.TOOLS.name, "openai_gptoss")


@dataclass(frozen=True, slots=True)
class Formats:
    """Names of the formats of a model; None where it has none."""

    tools: str | None
    reasoning: str | None


@dataclass(frozen=True, slots=True)
class _Signs:
    """A chat template that has all of these and none of those is of this format."""

    format: str
    all: Sequence[str]
    none: Sequence[str] = ()


_TOOL_SIGNS = (
    _Signs("openai", ["<|channel|>", "<|message|>"]),
    _Signs("minimax_m2", ["<minimax:tool_call>"]),
    _Signs("minimax_m3", ["]<]minimax[>["]),
    _Signs("gemma4", ["<|tool_call>", "<tool_call|>"]),
    _Signs("functiongemma", ["<start_function_call>"]),
    _Signs("longcat", ["<longcat_tool_call>"]),
    _Signs("hy_v3", ["'<tool_sep{}>'", "':opensource'"]),
    _Signs("glm45", ["</arg_key>\n"]),
    _Signs("glm45", ["</arg_key>\\n"]),
    _Signs("glm47", ["<arg_key>"]),
    _Signs("lfm2", ["<|tool_list_start|>"]),
    _Signs("lfm2", ["<|tool_call_start|>"]),
    _Signs("seed_oss", ["<seed:tool_call>", "<function="]),
    _Signs("qwen3_coder", ["<tool_call>\\n<function="]),
    _Signs("qwen3_coder", ["<tool_call>\n<function="]),
    _Signs("mimo", ["<tool_call><function="]),
    _Signs("solar_open", ["<|tool_call:begin|>"]),
    _Signs("solar_open2", ["<|tool_call:start|>", "<|tool_arg:start|>"]),
    _Signs("kimi_k2", ["<|tool_calls_section_begin|>"]),
    _Signs("kimi_k3", ["<|open|>", "<|sep|>"]),
    _Signs("minicpm5", ['<function name="', '<param name="']),
    _Signs("deepseek_v41", ["｜DSML｜", " calls>"]),
    _Signs("gigachat35", ["｜GCML｜"]),
    _Signs("deepseek_v32", ["｜DSML｜", "function_calls>"]),
    _Signs("deepseek_v4", ["｜DSML｜", "tool_calls>"]),
    _Signs("deepseek_v3", ["<｜tool▁calls▁begin｜>", "```json"]),
    _Signs("deepseek_v31", ["<｜tool▁calls▁begin｜>"]),
    _Signs("mistral_args", ["[TOOL_CALLS]", "[ARGS]"]),
    _Signs("mistral", ["[TOOL_CALLS]"]),
    _Signs("muse_spark", ["<atem:function_calls>"]),
    _Signs("hermes", ["<tool_call>", "</tool_call>", '"name"'], none=["<tool_calls>"]),
    _Signs("hermes", ["<tool_call>", "</tool_call>", '\\"name\\"'], none=["<tool_calls>"]),
    _Signs("hunyuan_a13b", ["<tool_calls>[", "</tool_calls>"]),
    _Signs("minimax", ["<tool_calls>\\n", "</tool_calls>"]),
    _Signs("minimax", ["<tool_calls>\n", "</tool_calls>"]),
    _Signs("nemotron_json", ["<TOOLCALL>[", "</TOOLCALL>"]),
    _Signs("granite", ["<|tool_call|>"]),
    _Signs("phi4_mini_json", ["functools["]),
    _Signs("cohere_command3", ["<|START_ACTION|>", '"tool_name"']),
    _Signs("gigachat3", ["<|function_call|>", "<|message_sep|>"]),
    _Signs("gigachat3", ["<|role_sep|>", "'function call'"]),
    _Signs("apertus", ["<|tools_prefix|>", "<|tools_suffix|>"]),
    _Signs("pythonic", ["[func_name1("]),
    _Signs("plamo3", ["plamo:", "begin_tool_requests"]),
    _Signs("olmo3", ["<function_calls>", "</function_calls>"], none=["<invoke"]),
    _Signs("llama3_json", ["<|start_header_id|>", '"parameters": '], none=["<function="]),
    _Signs("llama3_json", ["<|header_start|>", '"parameters": ']),
)
"""The first that fits counts. After mlx-lm's `_infer_tool_parser`, which has fewer."""

_KIMI_K3_TOKENS = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")
_TOKEN_SIGNS = (
    _Signs("kimi_k3", _KIMI_K3_TOKENS),
    _Signs("lfm2", ["<|tool_call_start|>", "<|tool_call_end|>"]),
)
"""Detects formats by tokens of the tokenizer, for templates that do not show them."""

_REASONING_SIGNS = (
    _Signs("minimax_m3", ["<mm:think>", "</mm:think>"]),  # its template knows <think>, too
    _Signs("ernie45", ["<think>", "</think>", "<response>", "</response>"]),
    _Signs("deepseek_r1", ["<think>", "</think>"]),
    _Signs("hy_v3", ["'<think{}>'", "':opensource'"]),
    _Signs("hy_v3", ["<think:opensource>", "</think:opensource>"]),
    _Signs("cohere_command3", ["<|START_THINKING|>", "<|END_THINKING|>"]),
    _Signs("apriel", ["[BEGIN FINAL RESPONSE]"]),
    _Signs("mistral", ["[THINK]", "[/THINK]"]),
    _Signs("gemma4", ["<|channel>", "<channel|>"]),
    _Signs("longcat", ["<longcat_think>", "</longcat_think>"]),
    _Signs("seed_oss", ["<seed:think>", "</seed:think>"]),
    _Signs("solar_open", ["<|think|>", "<|content|>", "<|tool_calls|>"]),
    _Signs("solar_open2", ["<|think:start|>", "<|think:end|>"]),
    _Signs("plamo3", ["plamo:", "begin_think"]),
    _Signs("kimi_k3", _KIMI_K3_TOKENS),
)
"""In the tokenizer, or in the template. After mlx-lm's `_infer_thinking`."""


def detect(chat_template: str, added_tokens: Collection[str]) -> Formats:
    """The formats that a model writes, detected in its chat template or in its added tokens.

    Calls of a model whose template shows no known format are in the generic one, which the server
    describes in the prompt.
    """
    tools = _first(_TOOL_SIGNS, chat_template) or _first(_TOKEN_SIGNS, added_tokens)
    if tools == harmony.TOOLS.name:
        return Formats(*_HARMONY)
    reasoning = _first(_REASONING_SIGNS, added_tokens) or _first(_REASONING_SIGNS, chat_template)
    generic = json_calls.GENERIC.name if chat_template else None
    return Formats(tools or generic, reasoning)


def chosen(tool_parser: str, reasoning_parser: str, found: Formats) -> Formats:
    """The formats by the settings: a name, `auto` for the detected one, or `none`. A detected
    format counts only if it is compatible with the named one.
    """
    tools = _chosen(tool_parser, found.tools)
    is_harmony = tools == harmony.TOOLS.name
    reasoning = _chosen(reasoning_parser, _HARMONY[1] if is_harmony else found.reasoning)
    if go_together(tools, reasoning):
        return Formats(tools, reasoning)
    return Formats(tools, None) if reasoning_parser == "auto" else Formats(None, reasoning)


def _chosen(parser: str, found: str | None) -> str | None:
    return found if parser == "auto" else None if parser == "none" else parser


def go_together(tools: str | None, reasoning: str | None) -> bool:
    """Whether one model can write both: Harmony's calls and reasoning go with no other format."""
    named = {tools, reasoning} - {None}
    return named.isdisjoint(_HARMONY) or named.issubset(_HARMONY)


def tool_format(name: str) -> ToolFormat:
    """Raises ValueError, which lists the names, for one that is unknown."""
    return _named(name, TOOL_FORMATS, "tool parser")


def reasoning_format(name: str) -> ReasoningFormat:
    """Raises ValueError, which lists the names, for one that is unknown."""
    return _named(name, REASONING_FORMATS, "reasoning parser")


def answer_format(formats: Formats) -> AnswerFormat:
    """The parser for answers in these formats.

    Raises ValueError for unknown or incompatible names.
    """
    tools = tool_format(formats.tools) if formats.tools else None
    reasoning = reasoning_format(formats.reasoning) if formats.reasoning else None
    if not go_together(formats.tools, formats.reasoning):
        raise ValueError(f"{' and '.join(_HARMONY)} go together, and with no other parser")
    if tools is harmony.TOOLS or reasoning is harmony.REASONING:
        return harmony.Harmony(tools)
    return MarkedFormat(reasoning, tools)


def _first(table: Sequence[_Signs], known: Collection[str]) -> str | None:
    for signs in table:
        if all(sign in known for sign in signs.all) and not any(
            sign in known for sign in signs.none
        ):
            return signs.format
    return None


def _named(name: str, formats: Mapping[str, Format], what: str) -> Format:
    if name not in formats:
        raise ValueError(f"{what} {name!r} is unknown; there are {', '.join(sorted(formats))}")
    return formats[name]
