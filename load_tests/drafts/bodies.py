"""What is asked: bodies of chat completions, without the model."""

import random
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from load_tests.lexicon import WORDS
from load_tests.scenarios.workloads import text
from tools.demo_model.sentences import sentence
from tools.demo_model.tasks.tool_use import ToolSteps
from tools.demo_model.words import split_words

Body: TypeAlias = Mapping[str, Any]

EDITED_EVERY = 16
SENTENCES = 3  # the demonstration model repeats so many without a mistake, and four mostly
PREDICTED_EVERY = 8  # words, of some twenty
MOST_TOKENS = 800  # of an answer that a grammar or the model ends


def object_of(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """The JSON schema of an object with these fields, all of them and no others."""
    return {
        "type": "object",
        "properties": fields,
        "required": list(fields),
        "additionalProperties": False,
    }


RECORD = object_of(
    {
        "shipment_confirmation_state": {
            "enum": (
                "waiting_for_confirmation",
                "confirmed_by_customer",
                "cancelled_by_customer",
            )
        },
        "preferred_carrier_service": {
            "enum": ("international_express", "domestic_standard", "collected_in_person")
        },
        "requires_signature_on_delivery": {"type": "boolean"},
        "customer_notification_channel": {"enum": ("electronic_mail", "text_message", "telephone")},
    }
)
"""Long keys and few values: some 200 characters."""


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def sampled(seed: int) -> Body:
    """Temperature 1 and a seed, so that the same answer comes twice."""
    return {"temperature": 1, "seed": seed}


def random_chat(rng: random.Random, words: int, output_tokens: int) -> Body:
    """A prompt of words in no order, and an answer of so many tokens."""
    return {
        "messages": [user(text(rng, words))],
        "max_tokens": output_tokens,
        "ignore_eos": True,
        **sampled(rng.randrange(2**31)),
    }


def greedy_chat(rng: random.Random, words: int, output_tokens: int) -> Body:
    return {**random_chat(rng, words, output_tokens), "temperature": 0}


def copied(rng: random.Random, words: int, output_tokens: int) -> Body:
    """For the successor model: words in order, and the first of them again to go on from."""
    return _continued(_in_order(rng, words), output_tokens)


def edited(rng: random.Random, words: int, output_tokens: int) -> Body:
    """The same with another word at every 16th place: there the answer is not as the prompt."""
    listed = _in_order(rng, words)
    for place in range(EDITED_EVERY, words, EDITED_EVERY):
        listed[place] = rng.choice(WORDS)
    return _continued(listed, output_tokens)


def _in_order(rng: random.Random, words: int) -> list[str]:
    start = rng.randrange(len(WORDS) - words)
    return list(WORDS[start : start + words])


def _continued(words: Sequence[str], output_tokens: int) -> Body:
    said = {"role": "assistant", "content": f"{words[0]} "}
    return {
        "messages": [user("".join(f"{word} " for word in words)), said],
        "continue_final_message": True,
        "max_tokens": output_tokens,
        "temperature": 0,
    }


def repeated(rng: random.Random) -> Body:
    """For the demonstration model: sentences to be repeated word for word."""
    return _to_repeat(_sentences(rng))


def repeated_with_edits(rng: random.Random) -> Body:
    """The same with a prediction in which every eighth word is another one."""
    words = _sentences(rng)
    predicted = list(words)
    for place in range(PREDICTED_EVERY - 1, len(words), PREDICTED_EVERY):
        predicted[place] = rng.choice(WORDS)
    content = " ".join(predicted)
    return {**_to_repeat(words), "prediction": {"type": "content", "content": content}}


def _sentences(rng: random.Random) -> list[str]:
    learned, _ = split_words()
    return " ".join(sentence(learned, rng) for _ in range(SENTENCES)).split()


def _to_repeat(words: Sequence[str]) -> Body:
    return {
        "messages": [user(f"Repeat: {' '.join(words)}")],
        "max_tokens": MOST_TOKENS,
        "temperature": 0,
    }


def records(rng: random.Random, count: int) -> Body:
    """So many lines of JSON. The random model writes each of their characters as a token."""
    lines = {"type": "array", "items": RECORD, "minItems": count, "maxItems": count}
    schema = object_of({"shipment_records": lines})
    named = {"name": "shipments", "schema": schema, "strict": True}
    return {
        "messages": [user(text(rng, 32))],
        "response_format": {"type": "json_schema", "json_schema": named},
        "max_tokens": MOST_TOKENS,
        **sampled(rng.randrange(2**31)),
    }


def called(rng: random.Random) -> Body:
    """A call of a tool with long names, which the request demands."""
    function = {
        "name": "register_shipment_preferences",
        "description": "Registers how a shipment goes.",
        "parameters": RECORD,
        "strict": True,
    }
    return {
        "messages": [user(text(rng, 32))],
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": MOST_TOKENS,
        **sampled(rng.randrange(2**31)),
    }


def tool_loop(rng: random.Random) -> list[Body]:
    """For the demonstration model: what an agent asks one after the other, as each result names the
    next call.
    """
    learned, _ = split_words()
    exchange = ToolSteps().exchange(learned, rng)
    said = [i for i, each in enumerate(exchange.messages) if each["role"] == "assistant"]
    return [
        {
            "messages": list(exchange.messages[:place]),
            "tools": list(exchange.tools),
            "max_tokens": MOST_TOKENS,
            "temperature": 0,
        }
        for place in said
    ]


def conversation(rng: random.Random, turns: int, words: int, output_tokens: int) -> list[Body]:
    """What a chat asks turn by turn. The answers that it goes on from are written already, so that
    it asks the same each time.
    """
    messages: list[dict[str, str]] = []
    asked = list[Body]()
    for _ in range(turns):
        messages.append(user(text(rng, words)))
        asked.append({**random_chat(rng, 0, output_tokens), "messages": list(messages)})
        messages.append({"role": "assistant", "content": text(rng, output_tokens)})
    return asked
