"""What a checkpoint is for (to generate, to embed or to rerank), and its sampling defaults.

sentence-transformers writes the files of an embedder: modules.json lists the modules that a text
passes through, 1_Pooling/config.json says which hidden states are pooled, and
config_sentence_transformers.json has the prompts. A reranker is a transformers model "for sequence
classification", or a generator whose tokens "yes" and "no" are compared. Imports no MLX.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from enum import Enum
from pathlib import Path
from reprlib import repr as short
from typing import Any, TypeVar, get_type_hints

from pydantic import TypeAdapter, ValidationError

from engine.api import ModelError, Report, one_line
from engine.values.model import Embedder, SamplingDefaults
from engine.values.request import Pooling

_Json = TypeVar("_Json", dict[str, Any], list[Any])

GENERATION_CONFIG = "generation_config.json"
_MODULES = "modules.json"
_POOLING = "1_Pooling/config.json"
_PROMPTS = "config_sentence_transformers.json"
_TEXTS = "sentence_bert_config.json"

MOST_STATED = 1 << 31
"""A larger number in a checkpoint's files is a way to write that there is no limit."""

_MODE = "pooling_mode_"
_MODES = {
    "lasttoken": Pooling.LAST,
    "mean_tokens": Pooling.MEAN,
    "mean": Pooling.MEAN,
    "cls_token": Pooling.FIRST,
    "cls": Pooling.FIRST,
}
_CLASSIFICATION = "ForSequenceClassification"
_ENCODERS = frozenset({"bert", "camembert", "modernbert", "roberta", "xlm-roberta"})
_OTHER_ENCODERS = frozenset(
    {
        *("albert", "deberta", "deberta-v2", "distilbert", "electra", "mpnet", "new"),
        *("nomic_bert", "xlm-roberta-xl"),
    }
)
_ENCODER_ADVICE = (
    f"Rootstock serves decoders, and of encoders {', '.join(sorted(_ENCODERS))}. mlx-embeddings "
    "and, off Apple silicon, text-embeddings-inference serve others"
)


class Body(Enum):
    """The kind of model below a head."""

    DECODER = "decoder"  # a token attends to earlier ones, whose KV is cached
    ENCODER = "encoder"  # a token attends to all of its text, and nothing is cached


@dataclass(frozen=True, slots=True)
class Ranking:
    """How a prompt becomes a score. Without `tokens` the checkpoint's classifier computes it. With
    one or two tokens it is their logit, or the second logit less the first.
    """

    tokens: tuple[str, ...] = ()
    has_sigmoid: bool = True


@dataclass(frozen=True, slots=True)
class Purpose:
    """What a checkpoint is for. One that does not generate may lack an LM head. The `dimensions` of
    the embedder are 0 until the model is loaded.
    """

    generates: bool = True
    embedder: Embedder | None = None
    ranking: Ranking | None = None
    body: Body = Body.DECODER


GENERATES = Purpose()


def find_purpose(checkpoint: Path, pooling: str = "auto", reranker: str = "auto") -> Purpose:
    """The purpose that the checkpoint's files state, or the settings `pooling` and `reranker` where
    they are not "auto".

    Raises ModelError for files that cannot be read, an encoder that is not served, and an unknown
    way to make vectors.
    """
    config = read_json(checkpoint / "config.json", dict) or {}
    architecture = str((config.get("architectures") or [config["model_type"]])[0])
    if config["model_type"] in _OTHER_ENCODERS:
        raise ModelError(f"{architecture} is an encoder. {_ENCODER_ADVICE}")
    if config["model_type"] in _ENCODERS:
        return _encoder_purpose(checkpoint, config, architecture, pooling, reranker)
    if reranker == "yes-no":
        return Purpose(generates=False, ranking=Ranking(("no", "yes")))
    is_classifier = architecture.endswith(_CLASSIFICATION)
    found = None if is_classifier else _embedder(checkpoint)
    if (is_classifier or found) and (
        config.get("use_bidirectional_attention") or config.get("is_causal") is False
    ):
        raise ModelError(
            f"{architecture} attends to later tokens, too: an encoder. {_ENCODER_ADVICE}"
        )
    if is_classifier:
        if pooling != "auto":
            raise ModelError(f"{architecture} reranks: leave the setting pooling out")
        return Purpose(generates=False, ranking=_ranking(config))
    generates = found is None
    if pooling != "auto":
        configured = Pooling(pooling)
        found = replace(found, pooling=configured) if found else Embedder(configured, dimensions=0)
    return Purpose(generates, embedder=found)


def _encoder_purpose(
    checkpoint: Path, config: Mapping[str, Any], architecture: str, pooling: str, reranker: str
) -> Purpose:
    """The purpose of an encoder, which embeds or reranks. Raises ModelError."""
    if reranker != "auto":
        raise ModelError(
            f"{architecture} is an encoder and writes no words: leave the setting reranker out"
        )
    if architecture.endswith(_CLASSIFICATION):
        if pooling != "auto":
            raise ModelError(f"{architecture} reranks: leave the setting pooling out")
        ranking = _ranking(config)
        if ranking.tokens:
            raise ModelError(f"{architecture} is an encoder: it scores by no tokens")
        return Purpose(generates=False, ranking=ranking, body=Body.ENCODER)
    found = _embedder(checkpoint)
    if pooling != "auto":
        configured = Pooling(pooling)
        found = replace(found, pooling=configured) if found else Embedder(configured, dimensions=0)
    if found is None:
        raise ModelError(
            f"{architecture} is an encoder, and no {_POOLING} says how a vector is made of its "
            "hidden states: set pooling to mean or first, as its model card has it"
        )
    return Purpose(generates=False, embedder=found, body=Body.ENCODER)


def longest_text_stated(checkpoint: Path) -> int | None:
    """The most tokens of a text by the files of sentence-transformers, or else by the tokenizer;
    None where neither states a number.

    Raises ModelError for a checkpoint whose texts are changed before they are tokenized.
    """
    texts = read_json(checkpoint / _TEXTS, dict) or {}
    if texts.get("do_lower_case"):
        raise ModelError(f"{_TEXTS} has texts written in lower case, which is not done here")
    tokenizer = read_json(checkpoint / "tokenizer_config.json", dict) or {}
    for stated in (texts.get("max_seq_length"), tokenizer.get("model_max_length")):
        if isinstance(stated, int | float) and 1 <= stated < MOST_STATED:
            return int(stated)
    return None


def _ranking(config: Mapping[str, Any]) -> Ranking:
    """The ranking of a classifier, by its config.json."""
    tokens = tuple(config.get("classifier_from_token") or ())
    if len(tokens) > 2 or not all(isinstance(token, str) for token in tokens):
        raise ModelError("classifier_from_token of config.json must be one token or two")
    trained = config.get("sentence_transformers") or {}
    named = trained.get("activation_fn") or config.get("sbert_ce_default_activation_function") or ""
    return Ranking(tokens, has_sigmoid=not str(named).endswith("Identity"))


def _embedder(checkpoint: Path) -> Embedder | None:
    """The embedder by sentence-transformers' files; None where the checkpoint is not one."""
    entries = read_json(checkpoint / _MODULES, list) or []
    kinds = [entry.get("type") if isinstance(entry, dict) else None for entry in entries]
    modules = [str(kind).rpartition(".")[2] for kind in kinds]  # their packages have changed
    for module in modules:
        if module not in {"Transformer", "Pooling", "Normalize"}:
            raise ModelError(f"{_MODULES} lists a module that is not known here: {module}")
    modes = read_json(checkpoint / _POOLING, dict)
    if not modes:
        return None
    names = [name.removeprefix(_MODE) for name in modes if modes[name] is True and _MODE in name]
    if isinstance(mode := modes.get("pooling_mode"), str):
        names.append(mode)
    if len(names) != 1 or names[0] not in _MODES:
        named = " and ".join(names) or "nothing"
        raise ModelError(f"{_POOLING} pools by {named}; served is one of {', '.join(_MODES)}")
    pooling = _MODES[names[0]]
    settings = read_json(checkpoint / _PROMPTS, dict) or {}
    prompts = {name: text for name, text in (settings.get("prompts") or {}).items() if text}
    if pooling is Pooling.MEAN and prompts and modes.get("include_prompt") is False:
        raise ModelError(f"{_POOLING} leaves prompts out of the mean, which is not done here")
    return Embedder(
        pooling,
        dimensions=0,
        normalized="Normalize" in modules,
        prompts=prompts,
        default_prompt=settings.get("default_prompt_name") or "",
    )


def sampling_defaults(checkpoint: Path, report: Report) -> SamplingDefaults:
    """The sampling parameters of generation_config.json, in the format of transformers'
    GenerationConfig. A value that requests may not have is reported and left out.

    `do_sample` is ignored, as in vLLM: it is false by default, which does not mean that a model is
    best served greedily. For greedy sampling the temperature is 0.
    """
    try:
        content = read_json(checkpoint / GENERATION_CONFIG, dict) or {}
    except ModelError as error:
        report(f"{GENERATION_CONFIG} is ignored: {error}")
        content = {}
    given: dict[str, Any] = {}
    for name, kind in get_type_hints(SamplingDefaults, include_extras=True).items():
        if content.get(name) is None:
            continue
        try:
            given[name] = TypeAdapter(kind).validate_python(content[name], strict=True)
        except ValidationError as error:
            fault = error.errors(include_url=False)[0]["msg"]
            report(f"{GENERATION_CONFIG}: {name} is ignored: {fault}, not {short(content[name])}")
    defaults = SamplingDefaults(**given)
    if given:
        values = ", ".join(f"{name} {value:g}" for name, value in asdict(defaults).items())
        report(f"sampling defaults: {values}")
    return defaults


def read_json(file: Path, kind: type[_Json]) -> _Json | None:
    """The content of a JSON file; None if there is no file. Raises ModelError if it cannot be read,
    or is not of this `kind`.
    """
    try:
        content = json.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file} cannot be read: {one_line(error)}") from error
    if not isinstance(content, kind):
        name = "object" if kind is dict else "list"
        raise ModelError(f"{file} is not a JSON {name}: delete it, or fetch it again")
    return content
