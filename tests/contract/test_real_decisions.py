"""Decisions of real models over a socket: their probabilities are those of mlx-lm's own forwards
over each whole conversation with a choice as its answer.
"""

import random
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import httpx
import mlx.core as mx
import numpy as np
import pytest
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from engine.values.settings import EngineConfig
from server.settings import Settings
from tests.checkpoints import FAMILIES, write_family
from tests.contract.daemon import running
from tests.contract.scripted import StrictClient, strict_client
from tests.hosting import loaded

pytestmark = pytest.mark.process

FAMILIES_TRIED = ("qwen3", "gemma3_text", "qwen3_next", "rwkv7")
"""Caches of blocks, of windows, of blocks and recurrent states, and of states alone."""

TEXT = "the cat sat on the mat and the dog sat on the log " * 3
WORDS = ("the cat", "the dog", "a", "the", "New", "New York", "mat", "the cat sat on a log", "no")


class Served(NamedTuple):
    url: str
    client: StrictClient
    model: Module
    tokenizer: PreTrainedTokenizerBase


@pytest.fixture(scope="module", params=FAMILIES_TRIED)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    folder = write_family(FAMILIES[request.param], tmp_path_factory.mktemp("models"))
    config = EngineConfig(model=str(folder), kv_cache_bytes=16 << 20, block_size=8)
    engine = loaded(config)
    settings = Settings(port=0, model=str(folder), served_model_name=("tiny",))
    with running(engine, settings) as url, strict_client(url) as client:
        yield Served(url, client, load_model(folder)[0], AutoTokenizer.from_pretrained(folder))


def question(generator: random.Random, at: int) -> dict[str, Any]:
    values = generator.sample(WORDS, generator.randint(2, len(WORDS)))
    match at % 3:
        case 0:
            return {"type": "predicate", "instructions": f"The {values[0]} sat on {values[1]}."}
        case 1:
            choices = [{"value": value} for value in values]
            return {"type": "choice", "instructions": "Who sat there?", "choices": choices}
        case _:
            levels = [{"label": value, "description": "so"} for value in values]
            return {"type": "score", "instructions": "How much?", "levels": levels}


def values_of(answer: Any) -> list[str]:
    match answer.type:
        case "predicate":
            return ["Yes", "No"]
        case "choice":
            return [one.value for one in answer.probabilities]
        case _:
            return [one.label for one in answer.probabilities]


def found_of(answer: Any) -> list[float]:
    if answer.type == "predicate":
        return [answer.probability, 1 - answer.probability]
    return [one.probability for one in answer.probabilities]


def words_of(question: dict[str, Any]) -> str:
    """The words of a question, as they stand after the input."""
    match question["type"]:
        case "predicate":
            statement = question["instructions"]
            return (
                f"Statement: {statement}\n\nIs this statement true of the above? Answer Yes or No."
            )
        case "choice":
            listed, kind = "\n".join(f"- {one['value']}" for one in question["choices"]), "choices"
            before = "Choices:"
        case _:
            listed = "\n".join(f"- {one['label']}: so" for one in question["levels"])
            kind, before = "levels", "Levels, from the lowest to the highest:"
    return (
        f"Question: {question['instructions']}\n\n{before}\n{listed}\n\n"
        f"Answer with one of these {kind}, exactly as it is written, and nothing else."
    )


def expected(served: Served, question: dict[str, Any], choices: Sequence[str]) -> list[float]:
    """By one forward of mlx-lm's model over the whole conversation for each choice. Where another
    choice goes on, the answer's end is its last token.
    """
    end = served.tokenizer.eos_token_id
    totals = list[float]()
    for choice in choices:
        messages = [
            {"role": "user", "content": f"{TEXT.strip()}\n\n{words_of(question)}"},
            {"role": "assistant", "content": choice},
        ]
        tokens = served.tokenizer.apply_chat_template(
            messages, continue_final_message=True, tokenize=True, return_dict=False
        )
        if any(other != choice and other.startswith(choice) for other in choices):
            tokens = [*tokens, end]
        cache = make_prompt_cache(served.model)
        logits = served.model(mx.array([tokens]), cache=cache)[0].astype(mx.float32)
        logprobs = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
        totals.append(float(logprobs[np.arange(len(tokens) - 1), tokens[1:]].sum(dtype=np.float64)))
    weights = np.exp(np.array(totals) - max(totals))
    return list(weights / weights.sum())


def test_probabilities_are_those_of_mlx_lm_s_forwards(served: Served) -> None:
    """Of many questions at once, and again from the cache."""
    generator = random.Random(7)
    questions = [question(generator, at) for at in range(9)]
    cold, warm = (
        served.client.decisions.create(model="tiny", input=TEXT.strip(), questions=questions)
        for _ in range(2)
    )
    for asked, first, second in zip(questions, cold.answers, warm.answers, strict=True):
        wanted = expected(served, asked, values_of(first))
        assert found_of(first) == pytest.approx(wanted, abs=2e-4, rel=2e-3), asked
        assert found_of(second) == pytest.approx(wanted, abs=2e-4, rel=2e-3), asked
    usage = warm.usage
    assert usage.input_tokens == cold.usage.input_tokens
    n_text_tokens = len(served.tokenizer.encode(TEXT.strip()))
    assert usage.input_tokens_details.cached_tokens >= n_text_tokens - 1
    assert cold.usage.input_tokens_details.cached_tokens < usage.input_tokens // 2


def test_a_question_alone_has_the_same_probabilities(served: Served) -> None:
    generator = random.Random(8)
    questions = [question(generator, at) for at in range(6)]
    create = served.client.decisions.create
    together = create(model="tiny", input=TEXT, questions=questions).answers
    for asked, answer in zip(questions, together, strict=True):
        httpx.post(f"{served.url}/admin/cache/clear").raise_for_status()
        (alone,) = create(model="tiny", input=TEXT, questions=[asked]).answers
        assert found_of(alone) == pytest.approx(found_of(answer), abs=2e-4, rel=2e-3)


def test_the_text_is_computed_once(served: Served) -> None:
    """Of a hundred questions: what is computed is the text, the questions and the choices."""
    httpx.post(f"{served.url}/admin/cache/clear").raise_for_status()
    before = _computed(served.url)
    questions = [
        {"type": "predicate", "instructions": f"It says {at} times that the cat sat."}
        for at in range(100)
    ]
    usage = served.client.decisions.create(model="tiny", input=TEXT * 2, questions=questions).usage
    n_choices = 100 * len("YesNo")  # tokens at most
    assert _computed(served.url) - before <= usage.input_tokens + n_choices


def _computed(url: str) -> int:
    page = httpx.get(f"{url}/metrics").text
    (found,) = re.findall(r'prompt_tokens_total\{.*source="computed".*\} ([\d.e+]+)', page)
    return int(float(found))
