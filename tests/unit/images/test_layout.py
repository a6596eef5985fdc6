"""The tokens of images are those that the processors of transformers write."""

import importlib
import json
import sys
from contextlib import suppress
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.gemma4.processing_gemma4 import Gemma4Processor
from transformers.models.lfm2_vl.processing_lfm2_vl import Lfm2VlProcessor
from transformers.models.llama4.processing_llama4 import Llama4Processor
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

from engine.api import ModelError
from engine.images.layout import ImageLayout, image_layout
from engine.values.images import PreparedImage
from tests.unit.images.checkpoint import PUBLISHED, write_settings
from tests.vision_checkpoints import VISION_FAMILIES

DIGEST = bytes(range(32))


@pytest.fixture
def pixtral_class(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Its module imports the image processor that needs torch, for a function not used here."""
    absent = ModuleType("image_processing_pixtral")
    vars(absent)["get_resize_output_image_size"] = None
    package = "transformers.models.pixtral"
    monkeypatch.setitem(sys.modules, f"{package}.image_processing_pixtral", absent)
    return importlib.import_module(f"{package}.processing_pixtral").PixtralProcessor


def layout_of(name: str, directory: Path) -> tuple[ImageLayout, Tokenizer]:
    checkpoint = write_settings(name, directory)
    layout = image_layout(checkpoint)
    assert layout is not None
    return layout, Tokenizer.from_file(str(checkpoint / "tokenizer.json"))


def ids(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize(("name", "merge"), [("pixtral", 1), ("mistral3", 2)])
@pytest.mark.parametrize("rows", [2, 6])
@pytest.mark.parametrize("columns", [2, 4])
def test_pixtral(
    tmp_path: Path, pixtral_class: Any, name: str, merge: int, rows: int, columns: int
) -> None:
    layout, tokenizer = layout_of(name, tmp_path)
    processor = SimpleNamespace(
        patch_size=4,
        spatial_merge_size=merge,
        image_token="[IMG]",
        image_break_token="[IMG_BREAK]",
        image_end_token="[IMG_END]",
    )
    inputs = {"image_sizes": [(rows * 4, columns * 4)]}
    text = pixtral_class.replace_image_token(processor, inputs, 0)
    prepared = layout.prepared(DIGEST, (rows, columns), "file")
    assert prepared.tokens == ids(tokenizer, text)
    assert len(prepared.image.runs) == rows // merge


@pytest.mark.parametrize("name", [name for name in VISION_FAMILIES if name.startswith("qwen")])
@pytest.mark.parametrize("grid", [(1, 2, 2), (1, 4, 6)])
def test_qwen(tmp_path: Path, name: str, grid: tuple[int, ...]) -> None:
    import numpy as np  # noqa: PLC0415

    layout, tokenizer = layout_of(name, tmp_path)
    processor = SimpleNamespace(
        image_processor=SimpleNamespace(merge_size=2), image_token="<|image_pad|>"
    )
    text = Qwen3VLProcessor.replace_image_token(processor, {"image_grid_thw": [np.array(grid)]}, 0)
    prepared = layout.prepared(DIGEST, grid, "file")
    assert prepared.tokens == ids(tokenizer, text)
    assert prepared.image.runs == ((0, len(prepared.tokens)),)


def test_gemma3(tmp_path: Path) -> None:
    layout, tokenizer = layout_of("gemma3", tmp_path)
    parts = "<image_soft_token>" * 9
    sequence = f"\n\n<start_of_image>{parts}<end_of_image>\n\n"
    processor = SimpleNamespace(full_image_sequence=sequence)
    text = Gemma3Processor.replace_image_token(processor, {"num_crops": [0]}, 0)
    prepared = layout.prepared(DIGEST, (6, 6), "file")
    assert prepared.tokens == ids(tokenizer, text)
    assert layout.placeholder == tokenizer.token_to_id("<start_of_image>")
    assert prepared.image.is_whole
    assert len(prepared.tokens) == layout.max_tokens


@pytest.mark.parametrize("attention", ["vision", None])
def test_gemma4(tmp_path: Path, attention: str | None) -> None:
    checkpoint = write_settings("gemma4", tmp_path)
    config = json.loads((checkpoint / "config.json").read_text())
    config["text_config"]["use_bidirectional_attention"] = attention
    (checkpoint / "config.json").write_text(json.dumps(config))
    layout = image_layout(checkpoint)
    assert layout is not None
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    processor = SimpleNamespace(boi_token="<|image>", image_token="<|image|>", eoi_token="<image|>")
    text = Gemma4Processor.replace_image_token(processor, {"num_soft_tokens_per_image": [10]}, 0)
    prepared = layout.prepared(DIGEST, (6, 15), "file")
    assert prepared.tokens == ids(tokenizer, text)
    assert prepared.image.is_whole is (attention == "vision")


def test_kimi(tmp_path: Path) -> None:
    layout, tokenizer = layout_of("kimi_vl", tmp_path)
    prepared = layout.prepared(DIGEST, (4, 6), "file")
    assert prepared.tokens == ids(tokenizer, "<|media_pad|>" * 6)


@pytest.mark.parametrize("name", ["llama4", "Llama-4-Scout"])
@pytest.mark.parametrize("tiles", [(1, 1), (1, 3), (3, 1), (2, 3)])
def test_llama4(tmp_path: Path, name: str, tiles: tuple[int, int]) -> None:
    layout, tokenizer = layout_of(name, tmp_path)
    side = 24 if name in PUBLISHED else 4
    processor: Any = Llama4Processor
    text = processor._prompt_split_image(None, tiles, (side // 2) ** 2)
    prepared = layout.prepared(DIGEST, (*tiles, side, side), "file")
    assert prepared.tokens == ids(tokenizer, text)
    n_tiles = tiles[0] * tiles[1]
    assert len(prepared.image.runs) == n_tiles + (n_tiles > 1)
    check_runs(layout, prepared)


@pytest.mark.parametrize("name", ["lfm2_vl", "LFM2-VL-1.6B"])
@pytest.mark.parametrize("tiles", [(1, 1), (1, 3), (4, 1), (2, 2)])
@pytest.mark.parametrize("marks", [True, False])
def test_lfm2_vl(tmp_path: Path, name: str, tiles: tuple[int, int], marks: bool) -> None:
    checkpoint = write_settings(name, tmp_path)
    settings = {"use_image_special_tokens": marks}
    (checkpoint / "processor_config.json").write_text(json.dumps(settings))
    layout = image_layout(checkpoint)
    assert layout is not None
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    processor: Any = SimpleNamespace(
        image_token="<image>",
        image_start_token="<|image_start|>",
        image_end_token="<|image_end|>",
        image_thumbnail_token="<|img_thumbnail|>",
    )
    n_parts = 256 if name in PUBLISHED else 4
    text = Lfm2VlProcessor._build_image_tokens(processor, *tiles, n_parts, 6, True, marks)
    prepared = layout.prepared(DIGEST, (*tiles, 4, 6), "file")
    assert prepared.tokens == ids(tokenizer, text)
    check_runs(layout, prepared)


def check_runs(layout: ImageLayout, prepared: PreparedImage) -> None:
    """The runs are the tokens that stand for parts."""
    places = [at for first, n in prepared.image.runs for at in range(first, first + n)]
    assert places == [at for at, token in enumerate(prepared.tokens) if token == layout.part]


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("Llama-4-Scout", 1 + 16 * (144 + 1) + 1 + 144 + 1),
        ("LFM2-VL-1.6B", 1 + 10 * (1 + 256) + 1 + 256 + 1),
        ("Qwen2.5-VL-7B", 16_384),
        ("Qwen3-VL-8B", 16_384),
        ("pixtral-12b", 64 * 65),
        ("Mistral-Small-3.1", 55 * 56),
        ("gemma-4-E4B", 282),
        ("Kimi-VL-A3B", 255 * 5),
    ],
)
def test_the_most_tokens_of_published_checkpoints(tmp_path: Path, name: str, most: int) -> None:
    layout, _ = layout_of(name, tmp_path)
    assert layout.max_tokens == most


def test_gemma_3_has_256_tokens_for_an_image_and_some_around_it(tmp_path: Path) -> None:
    layout, tokenizer = layout_of("gemma-3-4b", tmp_path)
    assert layout.max_tokens == 256 + 2 + 2 * len(ids(tokenizer, "\n\n"))
    assert layout.prepared(DIGEST, (64, 64), "file").image.n_tokens == 256


@pytest.mark.parametrize("name", [*VISION_FAMILIES, *PUBLISHED])
@pytest.mark.parametrize(
    "grid", [(), (4,), (0, 4), (4, 0), (-4, -4), (1, 10**9, 10**9), (1000, 1000)]
)
def test_grids_that_no_image_has_are_refused(
    tmp_path: Path, name: str, grid: tuple[int, ...]
) -> None:
    layout, _ = layout_of(name, tmp_path)
    with pytest.raises(ValueError):  # noqa: PT011 - of any kind
        layout.prepared(DIGEST, grid, "file")


def test_checkpoints_without_images(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    assert image_layout(tmp_path) is None
    (tmp_path / "config.json").write_text('{"model_type": "new", "vision_config": {"a": 1}}')
    with pytest.raises(ModelError, match="model type new"):
        image_layout(tmp_path)
    write_settings("qwen3_vl", tmp_path)
    (tmp_path / "preprocessor_config.json").unlink()
    with pytest.raises(ModelError, match=r"no preprocessor_config\.json"):
        image_layout(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text("[")
    with pytest.raises(ModelError, match="cannot be read"):
        image_layout(tmp_path)


@pytest.mark.parametrize("name", VISION_FAMILIES)
@pytest.mark.parametrize("value", ["x", [], {}, None, 0, -1])
def test_settings_of_any_kind_are_a_reason_at_worst(
    tmp_path: Path, name: str, value: object
) -> None:
    checkpoint = write_settings(name, tmp_path)
    for file in ("config.json", "preprocessor_config.json", "processor_config.json"):
        whole = json.loads((checkpoint / file).read_text())
        for key in whole:
            (checkpoint / file).write_text(json.dumps({**whole, key: value}))
            with suppress(ModelError):
                image_layout(checkpoint)
        (checkpoint / file).write_text(json.dumps(whole))
