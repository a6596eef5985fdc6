"""Which formats a model writes, told from its chat template and its tokens."""

from dataclasses import replace

import pytest
from pydantic import ValidationError

from server.parsing.registry import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    Formats,
    answer_format,
    chosen,
    detect,
)
from server.settings.models import ConversationSettings
from tests.unit.parsing.answers import Answer, parsed

TEMPLATES = {
    "hermes": r"""{{- '<tool_call>\n{"name": "' + c.name + '"}\n</tool_call>' }}""",
    "hermes in double quotes": r"""{{- "<tool_call>\n{\"name\": \"" ~ c.name ~ "</tool_call>" }}""",
    "seed_oss": r"""{%- set t = "<seed:tool_call>" %}{{ t + '\n<function=' + c.name + '>\n' }}""",
    "qwen3_coder": r"""{{- '<tool_call>\n<function=' + c.name + '>\n' }}</function></tool_call>""",
    "mimo": "{{- '<tool_call><function=' ~ c.name ~ '>' -}}</function></tool_call>",
    "glm45": "<tool_call>{{ c.name }}\n<arg_key>{{ k }}</arg_key>\n<arg_value>",
    "glm45 in quotes": r"""{{- '<tool_call>' + c.name + '\n<arg_key>' + k + '</arg_key>\n' }}""",
    "glm47": "<tool_call>{{ c.name }}<arg_key>{{ k }}</arg_key><arg_value>",
    "longcat": "<longcat_tool_call>{{ c.name }}<longcat_arg_key>",
    "minimax_m2": """<minimax:tool_call>{{ '<invoke name="' + tool_call.name }}""",
    "minimax_m3": "{% set ns = ']<]minimax[>[' %}{{ ns ~ '<tool_call>' ~ ns ~ '<invoke name=' }}",
    "minicpm5": """{{ '<function name="' + c.name }}{{ '<param name="' + k + '">' }}""",
    "muse_spark": """{{ '<atem:function_calls>\\n<atem:invoke name="' }}""",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>{{ c.id }}",
    "kimi_k3": "{{- '<|open|>' + tag + '<|sep|>' }}{{- '<|close|>' + tag }}<|end_of_msg|>",
    "deepseek_v3": "<｜tool▁calls▁begin｜>function<｜tool▁sep｜>{{ c.name }}\n```json\n",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ c.name }}<｜tool▁sep｜>",
    "deepseek_v32": "{% set dsml = '｜DSML｜' %}{{ '<' + dsml + 'function_calls>' }}",
    "mistral": "{{ '[TOOL_CALLS][' }}{{ c | tojson }}]",
    "mistral_args": "{{ '[TOOL_CALLS]' + c.name + '[ARGS]' + a }}",
    "llama3_json": """<|start_header_id|>{{ '{"name": "' + c.name }}{{ '"parameters": ' }}""",
    "llama3_json of Llama 4": """<|header_start|>{{ '{"name": "' }}{{ '"parameters": ' }}""",
    "pythonic": "<|header_start|>[func_name1(params_name1=params_value1)]",
    "lfm2": "List of tools: <|tool_list_start|>[{{ tools }}]<|tool_list_end|>",
    "lfm2 with calls": "<|tool_call_start|>[{{ c }}]<|tool_call_end|>",
    "gemma4": "{{ '<|tool_call>call:' + c.name }}<tool_call|>",
    "functiongemma": "<start_function_call>call:{{ c.name }}<end_function_call>",
    "hy_v3": "{% set k = ':opensource' %}{{ '<tool_sep{}>'.format(k) }}",
    "deepseek_v4": "{% set dsml = '｜DSML｜' %}{{ '<' + dsml + 'tool_calls>' }}",
    "deepseek_v41": "{% set dsml = '｜DSML｜' %}{{ '<' + dsml + ' calls>' }}",
    "gigachat35": """{{ '<|role_sep|>' }}{{ '<｜GCML｜tool_calls>\\n<｜GCML｜invoke name="' }}""",
    "solar_open": "{{ '<|tool_calls|><|tool_call:begin|>' + c.id + '<|tool_call:name|>' }}",
    "solar_open2": "{{ '<|tool_call:start|>' + c.name }}{{ '<|tool_arg:start|>' + k }}",
    "olmo3": "{{- '<function_calls>' -}}{{- c.name + '(' + a + ')' -}}{{- '</function_calls>' -}}",
    "plamo3": "{{ '<|plamo:begin_tool_requests:plamo|>' }}{{ c.name }}",
    "hunyuan_a13b": "{{ '<tool_calls>[' }}{{ c }}{{ ']</tool_calls>' }}",
    "hunyuan_a13b of Apriel": 'within <tool_call></tool_call>: <tool_calls>["name"]</tool_calls>',
    "minimax": r"""{{ '<tool_calls>\n{"name": "' + c.name + '"}\n</tool_calls>' }}""",
    "nemotron_json": "{{ '<TOOLCALL>[' }}{{ c }}{{ ']</TOOLCALL>' }}",
    "granite": "{{ '<|tool_call|>' + c | tojson }}",
    "phi4_mini_json": """<|start_header_id|>functools[{"name": "f"}]""",
    "cohere_command3": """<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "{{ c.name }}"}]""",
    "gigachat3": "{{ '<|message_sep|>' }}{{ '<|function_call|>' + c }}",
    "gigachat3 with a role": "{{ '<|role_sep|>' }}{{ say({'role': 'function call'}) }}",
    "apertus": "{{ '<|tools_prefix|>[' }}{{ c }}{{ ']<|tools_suffix|>' }}",
    "openai": "<|start|>assistant to={{ c.name }}<|channel|>commentary<|message|>",
}


@pytest.mark.parametrize("shape", TEMPLATES)
def test_a_template_tells_the_tools(shape: str) -> None:
    name = shape.split(maxsplit=1)[0]
    assert detect(TEMPLATES[shape], []).tools == name
    assert name in TOOL_FORMATS


@pytest.mark.parametrize(
    "template",
    [
        "{{ content }}",
        "{{ ns ~ '<tool_call>' }}{{ '<invoke name=\"' + tool_call.name }}",
        "<acme:tool_call><function={{ c.name }}>",
        """<|start_header_id|>{{ '"parameters": ' }}<function={{ c.name }}>""",
    ],
)
def test_a_template_of_no_known_format_gets_the_generic_one(template: str) -> None:
    assert detect(template, []).tools == "generic"
    assert chosen("none", "auto", detect(template, [])).tools is None


@pytest.mark.parametrize("shape", TEMPLATES)
def test_a_known_format_gives_way_to_the_generic_one_only_where_it_is_named(shape: str) -> None:
    found = detect(TEMPLATES[shape], [])
    assert chosen("auto", "auto", found).tools != "generic"
    named = chosen("generic", "auto", found)
    assert named.tools == "generic"
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    assert parsed(answer_format(named), [f"Yes.\n{call}"]).calls == [("f", {"a": 1})]


def test_a_model_without_a_template_calls_no_tools() -> None:
    assert detect("", []).tools is None


@pytest.mark.parametrize(
    ("tokens", "tools"),
    [
        (["<|tool_call_start|>", "<|tool_call_end|>"], "lfm2"),
        (["<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"], "kimi_k3"),
        (["<tool_call>", "</tool_call>"], "generic"),
    ],
)
def test_tokens_tell_where_the_template_does_not(tokens: list[str], tools: str) -> None:
    assert detect("{{ content }}", tokens).tools == tools
    assert detect(TEMPLATES["hermes"], tokens).tools == "hermes"


@pytest.mark.parametrize(
    ("signs", "name"),
    [
        (["<think>", "</think>"], "deepseek_r1"),
        (["<think>", "</think>", "<response>", "</response>"], "ernie45"),
        (["[THINK]", "[/THINK]"], "mistral"),
        (["<longcat_think>", "</longcat_think>"], "longcat"),
        (["<|channel>", "<channel|>"], "gemma4"),
        (["<seed:think>", "</seed:think>"], "seed_oss"),
        (["<mm:think>", "</mm:think>"], "minimax_m3"),
        (["<mm:think>", "</mm:think>", "<think>", "</think>"], "minimax_m3"),
        (["<|think|>", "<|end|>", "<|content|>", "<|tool_calls|>"], "solar_open"),
        (["<|think|>", "<|end|>"], None),
        (["<|think:start|>", "<|think:end|>"], "solar_open2"),
        (["<think:opensource>", "</think:opensource>"], "hy_v3"),
        (["<|START_THINKING|>", "<|END_THINKING|>"], "cohere_command3"),
        (["[BEGIN FINAL RESPONSE]"], "apriel"),
        (["<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"], "kimi_k3"),
        (["</think>"], None),
        ([], None),
    ],
)
def test_tokens_or_the_template_tell_the_reasoning(signs: list[str], name: str | None) -> None:
    assert detect("{{ content }}", signs).reasoning == name
    assert detect(" ".join(signs), []).reasoning == name


def test_harmony_is_both() -> None:
    assert detect(TEMPLATES["openai"], []) == Formats("openai", "openai_gptoss")


def test_every_format_has_one_name() -> None:
    assert all(format.name == name for name, format in TOOL_FORMATS.items())


def test_a_marked_format_reads_both() -> None:
    format = answer_format(Formats("hermes", "deepseek_r1"))
    text = 'Hm.</think>Yes.<tool_call>{"name": "f"}</tool_call>'
    answer = parsed(format, [text], is_open=True)
    assert answer == Answer("Yes.", "Hm.", ["f"], ["{}"])


def test_without_tools_a_call_is_content() -> None:
    call = '<tool_call>{"name": "f"}</tool_call>'
    plain = replace(answer_format(Formats("hermes", None)), tools=None)
    assert parsed(plain, [call]) == Answer(call)
    harmony_alone = replace(answer_format(Formats("openai", None)), tools=None)
    said = "<|channel|>commentary to=functions.f<|message|>{}<|call|>"
    assert parsed(harmony_alone, [said]) == Answer("{}")


@pytest.mark.parametrize(
    ("formats", "text", "is_open"),
    [
        (
            Formats("hunyuan_a13b", "apriel"),
            "Hm.\n[BEGIN FINAL RESPONSE]\nI look.\n<tool_calls>[CALL]</tool_calls>\n",
            True,
        ),
        (
            Formats("hunyuan_a13b", "apriel"),
            "Here are my reasoning steps:\nHm.\n[BEGIN FINAL RESPONSE]\nI look.\n"
            "[END FINAL RESPONSE]\n<tool_calls>[CALL]</tool_calls>",
            False,
        ),
        (
            Formats("cohere_command3", "cohere_command3"),
            "Hm.<|END_THINKING|><|START_RESPONSE|>I look.<|END_RESPONSE|>"
            "<|START_ACTION|>[\n    CALL\n]<|END_ACTION|>",
            True,
        ),
        (
            Formats("solar_open", "solar_open"),
            "<|think|>Hm.<|end|><|begin|>assistant<|content|>I look.<|end|><|begin|>assistant"
            "<|tool_calls|><|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>f<|tool_call:args|>"
            '{"a": 1}<|tool_call:end|><|calls|>',
            False,
        ),
        (
            Formats("hermes", "ernie45"),
            "Hm.\n</think>\n\n<response>\nI look.\n</response>\n<tool_call>\nCALL\n</tool_call>\n",
            True,
        ),
        (
            Formats("gigachat3", None),
            "I look.<|message_sep|>\n\nfunction call<|role_sep|>\nCALL",
            False,
        ),
    ],
)
def test_calls_follow_reasoning_and_content(formats: Formats, text: str, is_open: bool) -> None:
    text = text.replace("CALL", '{"name": "f", "arguments": {"a": 1}}')
    answer = parsed(answer_format(formats), text, {"f": {}}, is_open=is_open)
    reasoning = "Hm." if formats.reasoning else ""
    assert answer == Answer("I look.", reasoning, ["f"], ['{"a": 1}'])


def test_what_stands_around_content_is_not_shown() -> None:
    format = answer_format(Formats("kimi_k3", "kimi_k3"))
    text = (
        "Hm.<|close|>think<|sep|><|open|>response<|sep|>I look.<|close|>response<|sep|>"
        '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|><|close|>call<|sep|>'
        "<|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>"
    )
    assert parsed(format, text, is_open=True) == Answer("I look.", "Hm.", ["f"], ["{}"])


@pytest.mark.parametrize("names", [("no", None), (None, "no"), ("hermes", "no")])
def test_an_unknown_name_is_refused(names: tuple[str | None, str | None]) -> None:
    known = TOOL_FORMATS if names[0] == "no" else REASONING_FORMATS
    with pytest.raises(ValueError, match="'no' is unknown; there are") as refused:
        answer_format(Formats(*names))
    assert all(name in str(refused.value) for name in known)


@pytest.mark.parametrize("names", [("openai", "deepseek_r1"), ("hermes", "openai_gptoss")])
def test_harmony_goes_with_no_other(names: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match="openai and openai_gptoss go together"):
        answer_format(Formats(*names))


@pytest.mark.parametrize(
    ("tool_parser", "reasoning_parser", "expected"),
    [
        ("hermes", "auto", Formats("hermes", None)),
        ("auto", "deepseek_r1", Formats(None, "deepseek_r1")),
        ("auto", "none", Formats("openai", None)),
        ("none", "auto", Formats(None, "openai_gptoss")),
        ("auto", "auto", Formats("openai", "openai_gptoss")),
    ],
)
def test_what_was_found_gives_way_to_a_format_that_is_named(
    tool_parser: str, reasoning_parser: str, expected: Formats
) -> None:
    formats = chosen(tool_parser, reasoning_parser, detect(TEMPLATES["openai"], []))
    assert formats == expected
    answer_format(formats)


def test_settings_refuse_harmony_with_another_format() -> None:
    with pytest.raises(ValidationError, match="cannot go together with the tool_parser hermes"):
        ConversationSettings(tool_parser="hermes", reasoning_parser="openai_gptoss")
