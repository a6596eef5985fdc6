"""Chat templates of several families' shapes, and models that answer in their formats."""

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from engine.mlx_backend.loading.loader import template_kind
from engine.text.tokenizer import CheckpointTokenizer
from engine.values.model import Replay

MAX_TOKENS = 100_000
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]

_HERMES_CALLS = (
    "{%- for call in message.tool_calls or [] %}"
    "{{- '\\n' if loop.index0 or message.content }}"
    '{{- \'<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}"
    "{%- endfor %}"
)
_CHATML_OTHERS = (
    "{%- if message.role == 'tool' %}"
    "{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}"
    "{{- '<|im_end|>\\n' }}"
    "{%- elif message.role != 'assistant' %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- else %}"
)
_TOOL_LIST = "{%- for tool in tools or [] %}{{- tool | tojson }}{%- endfor %}"
_LAST_QUERY = (
    "{%- set ns = namespace(last=0) %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}"
    "{%- endfor %}"
)

HERMES = (
    _TOOL_LIST
    + "{%- for message in messages %}"
    + _CHATML_OTHERS
    + "{{- '<|im_start|>assistant\\n'"
    " + (message.content or '') }}"
    + _HERMES_CALLS
    + "{{- '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

QWEN3 = (
    _TOOL_LIST
    + _LAST_QUERY
    + "{%- for message in messages %}"
    + _CHATML_OTHERS
    + "{%- set content = message.content or '' %}"
    "{%- set reasoning = message.reasoning_content or '' %}"
    "{%- if '</think>' in content %}"
    "{%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\\n') %}"
    "{%- endif %}"
    "{{- '<|im_start|>assistant\\n' }}"
    "{%- if loop.index0 > ns.last and (reasoning or loop.last) %}"
    "{{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}"
    "{%- endif %}"
    "{{- content.lstrip('\\n') }}" + _HERMES_CALLS + "{{- '<|im_end|>\\n' }}"
    "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}"
    "{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and not enable_thinking %}"
    "{{- '<think>\\n\\n</think>\\n\\n' }}"
    "{%- elif opens %}{{- '<think>\\n' }}{%- endif %}"
    "{%- endif %}"
)

ALWAYS_MARKED = QWEN3.replace(" and (reasoning or loop.last)", "")
"""As in Qwen3.5: also answers without reasoning have its markers."""

GLM = (
    "[gMASK]<sop>" + _TOOL_LIST + _LAST_QUERY + "{%- for message in messages %}"
    "{%- if message.role == 'tool' %}"
    "{{- '<|observation|>\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}"
    "{%- elif message.role == 'assistant' %}"
    "{{- '<|assistant|>' }}"
    "{%- if loop.index0 > ns.last and message.reasoning_content %}"
    "{{- '\\n<think>' + message.reasoning_content.strip() + '</think>' }}"
    "{%- else %}{{- '\\n<think></think>' }}{%- endif %}"
    "{%- if message.content %}{{- '\\n' + message.content.strip() }}{%- endif %}"
    "{%- for call in message.tool_calls or [] %}"
    "{{- '\\n<tool_call>' + call.function.name + '\\n' }}"
    "{%- for key, value in call.function.arguments.items() %}"
    "{{- '<arg_key>' + key + '</arg_key>\\n<arg_value>' + value | tojson + '</arg_value>\\n' }}"
    "{%- endfor %}{{- '</tool_call>' }}{%- endfor %}"
    "{%- else %}{{- '<|' + message.role + '|>\\n' + message.content }}{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)

LLAMA3 = (
    "<|begin_of_text|>" + _TOOL_LIST + "{%- for message in messages %}"
    "{%- if 'tool_calls' in message %}"
    "{%- if message.tool_calls | length != 1 %}{{- raise_exception('one call') }}{%- endif %}"
    "{%- set call = message.tool_calls[0].function %}"
    "{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}"
    "{{- '{\"name\": \"' + call.name + '\", \"parameters\": ' + call.arguments | tojson + '}' }}"
    "{{- '<|eot_id|>' }}"
    "{%- else %}"
    "{%- set role = 'ipython' if message.role == 'tool' else message.role %}"
    "{{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' }}"
    "{{- message.content | trim + '<|eot_id|>' }}"
    "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}"
    "{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}"
    "{%- endif %}"
)

MISTRAL = (
    "{%- set ns = namespace(index=0, last=0) %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}"
    "{%- if message.role != 'tool' and not message.tool_calls %}"
    "{%- if (message.role == 'user') != (ns.index % 2 == 0) %}"
    "{{- raise_exception('roles must alternate') }}"
    "{%- endif %}{%- set ns.index = ns.index + 1 %}{%- endif %}{%- endfor %}"
    "{{- '<s>' }}{%- for message in messages %}"
    "{%- if message.role == 'user' %}"
    "{%- if loop.index0 == ns.last and tools %}{{- tools | tojson }}{%- endif %}"
    "{{- '[INST] ' + message.content + '[/INST]' }}"
    "{%- elif message.tool_calls %}"
    "{{- '[TOOL_CALLS] [' }}"
    "{%- for call in message.tool_calls %}"
    "{{- ', ' if loop.index0 }}"
    "{{- (call.function | tojson)[:-1] + ', \"id\": \"' + call.id + '\"}' }}"
    "{%- endfor %}{{- ']</s>' }}"
    "{%- elif message.role == 'assistant' %}{{- ' ' + message.content | trim + '</s>' }}"
    "{%- else %}"
    '{{- \'[TOOL_RESULTS] {"content": \' + message.content + \', "call_id": "\' }}'
    "{{- message.tool_call_id + '\"}[/TOOL_RESULTS]' }}"
    "{%- endif %}{%- endfor %}"
)

DEEPSEEK = (
    "{{- '<｜begin▁of▁sentence｜>' }}" + _TOOL_LIST + "{%- set ns = namespace(asked=false) %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'user' %}"
    "{%- set ns.asked = true %}{{- '<｜User｜>' + message.content }}"
    "{%- elif message.role == 'tool' %}"
    "{%- set ns.asked = false %}"
    "{{- '<｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜>' }}"
    "{%- elif message.role == 'assistant' %}"
    "{%- if ns.asked %}{{- '<｜Assistant｜></think>' }}{%- endif %}{%- set ns.asked = false %}"
    "{{- message.content or '' }}"
    "{%- if message.tool_calls %}{{- '<｜tool▁calls▁begin｜>' }}"
    "{%- for call in message.tool_calls %}"
    "{{- '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' }}"
    "{{- call.function.arguments | tojson + '<｜tool▁call▁end｜>' }}"
    "{%- endfor %}{{- '<｜tool▁calls▁end｜>' }}{%- endif %}"
    "{{- '<｜end▁of▁sentence｜>' }}"
    "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt and ns.asked %}{{- '<｜Assistant｜>' }}"
    "{{- '<think>' if thinking else '</think>' }}{%- endif %}"
)

CONTROL = [
    *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    *("[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|observation|>"),
]
_WORDS = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>"),
    *("<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    *("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
    *("<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
]


def checkpoint_of(backend: Tokenizer, template: str) -> CheckpointTokenizer:
    """A tokenizer that knows all markers, with a chat template."""
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in CONTROL])
    backend.add_tokens([AddedToken(token, normalized=False) for token in _WORDS])
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    return checkpoint_with(fast, template)


def checkpoint_with(fast: PreTrainedTokenizerBase, template: str) -> CheckpointTokenizer:
    """The tokenizer with another chat template."""
    fast.chat_template = template
    return opened(TokenizerWrapper(fast), MAX_TOKENS)


def opened(wrapper: TokenizerWrapper, max_tokens: int) -> CheckpointTokenizer:
    return CheckpointTokenizer(wrapper._tokenizer, template_kind(wrapper), max_tokens)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a model says: `calls` are names and arguments."""

    calls: tuple[tuple[str, Mapping[str, Any]], ...]
    content: str = ""
    reasoning: str = ""


Dumps = Callable[[object], str]
"""How a model happens to write JSON."""


@dataclass(frozen=True, slots=True)
class Family:
    """A template's shape, and how models of it answer.

    `thinks` writes an answer's reasoning, `writes` what comes behind. `first` and `later` are what
    the template opens for an answer to a user and to a tool.
    """

    template: str
    thinks: Callable[[str], str]
    writes: Callable[[Answer, Dumps], str]
    stop: str
    first: str = ""
    later: str = ""
    arguments: Mapping[str, object] = field(default_factory=dict)


def _no_thinking(reasoning: str) -> str:
    return ""


def _hermes(answer: Answer, dumps: Dumps) -> str:
    calls = [
        f"<tool_call>\n{dumps({'arguments': arguments, 'name': name})}</tool_call>"
        for name, arguments in answer.calls
    ]
    return "\n".join([answer.content, *calls] if answer.content else calls)


def _glm(answer: Answer, dumps: Dumps) -> str:
    content = f"\n{answer.content}" if answer.content else ""
    return content + "".join(
        f"\n<tool_call>{name}\n"
        + "".join(
            f"<arg_key>{key}</arg_key><arg_value>{dumps(value)}</arg_value>"
            for key, value in arguments.items()
        )
        + "</tool_call>"
        for name, arguments in answer.calls
    )


def _llama3(answer: Answer, dumps: Dumps) -> str:
    [(name, arguments)] = answer.calls
    return dumps({"parameters": arguments, "name": name})


def _mistral(answer: Answer, dumps: Dumps) -> str:
    calls = [{"arguments": arguments, "name": name} for name, arguments in answer.calls]
    return f"[TOOL_CALLS]{dumps(calls)}"


def _deepseek(answer: Answer, dumps: Dumps) -> str:
    calls = [
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{dumps(arguments)}<｜tool▁call▁end｜>"
        for name, arguments in answer.calls
    ]
    return f"{answer.content}<｜tool▁calls▁begin｜>{''.join(calls)}<｜tool▁calls▁end｜>"


def _qwen3_thinks(reasoning: str) -> str:
    return f"<think>\n{reasoning}\n</think>\n\n"


_OPENED = "<think>\n"
_EMPTY = "<think>\n\n</think>\n\n"

FAMILIES = {
    "hermes": Family(HERMES, _no_thinking, _hermes, "<|im_end|>"),
    "qwen3": Family(
        QWEN3, _qwen3_thinks, _hermes, "<|im_end|>", arguments={"enable_thinking": True}
    ),
    "qwen3 opening": Family(
        QWEN3,
        lambda reasoning: f"{reasoning}\n</think>\n\n",
        _hermes,
        "<|im_end|>",
        _OPENED,
        _OPENED,
        {"opens": True, "enable_thinking": True},
    ),
    "qwen3 not thinking": Family(
        QWEN3, _no_thinking, _hermes, "<|im_end|>", _EMPTY, _EMPTY, {"enable_thinking": False}
    ),
    "always marked": Family(ALWAYS_MARKED, _qwen3_thinks, _hermes, "<|im_end|>"),
    "always marked, opening": Family(
        ALWAYS_MARKED,
        lambda reasoning: f"{reasoning}\n</think>\n\n",
        _hermes,
        "<|im_end|>",
        _OPENED,
        _OPENED,
        {"opens": True, "enable_thinking": True},
    ),
    "glm": Family(GLM, lambda reasoning: f"\n<think>{reasoning}</think>", _glm, "<|observation|>"),
    "llama3": Family(LLAMA3, _no_thinking, _llama3, "<|eot_id|>"),
    "mistral": Family(MISTRAL, _no_thinking, _mistral, "</s>"),
    "deepseek": Family(
        DEEPSEEK, _no_thinking, _deepseek, "<｜end▁of▁sentence｜>", first="</think>"
    ),
}
THINKING = [name for name in FAMILIES if FAMILIES[name].thinks("x")]
OUTSPOKEN = [name for name in FAMILIES if name not in ("llama3", "mistral")]
"""Families whose answers may have content beside calls."""


def odd_json(chance: random.Random) -> Dumps:
    """JSON with spaces and escapes that no serializer puts there."""
    comma, colon = chance.choice([(",", ":"), (" , ", ": "), (",\n", " :")])
    return lambda value: json.dumps(
        value, separators=(comma, colon), ensure_ascii=chance.random() < 0.5
    )


def odd_tokens(checkpoint: CheckpointTokenizer, text: str, chance: random.Random) -> list[int]:
    """Tokens of the text, not always those that the tokenizer would make of it."""
    tokens = []
    while text:
        cut = chance.randint(1, 30)
        tokens += checkpoint.encode(text[:cut], add_special_tokens=False)
        text = text[cut:]
    return tokens


class Conversation:
    """A conversation with a model of a family, its history as a client sends it."""

    def __init__(
        self, family: Family, checkpoint: CheckpointTokenizer, chance: random.Random
    ) -> None:
        self._family = family
        self._checkpoint = checkpoint
        self._chance = chance
        self.messages: list[dict[str, Any]] = []
        self.replays: dict[int, Replay] = {}

    def prompt(self, **arguments: object) -> list[int]:
        return self._checkpoint.apply_chat_template(
            self.messages, self.replays, tools=TOOLS, **self._family.arguments, **arguments
        )

    def canonical(self) -> list[int]:
        """The prompt of a server that has forgotten the answers."""
        return self._checkpoint.apply_chat_template(
            self.messages, tools=TOOLS, **self._family.arguments
        )

    def asks(self, content: str) -> None:
        self.messages.append({"role": "user", "content": content})

    def answers(self, answer: Answer, tokens: Sequence[int] | None = None) -> list[int]:
        """The tokens that the model generates, unless given. The client keeps the answer."""
        to_user = self.messages[-1]["role"] == "user"
        opened = self._family.first if to_user else self._family.later
        thinking = self._family.thinks(answer.reasoning)
        if tokens is None:
            text = thinking + self._family.writes(answer, odd_json(self._chance))
            tokens = odd_tokens(self._checkpoint, text, self._chance)
        index = len(self.messages)
        self.replays[index] = Replay(tuple(tokens), opened, thinking, answer.reasoning)
        self.messages.append(
            {
                "role": "assistant",
                "content": answer.content,
                **({"reasoning_content": answer.reasoning} if answer.reasoning else {}),
                "tool_calls": [
                    {
                        "id": f"call{index:03}{number:02}",
                        "type": "function",
                        "function": {"name": name, "arguments": arguments},
                    }
                    for number, (name, arguments) in enumerate(answer.calls)
                ],
            }
        )
        return list(tokens)

    def returns(self, result: str) -> None:
        """The results of the latest answer's calls."""
        for call in self.messages[-1]["tool_calls"]:
            self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})


def ten_steps(
    conversation: Conversation, answers: Iterator[Answer], result: str = "cold"
) -> Iterator[tuple[list[int], ...]]:
    """Of each step of a tool loop: its prompt, its answer, and the prompt of the next one."""
    prompt = conversation.prompt()
    for answer in islice(answers, 10):
        tokens = conversation.answers(answer)
        conversation.returns(result)
        following = conversation.prompt()
        yield prompt, tokens, following
        prompt = following
