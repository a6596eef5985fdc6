"""What a checkpoint is for: to generate, to embed or to rerank. Its files say, or the settings do.

sentence-transformers writes the files of an embedder: modules.json lists what a text goes through,
1_Pooling/config.json says which hidden states count, config_sentence_transformers.json has prompts.
A reranker is a transformers model "for sequence classification", or a generator whose tokens "yes"
and "no" are compared.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from reprlib import repr as short
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from engine.api import ModelError, Report
from engine.mlx_backend.errors import UnsupportedModel, one_line
from engine.values.model import SamplingDefaults
from engine.values.request import Pooling

GENERATION_CONFIG = "generation_config.json"
YES_NO = ("no", "yes")

_MODULES = "modules.json"
_POOLING = "1_Pooling/config.json"
_PROMPTS = "config_sentence_transformers.json"

_MODE = "pooling_mode_"
_MODES = {
    "lasttoken": Pooling.LAST,
    "mean_tokens": Pooling.MEAN,
    "mean": Pooling.MEAN,
    "cls_token": Pooling.FIRST,
    "cls": Pooling.FIRST,
}
_CLASSIFICATION = "ForSequenceClassification"
_ENCODERS = frozenset(
    {
        *("albert", "bert", "camembert", "deberta", "deberta-v2", "distilbert", "electra"),
        *("mpnet", "modernbert", "new", "nomic_bert", "roberta", "xlm-roberta"),
    }
)
ENCODER_ADVICE = (
    "Rootstock serves decoders, which see what comes before a token. mlx-embeddings and, off Apple "
    "silicon, text-embeddings-inference serve encoders"
)


@dataclass(frozen=True, slots=True)
class Embedding:
    """How a text becomes a vector; as `Embedder` has it."""

    pooling: Pooling
    normalized: bool = True
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str = ""


@dataclass(frozen=True, slots=True)
class Ranking:
    """How a prompt becomes a score: by the checkpoint's classifier, or without `tokens` of its own
    by the rows of the LM head for these, the second less the first where there are two.
    """

    tokens: tuple[str, ...] = ()
    has_sigmoid: bool = True


@dataclass(frozen=True, slots=True)
class Purpose:
    """What a checkpoint is for. One that does not generate may lack an LM head."""

    generates: bool = True
    embedding: Embedding | None = None
    ranking: Ranking | None = None


GENERATES = Purpose()


def find_purpose(checkpoint: Path, pooling: str = "auto", reranker: str = "auto") -> Purpose:
    """What the checkpoint's files say, and the settings of these names where they are not "auto".

    Raises ModelError for files that cannot be read, and UnsupportedModel for an encoder and for
    what makes vectors in a way that is not known here.
    """
    config = _json(checkpoint / "config.json", dict)
    if config["model_type"] in _ENCODERS:
        raise UnsupportedModel(f"{_architecture(config)} is an encoder. {ENCODER_ADVICE}")
    if reranker == "yes-no":
        return Purpose(generates=False, ranking=Ranking(YES_NO))
    if _architecture(config).endswith(_CLASSIFICATION):
        _check_decoder(config)
        if pooling != "auto":
            raise ModelError(f"{_architecture(config)} reranks: leave the setting pooling out")
        return Purpose(generates=False, ranking=_ranking(config))
    found = _embedding(checkpoint)
    if found is not None:
        _check_decoder(config)
    if pooling != "auto":
        asked = Pooling(pooling)
        return Purpose(
            generates=found is None,
            embedding=Embedding(asked) if found is None else replace(found, pooling=asked),
        )
    return GENERATES if found is None else Purpose(generates=False, embedding=found)


def _check_decoder(config: Mapping[str, Any]) -> None:
    """Raise UnsupportedModel for a decoder that was trained to see both ways."""
    if config.get("use_bidirectional_attention") or config.get("is_causal") is False:
        raise UnsupportedModel(
            f"{_architecture(config)} sees what comes behind a token, too: an encoder. "
            f"{ENCODER_ADVICE}"
        )


def _architecture(config: Mapping[str, Any]) -> str:
    return str((config.get("architectures") or [config["model_type"]])[0])


def _ranking(config: Mapping[str, Any]) -> Ranking:
    tokens = tuple(config.get("classifier_from_token") or ())
    if len(tokens) > 2 or not all(isinstance(token, str) for token in tokens):
        raise UnsupportedModel("classifier_from_token of config.json must be one token or two")
    trained = config.get("sentence_transformers") or {}
    named = trained.get("activation_fn") or config.get("sbert_ce_default_activation_function") or ""
    return Ranking(tokens, has_sigmoid=not str(named).endswith("Identity"))


def _embedding(checkpoint: Path) -> Embedding | None:
    """None where the checkpoint is no embedder."""
    modules = [_module(entry) for entry in _json(checkpoint / _MODULES, list) or []]
    for module in modules:
        if module not in {"Transformer", "Pooling", "Normalize"}:
            raise UnsupportedModel(f"{_MODULES} lists a module that is not known here: {module}")
    found = _json(checkpoint / _POOLING, dict)
    if not found:
        return None
    pooling = _pooling(found)
    said = _json(checkpoint / _PROMPTS, dict) or {}
    prompts = {name: text for name, text in (said.get("prompts") or {}).items() if text}
    if pooling is Pooling.MEAN and prompts and found.get("include_prompt") is False:
        raise UnsupportedModel(f"{_POOLING} leaves prompts out of the mean, which is not done here")
    return Embedding(
        pooling,
        normalized="Normalize" in modules,
        prompts=prompts,
        default_prompt=said.get("default_prompt_name") or "",
    )


def _module(entry: object) -> str:
    """The class of a module: sentence_transformers has moved them from time to time."""
    kind = entry.get("type") if isinstance(entry, dict) else None
    return str(kind).rpartition(".")[2]


def _pooling(found: Mapping[str, Any]) -> Pooling:
    modes = [name.removeprefix(_MODE) for name in found if found[name] is True and _MODE in name]
    if isinstance(mode := found.get("pooling_mode"), str):
        modes.append(mode)
    if len(modes) != 1 or modes[0] not in _MODES:
        asked = " and ".join(modes) or "nothing"
        raise UnsupportedModel(f"{_POOLING} pools by {asked}; served is one of {', '.join(_MODES)}")
    return _MODES[modes[0]]


def _json(file: Path, kind: type) -> Any:
    """The file's content; None where there is none. Raises ModelError for what is no such JSON."""
    try:
        content = json.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file} cannot be read: {one_line(error)}") from error
    if not isinstance(content, kind):
        raise ModelError(f"{file} is not what sentence-transformers writes: delete it")
    return content


def sampling_defaults(checkpoint: Path, report: Report) -> SamplingDefaults:
    """What the file says; a value that no request could have is reported and left out."""
    given: dict[str, Any] = {}
    content = _content(checkpoint / GENERATION_CONFIG, report)
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


def _content(file: Path, report: Report) -> Mapping[str, Any]:
    try:
        content = json.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        report(f"{GENERATION_CONFIG} is ignored: {one_line(error)}")
        return {}
    return content if isinstance(content, dict) else {}
