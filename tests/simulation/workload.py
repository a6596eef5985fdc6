"""What clients send: prompts that meet and diverge, come back, and are sometimes impossible."""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

from engine.core.step import Limits
from engine.values.images import Image
from engine.values.request import (
    Constraint,
    Grammar,
    GrammarKind,
    Pooling,
    Request,
    SamplingParams,
    ThinkingBudget,
)
from engine.values.tokens import PackedTokens, pack
from tests.simulation.grammars import is_dispensable
from tests.simulation.model import ADAPTERS, IMAGE_SIZES, prepared_image


class Workload:
    """One seed's clients."""

    def __init__(
        self,
        random: Random,
        vocab_size: int,
        block_size: int,
        background_rates: Sequence[float],
    ) -> None:
        self._random = random
        self._vocab_size = vocab_size
        self._block_size = block_size
        self._max_tokens = random.choice([[0, 1, 2, 5], [5, 20], [30, 60]])
        self._client_weights = random.choice([[1], [1, 1, 1], [20, 1, 1, 1]])
        self._flood = random.choice([None, None, "0"])  # who always wants much at a time
        self._return_rate = random.choice([0.2, 0.9, 0.95])
        self._pooled_rate = random.choice([0.0, 0.1, 0.6])
        self._salt_rate = random.choice([0.0, 0.25])
        self._adapters = random.choice([[""], ["", *ADAPTERS]])
        self._prefixes = [self.tokens(3 * block_size, 8 * block_size) for _ in range(4)]
        self._sent = deque[list[int]](maxlen=3)
        self._background = Random(str(self._prefixes))
        self._answers = Random(f"answers {self._prefixes}")  # of requests in the background
        self._background_rate = self._background.choice(background_rates)
        self._images: Random | None = None
        self._image_rate = 0.0
        self._has_whole_images = False
        self._most = 0  # tokens of a prompt

    def send_images(self, random: Random, *, is_whole: bool) -> None:
        """Have clients send images from now on, in a share of their prompts."""
        self._images, self._image_rate = random, random.choice([0.2, 0.5, 0.9])
        self._has_whole_images = is_whole

    def request(self, limits: Limits) -> Request:
        """One that such an engine may serve, or must refuse."""
        random = self._random
        most = min(limits.max_context_tokens, limits.arena_tokens)
        self._most = most
        prompt = self._prompt()[: most if random.random() < 0.9 else None]
        max_tokens = random.choice(self._max_tokens)
        client = self._client()
        if random.random() < 0.9:
            max_tokens = min(max_tokens, most - len(prompt))
        if self._background.random() < self._background_rate:
            return self._background_request(prompt, client)
        if random.random() < self._pooled_rate:
            return self._pooled_request(prompt, client)
        tokens, images = self._placed(prompt)
        if images:
            max_tokens = max(min(max_tokens, most - len(tokens)), 0)
        return Request(
            id=str(random.getrandbits(64)),
            prompt=tokens,
            images=images,
            max_tokens=max_tokens,
            sampling=SamplingParams(
                seed=random.choice([None, 1]),
                min_tokens=max(min(random.choice([0, 0, 3]), max_tokens), 0),
            ),
            stop=random.choice([(), (), ("ab",), ("ca", "b")]),
            ignore_eos=random.random() < 0.5,
            n=random.choice([1, 1, 1, 2, 4] if client != self._flood else [4, 8]),
            client=client,
            priority=random.choice([0, 0, 0, -1, 1]),
            cache_salt="salt" if random.random() < self._salt_rate else "",
            adapter=random.choice(self._adapters),
            prompt_logprobs=random.choice([None] * 9 + [1]),
            **self._guided(),
        )

    def _background_request(self, prompt: list[int], client: str) -> Request:
        """A request that is computed while nothing else is: a prompt alone, which is perhaps kept
        from eviction, or one with answers.
        """
        random = self._background
        request = replace(
            self._without_answer(prompt, client, random),
            adapter=random.choice(self._adapters),
            is_background=True,
            pin=random.random() < 0.3,
        )
        if request.pin or self._answers.random() < 0.5:
            return request
        most_tokens, n = self._answers.choice([1, 5, 30]), self._answers.choice([1, 1, 3])
        return replace(request, max_tokens=most_tokens, n=n, ignore_eos=True)

    def _pooled_request(self, prompt: list[int], client: str) -> Request:
        """A text to embed, of which others begin like some, or, for all that is known, none."""
        random = self._random
        return replace(
            self._without_answer(prompt, client, random),
            pooling=random.choice(list(Pooling)),
            shared_tokens=random.choice([None, 0, random.randint(0, len(prompt) + 3)]),
        )

    def _without_answer(self, prompt: list[int], client: str, random: Random) -> Request:
        tokens, images = self._placed(prompt)
        return Request(
            id=str(random.getrandbits(64)),
            prompt=tokens,
            images=images,
            max_tokens=0,
            client=client,
            cache_salt="salt" if random.random() < self._salt_rate else "",
        )

    def _placed(self, prompt: list[int]) -> tuple[PackedTokens, tuple[Image, ...]]:
        """The tokens and the images of a prompt in which -1 - n stands for image n. Most prompts
        that are too long lose their ends, and most that end with an image get one token more.
        """
        random, size = self._images, self._vocab_size
        if random is None:
            return pack(prompt), ()
        is_long = random.random() < 0.05
        ids, images = list[int](), list[Image]()
        for item in prompt:
            if item >= 0:
                added, found = [item], []
            else:
                image = prepared_image(-1 - item, size, self._has_whole_images)
                added, found = list(image.tokens), [image.at(len(ids))]
            if len(ids) + len(added) >= self._most and not is_long:
                break
            ids += added
            images += found
        if not ids or (images and images[-1].stop == len(ids) and random.random() < 0.95):
            ids.append(0)
        return pack(ids), tuple(images)

    def _with_images(self, prompt: list[int]) -> list[int]:
        """A prompt, perhaps with some images at places of their own."""
        random = self._images
        if random is None or random.random() >= self._image_rate:
            return prompt
        for _ in range(random.choice([1, 1, 2, 4])):
            at = random.randint(len(prompt) // 3, len(prompt))
            prompt.insert(at, -1 - random.randrange(len(IMAGE_SIZES)))
        return prompt

    def tokens(self, least: int, most: int) -> list[int]:
        count = self._random.randint(least, max(least, most))
        return [self._random.randrange(self._vocab_size) for _ in range(count)]

    def _thinking_budget(self) -> ThinkingBudget | None:
        if self._random.random() < 0.4:
            return None
        return ThinkingBudget(self._random.choice([0, 1, 3, 9]), (), tuple(self.tokens(1, 3)))

    def _guided(self) -> dict[str, Any]:
        """A thinking budget or a constraint: unit tests have both in one request."""
        if self._random.random() < 0.5:
            return {"thinking_budget": self._thinking_budget()}
        return {"constraint": self._constraint()}

    def _constraint(self) -> Constraint | None:
        """A grammar that holds from the start on, or again and again after a marker."""
        if self._random.random() < 0.4:
            return None
        grammar = Grammar(GrammarKind.REGEX, str(self._random.randrange(5)))
        behind = self._random.choice([(), (), tuple(self.tokens(1, 1))])
        weaker = (None,) if is_dispensable(grammar) else ()
        return Constraint(grammar, "regex", behind=behind, repeats=bool(behind), weaker=weaker)

    def _client(self) -> str:
        """One of several, of which the first may send most of what there is."""
        weights = self._client_weights
        return str(self._random.choices(range(len(weights)), weights)[0])

    def _prompt(self) -> list[int]:
        """Often one of the last few, or the beginning of something seen before and another end."""
        random = self._random
        if self._sent and random.random() < self._return_rate:
            return list(random.choice(self._sent))
        prompt = list(random.choice(self._prefixes))
        cut = random.randint(len(prompt) // 3 + 1, len(prompt))
        prompt = self._with_images(prompt[:cut] + self.tokens(0, 2 * self._block_size))
        if random.random() < 0.3:
            self._prefixes[random.randrange(len(self._prefixes))] = prompt
        self._sent.append(prompt)
        return prompt


class PinningWorkload(Workload):
    """Clients whose background requests pin short prefixes, next to answers that fill the arena:
    requests find too few blocks until something is unpinned.
    """

    def __init__(
        self, random: Random, vocab_size: int, block_size: int, background_rates: Sequence[float]
    ) -> None:
        super().__init__(random, vocab_size, block_size, background_rates)
        self._max_tokens = [5, 1000]  # no more than fit into the arena
        self._pooled_rate = 0.0
        self._client_weights = [1, 1, 1]

    def _background_request(self, prompt: list[int], client: str) -> Request:
        most = self._background.choice([1, 2, 4]) * self._block_size
        request = super()._background_request(prompt[:most], client)
        return replace(request, pin=True)
