"""Images in prompts, rendered by real tokenizers for templates of many kinds: every image stands
where its message has it, whatever becomes of the messages.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from random import Random
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from engine.text.tokenizer import CheckpointTokenizer
from engine.values.images import Image, ImageInput, PreparedImage
from engine.values.model import TemplateKind
from measuring.random_checkpoint import tiny_tokenizer
from server.generation.conversation import Conversation, ImageData, ImagePart, Message, Part, Text
from server.generation.history import Replays
from server.generation.plan import AnswerPlanner
from server.generation.prompt import ChatPrompt, PromptEncoder
from server.generation.tools import Tool, ToolCall, function_tool
from server.settings.models import ConversationSettings
from tests.contract.fake_engine import FakeEngine
from tests.profiles import examples
from tests.unit.test_template_traits import SAME, SYSTEMS

PLACEHOLDER = "<|image|>"
N_TOKENS = 9999


def _parts(kind: str) -> str:
    return (
        "{%- for p in m.content %}{%- if p.type == '" + kind + "' %}" + PLACEHOLDER + "{%- else %}"
        "{{- p.text }}{%- endif %}{%- endfor %}"
    )


def _either(parts: str) -> str:
    text = "{%- if m.content is string %}{{- m.content }}{%- else %}"
    return text + parts + "{%- endif %}"


FORMS: Mapping[str, str] = {
    "image": _either(_parts("image")),
    "image_url": _either(_parts("image_url")),
    "parts": _parts("image"),
    "text": "{{- '' + m.content }}",
}
"""How a template takes a message's content."""

TEXT_ALONE = _either(
    "{{- m.content|selectattr('type', 'equalto', 'text')|map(attribute='text')|join }}"
)
RESULTS: Mapping[str, Mapping[str, str]] = {
    "shown": FORMS,
    "texts": dict.fromkeys(("image", "image_url", "parts"), TEXT_ALONE),
    "strings": dict.fromkeys(("image", "image_url"), "{{- '' + m.content }}"),
    "printed": dict.fromkeys(("image", "image_url"), "{{- m.content|string }}"),
}
"""How a template takes the content of a tool's result, by the form of the others."""


@dataclass(frozen=True)
class Kind:
    """A template, by the names of its parts; one that knows no tools is given them as text."""

    form: str
    results: str
    same: str
    systems: str
    knows_tools: bool

    @property
    def template(self) -> str:
        tools = "{%- for t in tools or [] %}{{- t|tojson }}{%- endfor %}"
        results = RESULTS[self.results][self.form]
        return (
            SAME[self.same]
            + SYSTEMS[self.systems]
            + (tools if self.knows_tools else "")
            + "{%- for m in messages %}[{{ m.role }}]"
            + "{%- if m.role == 'tool' %}"
            + results
            + "{%- else %}"
            + FORMS[self.form]
            + "{%- endif %}"
            + "{%- for c in m.tool_calls or [] %}<{{ c.function.name }}>{%- endfor %}"
            + "{%- endfor %}"
        )


KINDS = st.builds(
    Kind,
    form=st.sampled_from([*FORMS]),
    results=st.sampled_from([*RESULTS]),
    same=st.sampled_from([*SAME]),
    systems=st.sampled_from([*SYSTEMS]),
    knows_tools=st.booleans(),
).filter(lambda kind: kind.form in RESULTS[kind.results])


@cache
def encoder(kind: Kind) -> PromptEncoder:
    backend = tiny_tokenizer()
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    fast.add_special_tokens({"additional_special_tokens": [PLACEHOLDER]})
    fast.chat_template = kind.template
    placeholder = fast.convert_tokens_to_ids(PLACEHOLDER)
    tokenizer = CheckpointTokenizer(fast, TemplateKind(), N_TOKENS, placeholder)
    card = replace(
        FakeEngine().card,
        vocab_size=len(fast),
        max_context_tokens=N_TOKENS,
        arena_tokens=N_TOKENS,
        images=ImageInput(placeholder, 64, 1, 8, 1 << 20),
    )
    parser: Literal["none", "generic"] = "none" if kind.knows_tools else "generic"
    planner = AnswerPlanner(tokenizer, ConversationSettings(tool_parser=parser))
    return PromptEncoder(tokenizer, planner, card)


def placeholder_of(prompts: PromptEncoder) -> int:
    (token_id,) = prompts.text(PLACEHOLDER, add_special_tokens=False)
    return token_id


def image(prompts: PromptEncoder, n_tokens: int) -> ImagePart:
    """An image by which the number of its tokens tells it from others."""
    begin, end = prompts.text("<", add_special_tokens=False) + prompts.text(
        ">", add_special_tokens=False
    )
    shown = Image(bytes([n_tokens]) * 32, ((1, n_tokens),), (1, n_tokens), f"{n_tokens}.npy")
    tokens = (begin, *[placeholder_of(prompts)] * n_tokens, end)
    return ImagePart(ImageData(""), original=shown.digest, prepared=PreparedImage(shown, tokens))


def read_back(prompts: PromptEncoder, prompt: ChatPrompt) -> str:
    """The text of a prompt, with the number of its tokens in place of each image. No other token is
    a placeholder.
    """
    pieces, end = list[str](), 0
    for each in prompt.images:
        begin, stop = each.start - 1, each.stop + 1
        pieces += [prompts.decode(prompt.tokens[end:begin], "tokens"), f"[{each.n_tokens}]"]
        assert set(prompt.tokens[each.start : each.stop]) == {placeholder_of(prompts)}
        end = stop
    n_shown = sum(each.n_tokens for each in prompt.images)
    assert prompt.tokens.count(placeholder_of(prompts)) == n_shown
    return "".join([*pieces, prompts.decode(prompt.tokens[end:], "tokens")])


def found(text: str) -> list[str]:
    """The words and images of a text, in order."""
    return re.findall(r"word\d+\.|\[\d+\]", text)


class Story:
    """A conversation that is made turn by turn. An image has as many tokens as its number."""

    def __init__(self, kind: Kind, random: Random) -> None:
        self.kind = kind
        self.prompts = encoder(kind)
        self.messages = list[Message]()
        self._memory = Replays()
        self._random = random
        self._n_images = self._n_words = self._n_calls = 0

    def tell(self, role: Literal["system", "user", "assistant"]) -> None:
        """What a role says, with images unless it is the assistant's. The text of a system message
        comes first: where it becomes another's, its images follow its text.
        """
        n_images = 0 if role == "assistant" else self._random.randint(0, 2)
        place = 0 if role == "system" else self._random.randint(0, n_images)
        self.messages.append(Message(role=role, parts=self._parts(n_images, place)))

    def look(self, tools: Sequence[Tool] = ()) -> None:
        """A call, and its result, which makes the tools known."""
        self._n_calls += 1
        id = f"call{self._n_calls:05}"
        n_images = self._random.randint(0, 2)
        parts = self._parts(n_images, self._random.randint(0, n_images))
        self.messages += [
            Message(role="assistant", calls=[ToolCall(id, "look", "{}")]),
            Message(role="tool", parts=parts, answered_call=id, tools=tools),
        ]

    def _parts(self, n_images: int, place: int) -> list[Part]:
        parts = list[Part]()
        for _ in range(n_images):
            self._n_images += 1
            parts.append(image(self.prompts, self._n_images))
        self._n_words += 1
        spoilt = PLACEHOLDER if self._random.random() < 0.2 else ""
        parts.insert(place, Text(f"word{self._n_words}.{spoilt}"))
        return parts

    @property
    def expected(self) -> list[str]:
        """The words and images in the order in which the prompt has them: as they were told, or the
        images of results in a row after their words.
        """
        are_apart = self.prompts.traits.result_images == "user" and self.kind.knows_tools
        names, waiting = list[str](), list[str]()
        for message in self.messages:
            is_late = are_apart and message.role == "tool"
            if not is_late:
                names += waiting
                waiting.clear()
            for part in message.parts:
                if isinstance(part, Text):
                    names.append(f"{part.text.partition('.')[0]}.")
                else:
                    assert part.prepared is not None
                    name = f"[{part.prepared.image.n_tokens}]"
                    (waiting if is_late else names).append(name)
        return names + waiting

    def prompt(self, tools: Sequence[Tool] = ()) -> ChatPrompt:
        chat = Conversation(messages=self.messages, tools=tools, add_generation_prompt=False)
        return self.prompts.chat(chat, self._memory, "")


STEPS = st.lists(st.sampled_from(["system", "user", "assistant", "look"]), min_size=1, max_size=7)


@given(KINDS, STEPS, st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=examples(300))
def test_every_image_stands_where_its_message_has_it(
    kind: Kind, steps: list[Literal["system", "user", "assistant", "look"]], random: Random
) -> None:
    """None is left out or in another place, and a placeholder that a client writes is text."""
    story = Story(kind, random)
    for step in steps:
        if step == "look":
            story.look()
        else:
            story.tell(step)
    prompt = story.prompt()
    text = read_back(story.prompts, prompt)
    assert found(text) == story.expected
    told = [part for message in story.messages for part in message.parts]
    spoilt = [part for part in told if isinstance(part, Text) and PLACEHOLDER in part.text]
    assert text.count(PLACEHOLDER) == len(spoilt)


def tool(name: str) -> Tool:
    parameters = {"type": "object", "properties": {f"{name}_argument": {"type": "string"}}}
    return function_tool(name, "does something", parameters)


@pytest.mark.parametrize("knows_tools", [True, False])
@pytest.mark.parametrize("results", RESULTS)
def test_a_prompt_with_images_only_grows_whatever_becomes_of_the_tools(
    results: str, knows_tools: bool
) -> None:
    """Tools become known late, by results with images among them."""
    for seed in range(examples(30)):
        random = Random(seed)
        kind = Kind("image", results, "apart", "system", knows_tools)
        story, pool = Story(kind, random), [tool(f"tool_{index}") for index in range(6)]
        declared = random.sample(pool, 2)
        story.tell("user")
        before = story.prompt(declared)
        for turn in range(5):
            fetched = random.sample(pool, random.randint(0, 2))
            story.look(fetched)
            if random.random() < 0.5:
                story.tell("assistant")
                story.tell("user")
            declared = random.sample(declared, len(declared))
            now = story.prompt(declared)
            said = f"seed {seed}, turn {turn}"
            assert now.tokens[: len(before.tokens)] == before.tokens, said
            assert now.images[: len(before.images)] == before.images, said
            text = read_back(story.prompts, now)
            assert found(text) == story.expected, said
            assert all(f"{each.name}_argument" in text for each in (*declared, *fetched)), said
            before = now
