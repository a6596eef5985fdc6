"""What an assistant says between its reasoning and a call, where a template has no place for it."""

from dataclasses import replace
from pathlib import Path

import pytest
from mlx_lm.utils import load_tokenizer

from server.dialects.chat.schema import ChatRequest
from server.errors import ApiError
from server.generation.conversation import Conversation
from server.generation.history import Replays
from server.generation.plan import AnswerPlanner
from server.generation.prompt import PromptEncoder
from server.settings.models import ConversationSettings
from tests.answering import opened
from tests.checkpoints import FAMILIES, write_family
from tests.contract.fake_engine import FakeEngine

UNTOOLED = ConversationSettings(tool_parser="none")
_CALLS = "{%- for call in m.tool_calls or [] %}[call {{ call.function.name }}]{%- endfor %}"
BOTH = (
    "{%- for m in messages %}[{{ m.role }}][thought {{ m.reasoning }}]{{ m.content }}"
    + _CALLS
    + "{%- endfor %}"
)
ONE_TEXT = (  # as gpt-oss's
    "{%- for m in messages %}[{{ m.role }}]"
    "{%- if 'tool_calls' in m %}"
    "{%- if m.content and m.thinking %}{{- raise_exception('not both') }}{%- endif %}"
    "[thought {{ m.content or m.thinking }}]" + _CALLS + "{%- else %}{{ m.content }}{%- endif %}"
    "{%- endfor %}"
)
NO_THOUGHTS = (
    "{%- for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{%- if m.tool_calls and m.thinking %}{{- raise_exception('never both') }}{%- endif %}"
    + _CALLS
    + "{%- endfor %}"
)


def encoder(directory: Path, template: str) -> PromptEncoder:
    wrapper = load_tokenizer(write_family(FAMILIES["qwen3"], directory))
    wrapper.chat_template = template
    card = replace(FakeEngine().card, vocab_size=4096, max_context_tokens=4096, arena_tokens=4096)
    tokenizer = opened(wrapper, 4096)
    return PromptEncoder(tokenizer, AnswerPlanner(tokenizer, UNTOOLED), card)


def history(**said: str) -> Conversation:
    call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "Where?"},
        {"role": "assistant", "tool_calls": [call], **said},
        {"role": "tool", "tool_call_id": "a", "content": "There."},
    ]
    return ChatRequest.model_validate({"messages": messages}).conversation


def rendered(prompts: PromptEncoder, chat: Conversation) -> str:
    return prompts.decode(prompts.chat(chat, Replays(), "").tokens, "tokens")


@pytest.mark.parametrize(
    ("template", "assistant"),
    [
        (BOTH, "[thought Hm.]I look.[call look]"),
        (ONE_TEXT, "[thought Hm.\n\nI look.][call look]"),
    ],
)
def test_reasoning_and_a_preamble_both_reach_the_model(
    tmp_path: Path, template: str, assistant: str
) -> None:
    prompts = encoder(tmp_path, template)
    said = rendered(prompts, history(reasoning_content="Hm.", content="I look."))
    assert f"[assistant]{assistant}[tool]" in said


@pytest.mark.parametrize("said", [{"reasoning": "Hm."}, {"content": "Hm."}], ids=str)
def test_one_of_them_alone_stays_what_it_is(tmp_path: Path, said: dict[str, str]) -> None:
    prompts = encoder(tmp_path, ONE_TEXT)
    text = rendered(prompts, history(**said))
    assert text == "[user]Where?[assistant][thought Hm.][call look][tool]There."


def test_a_template_that_takes_neither_refuses_in_its_own_words(tmp_path: Path) -> None:
    prompts = encoder(tmp_path, NO_THOUGHTS)
    with pytest.raises(ApiError, match="never both"):
        rendered(prompts, history(reasoning_content="Hm.", content="I look."))
