"""Tiny random checkpoints of embedders and rerankers, as sentence-transformers writes them."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from engine.values.request import Pooling
from measuring.random_checkpoint import VOCAB_SIZE, train_tokenizer, write_checkpoint
from tests.checkpoints import FAMILIES, Family, write_family

END = "<|endoftext|>"
"""What the tokenizer puts behind every text, as that of Qwen3-Embedding does."""

_MODES = {
    Pooling.LAST: "pooling_mode_lasttoken",
    Pooling.MEAN: "pooling_mode_mean_tokens",
    Pooling.FIRST: "pooling_mode_cls_token",
}
PROMPTS = {"query": "the cat sat on the mat and the dog sat on the log: ", "document": ""}


def write_embedder(
    parent: Path, pooling: Pooling = Pooling.LAST, *, normalized: bool = True
) -> tuple[Path, Path]:
    """An embedder, and the generator that it is the body of."""
    generator = write_family(FAMILIES["qwen3"], parent)
    directory = parent / f"embedder-{pooling}-{normalized}"
    shutil.copytree(generator, directory)
    weights = _weights(directory)
    body = {name.removeprefix("model."): w for name, w in weights.items() if "lm_head" not in name}
    assert len(body) < len(weights)
    _write(directory, body, {"architectures": ["Qwen3Model"], "tie_word_embeddings": False})
    modules = ["Transformer", "Pooling", *(["Normalize"] if normalized else [])]
    listed = [
        {"idx": i, "name": str(i), "path": "", "type": f"sentence_transformers.models.{name}"}
        for i, name in enumerate(modules)
    ]
    write_json(directory / "modules.json", listed)
    (directory / "1_Pooling").mkdir()
    modes = {name: way is pooling for way, name in _MODES.items()}
    write_json(directory / "1_Pooling/config.json", {"word_embedding_dimension": 64, **modes})
    said = {"prompts": PROMPTS, "default_prompt_name": None, "similarity_fn_name": "cosine"}
    write_json(directory / "config_sentence_transformers.json", said)
    _end_texts(directory)
    return directory, generator


def write_classifier(parent: Path, labels: int = 1, **config: object) -> tuple[Path, Path]:
    """A reranker with a head of its own, and the generator that has its body."""
    generator = write_family(FAMILIES["qwen3"], parent)
    directory = parent / f"classifier-{labels}"
    shutil.copytree(generator, directory)
    weights = {name: w for name, w in _weights(directory).items() if "lm_head" not in name}
    weights["score.weight"] = mx.random.normal((labels, 64), key=mx.random.key(7))
    _write(directory, weights, {"architectures": ["Qwen3ForSequenceClassification"], **config})
    return directory, generator


def write_llama_classifier(parent: Path) -> tuple[Path, Path]:
    """The same of a family whose rerankers have no format of their own."""
    family = Family("llama", FAMILIES["llama"].config)
    generator = write_family(family, parent)
    directory = parent / "llama-classifier"
    shutil.copytree(generator, directory)
    weights = {name: w for name, w in _weights(directory).items() if "lm_head" not in name}
    weights["score.weight"] = mx.random.normal((1, 64), key=mx.random.key(7))
    _write(directory, weights, {"architectures": ["LlamaForSequenceClassification"]})
    return directory, generator


def write_yes_no(parent: Path, family: Family) -> Path:
    """A generator whose tokenizer has the words yes and no."""
    directory = parent / f"{family.name}-words"
    text = "the cat sat on the mat and the dog sat on the log\nyes\nno\n"
    tokenizer = train_tokenizer([text] * 4, VOCAB_SIZE)
    write_checkpoint(directory, family.config, 0, tokenizer, mx.float32, family.quantization)
    return directory


def write_json(file: Path, value: object) -> None:
    file.write_text(json.dumps(value), "utf-8")


def _weights(directory: Path) -> dict[str, mx.array]:
    weights = mx.load(str(directory / "model.safetensors"))
    assert isinstance(weights, dict)
    return weights


def _write(directory: Path, weights: dict[str, mx.array], more: Mapping[str, Any]) -> None:
    mx.eval(weights)
    aside = directory / "aside.safetensors"
    mx.save_safetensors(str(aside), weights, {"format": "pt"})
    aside.rename(directory / "model.safetensors")
    file = directory / "config.json"
    write_json(file, {**json.loads(file.read_text("utf-8")), **more})


def _end_texts(directory: Path) -> None:
    file = str(directory / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    tokenizer.post_processor = TemplateProcessing(
        single=f"$A {END}",
        pair=f"$A {END} $B {END}",
        special_tokens=[(END, tokenizer.token_to_id(END))],
    )
    tokenizer.save(file)
