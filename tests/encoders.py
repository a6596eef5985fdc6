"""Tiny encoders and their classifiers, with weights that are the same wherever they are written.

    python -m tests.encoders

in an environment with torch and transformers, writes what transformers computes with them to
tests/golden/encoder_vectors.json. Imports no MLX.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing

VECTORS = Path(__file__).parent / "golden/encoder_vectors.json"

HIDDEN, WIDE, HEADS, LAYERS, POSITIONS = 32, 48, 4, 4, 64
SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")
WORDS = [f"w{index}" for index in range(96)]
VOCAB_SIZE = len(SPECIAL) + len(WORDS)
TEXTS = [" ".join(WORDS[(7 * n + 5 * i + i * i) % 96] for i in range(n)) for n in (1, 5, 20, 57)]
PAIRS = [(TEXTS[1], TEXTS[2]), (TEXTS[2], TEXTS[0]), (TEXTS[0], TEXTS[1])]

_COMMON: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN,
    "intermediate_size": WIDE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "dtype": "float32",
}
_BERT = {**_COMMON, "hidden_act": "gelu", "layer_norm_eps": 1e-6, "max_position_embeddings": 64}
_ROBERTA = {**_BERT, "max_position_embeddings": POSITIONS + 2, "type_vocab_size": 1}
_MODERN = {
    **_COMMON,
    "hidden_activation": "gelu",
    "max_position_embeddings": POSITIONS,
    "local_attention": 16,
    "cls_token_id": 0,
    "sep_token_id": 2,
}
_BASES = {
    "full_attention": {"rope_type": "default", "rope_theta": 8000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
}


@dataclass(frozen=True)
class Kind:
    """A kind of encoder: the beginning of its class's name, and its config.json."""

    name: str
    config: Mapping[str, Any]
    labels: int = 1  # of its classifier
    classifier: Mapping[str, Any] = field(default_factory=dict)  # more of its config.json

    @property
    def model_type(self) -> str:
        return str(self.config["model_type"])


KINDS = {
    "bert": Kind("Bert", {**_BERT, "model_type": "bert", "type_vocab_size": 2}, labels=2),
    "roberta": Kind("Roberta", {**_ROBERTA, "model_type": "roberta"}),
    "xlm-roberta": Kind("XLMRoberta", {**_ROBERTA, "model_type": "xlm-roberta"}),
    "camembert": Kind("Camembert", {**_ROBERTA, "model_type": "camembert"}),
    "modernbert": Kind(
        "ModernBert",
        {
            **_MODERN,
            "model_type": "modernbert",
            "rope_parameters": _BASES,
            "layer_types": [
                "full_attention" if layer in (0, 2) else "sliding_attention"
                for layer in range(LAYERS)
            ],
        },
        classifier={"classifier_pooling": "mean"},
    ),
    "modernbert-older": Kind(  # as its makers' own config.json
        "ModernBert",
        {
            **_MODERN,
            "model_type": "modernbert",
            "global_rope_theta": 9000.0,
            "local_rope_theta": 500.0,
            "global_attn_every_n_layers": 3,
        },
    ),
}


def write_encoder(directory: Path, kind: str, *, pooling: str = "mean_tokens") -> Path:
    """An embedder, with the files of sentence-transformers."""
    chosen = KINDS[kind]
    _write(directory, {**chosen.config, "architectures": [f"{chosen.name}Model"]})
    save_file(dict(_weights(chosen)), directory / "model.safetensors", {"format": "pt"})
    modules = ["Transformer", "Pooling", "Normalize"]
    listed = [{"type": f"sentence_transformers.models.{module}"} for module in modules]
    _dump(directory / "modules.json", listed)
    (directory / "1_Pooling").mkdir()
    _dump(directory / "1_Pooling/config.json", {f"pooling_mode_{pooling}": True})
    return directory


def write_encoder_classifier(directory: Path, kind: str) -> Path:
    """A reranker. Its scores go through no sigmoid."""
    chosen = KINDS[kind]
    labels = {f"LABEL_{index}": index for index in range(chosen.labels)}
    more = {
        "architectures": [f"{chosen.name}ForSequenceClassification"],
        "id2label": {str(index): name for name, index in labels.items()},
        "label2id": labels,
        "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"},
        **chosen.classifier,
    }
    _write(directory, {**chosen.config, **more})
    prefix = {"bert": "bert.", "modernbert": "model."}.get(chosen.model_type, "roberta.")
    weights = {prefix + name: array for name, array in _weights(chosen)}
    weights |= dict(_head(chosen))
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    return directory


def _dump(file: Path, value: object) -> None:
    file.write_text(json.dumps(value), "utf-8")


def _write(directory: Path, config: Mapping[str, Any]) -> None:
    directory.mkdir(parents=True)
    _dump(directory / "config.json", config)
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *WORDS])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> $B:1 </s>:1",
        special_tokens=[("<s>", 0), ("</s>", 2)],
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    names = {"cls_token": "<s>", "sep_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    _dump(
        directory / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", **names},
    )


def _array(name: str, *shape: int) -> npt.NDArray[np.float32]:
    """Uniform numbers that depend on the name; a norm's weights are near 1."""
    words = np.random.Generator(np.random.PCG64(crc32(name.encode()))).integers(0, 1 << 24, shape)
    uniform = (words / (1 << 23) - 1).astype(np.float32)  # [-1, 1)
    if name.lower().endswith("norm.weight"):
        return (1 + 0.3 * uniform).astype(np.float32)
    return (uniform * np.float32(0.4)).astype(np.float32)


def _linear(name: str, outputs: int, inputs: int) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    yield f"{name}.weight", _array(f"{name}.weight", outputs, inputs)
    yield f"{name}.bias", _array(f"{name}.bias", outputs)


def _weights(kind: Kind) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    """The weights of the body."""
    config = kind.config
    shapes: dict[str, tuple[int, ...]] = {}
    if kind.model_type == "modernbert":
        shapes["embeddings.tok_embeddings.weight"] = (VOCAB_SIZE, HIDDEN)
        norms = ["embeddings.norm", "final_norm"]
        for layer in (f"layers.{index}" for index in range(LAYERS)):
            shapes[f"{layer}.attn.Wqkv.weight"] = (3 * HIDDEN, HIDDEN)
            shapes[f"{layer}.attn.Wo.weight"] = (HIDDEN, HIDDEN)
            shapes[f"{layer}.mlp.Wi.weight"] = (2 * WIDE, HIDDEN)
            shapes[f"{layer}.mlp.Wo.weight"] = (HIDDEN, WIDE)
            norms += [f"{layer}.mlp_norm", f"{layer}.attn_norm"]
        norms.remove("layers.0.attn_norm")
        shapes |= {f"{norm}.weight": (HIDDEN,) for norm in norms}
        for name, shape in shapes.items():
            yield name, _array(name, *shape)
        return
    sizes = {"word": VOCAB_SIZE, "position": config["max_position_embeddings"]}
    sizes["token_type"] = config["type_vocab_size"]
    for name, size in sizes.items():
        weight = f"embeddings.{name}_embeddings.weight"
        yield weight, _array(weight, size, HIDDEN)
    norms = ["embeddings.LayerNorm"]
    for layer in (f"encoder.layer.{index}" for index in range(LAYERS)):
        for part in ("self.query", "self.key", "self.value", "output.dense"):
            yield from _linear(f"{layer}.attention.{part}", HIDDEN, HIDDEN)
        yield from _linear(f"{layer}.intermediate.dense", WIDE, HIDDEN)
        yield from _linear(f"{layer}.output.dense", HIDDEN, WIDE)
        norms += [f"{layer}.attention.output.LayerNorm", f"{layer}.output.LayerNorm"]
    for norm in norms:
        for part in ("weight", "bias"):
            yield f"{norm}.{part}", _array(f"{norm}.{part}", HIDDEN)


def _head(kind: Kind) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    """The weights of the classifier."""
    match kind.model_type:
        case "bert":
            yield from _linear("bert.pooler.dense", HIDDEN, HIDDEN)
            yield from _linear("classifier", kind.labels, HIDDEN)
        case "modernbert":
            yield "head.dense.weight", _array("head.dense.weight", HIDDEN, HIDDEN)
            yield "head.norm.weight", _array("head.norm.weight", HIDDEN)
            yield from _linear("classifier", kind.labels, HIDDEN)
        case _:
            yield from _linear("classifier.dense", HIDDEN, HIDDEN)
            yield from _linear("classifier.out_proj", kind.labels, HIDDEN)


def _computed(directory: Path, kind: str) -> dict[str, Any]:
    """What transformers computes: poolings of each text's hidden states, and scores of pairs."""
    import torch  # noqa: PLC0415 - not in the project's environment
    from transformers import (  # noqa: PLC0415
        AutoModel,
        AutoModelForSequenceClassification,
    )

    body = AutoModel.from_pretrained(write_encoder(directory / "body", kind)).eval()
    classifier = AutoModelForSequenceClassification.from_pretrained(
        write_encoder_classifier(directory / "classifier", kind)
    ).eval()
    tokenizer = Tokenizer.from_file(str(directory / "body/tokenizer.json"))
    texts, scores = list[dict[str, Any]](), list[float]()
    with torch.no_grad():
        for text in TEXTS:
            hidden = body(torch.tensor([tokenizer.encode(text).ids])).last_hidden_state[0].numpy()
            ways = {"first": hidden[0], "last": hidden[-1], "mean": hidden.mean(axis=0)}
            texts.append({way: [round(float(x), 7) for x in v] for way, v in ways.items()})
        for pair in PAIRS:
            encoding = tokenizer.encode(*pair)
            types = {}
            if KINDS[kind].config.get("type_vocab_size") == 2:
                types = {"token_type_ids": torch.tensor([encoding.type_ids])}
            logits = classifier(torch.tensor([encoding.ids]), **types).logits[0].numpy()
            score = logits[0] if len(logits) == 1 else logits[1] - logits[0]
            scores.append(round(float(score), 7))
    return {"texts": texts, "scores": scores}


def main() -> None:
    """Write the vectors."""
    with TemporaryDirectory() as scratch:
        found = {kind: _computed(Path(scratch) / kind, kind) for kind in KINDS}
    VECTORS.write_text(json.dumps(found, indent=None), "utf-8")


if __name__ == "__main__":
    main()
