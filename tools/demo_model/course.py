"""The two courses of training: from random weights, and from the weights of a checkpoint."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import mlx.core as mx
from transformers import PreTrainedTokenizerFast

from tools.demo_model.curriculum import FROM_NOTHING, FROM_WEIGHTS, Stages
from tools.demo_model.publish import read_tokenizer, read_weights
from tools.demo_model.tokens import train_tokenizer
from tools.demo_model.train import Batch, Rates, Trainer, batches
from tools.demo_model.words import split_words


@dataclass(frozen=True, slots=True)
class Course:
    """A model that is to be trained, its curriculum, and the number of steps."""

    trainer: Trainer
    tokenizer: PreTrainedTokenizerFast
    stages: Stages
    steps: int
    seed: int

    def lessons(self) -> Iterator[Sequence[Batch]]:
        """The batches of the steps that are left."""
        words, _ = split_words()
        done = self.trainer.step
        drawn = batches(self.tokenizer, words, self.stages, self.seed, done)
        return islice(drawn, self.steps - done)


def from_nothing(steps: int, seed: int) -> Course:
    """A course from random weights, with a tokenizer of its own and high learning rates."""
    mx.set_default_device(mx.cpu)
    words, _ = split_words()
    rates = Rates(steps, muon=0.02, adam=2e-3, warmup_steps=60, decay_share=0.3)
    return Course(Trainer(rates, seed), train_tokenizer(words, seed), FROM_NOTHING, steps, seed)


def from_checkpoint(source: Path, steps: int, seed: int) -> Course:
    """A course from a checkpoint's weights and tokenizer. Rates are lower and decay for longer."""
    mx.set_default_device(mx.cpu)
    rates = Rates(steps, muon=0.01, adam=1e-3, warmup_steps=30, decay_share=0.8)
    trainer = Trainer(rates, seed)
    trainer.begin_with(read_weights(source))
    return Course(trainer, read_tokenizer(source), FROM_WEIGHTS, steps, seed)
