"""Images become exactly what the processors of their families give."""

import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np
import pytest
from PIL import Image
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from engine.images.decode import UnreadableImage, decode
from engine.images.layout import image_layout
from engine.images.processors import Pixels, Processor
from engine.values.images import Detail
from tests.unit.images.checkpoint import PUBLISHED, write_settings
from tests.unit.images.files import PICTURES
from tests.vision_checkpoints import VISION_FAMILIES

Checkpoints: TypeAlias = Callable[[str], Path]

NAMES = [*VISION_FAMILIES, *PUBLISHED]
SEEDS = range(5)

PATCHES = {"pixtral": 4, "mistral3": 8, "pixtral-12b": 16, "Mistral-Small-3.1": 28}
"""Pixels of the squares that PixtralProcessor gives to its image processor."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    written: dict[str, Path] = {}

    def checkpoint(name: str) -> Path:
        if name not in written:
            written[name] = write_settings(name, tmp_path_factory.mktemp("checkpoint"))
        return written[name]

    return checkpoint


@pytest.fixture
def kimi_class(monkeypatch: pytest.MonkeyPatch) -> Any:
    """mlx-vlm's processor of Kimi-VL, without the code of the packages around it."""
    folder = Path(importlib.metadata.distribution("mlx-vlm").locate_file("mlx_vlm"))  # type: ignore[arg-type]
    for package in ("mlx_vlm", "mlx_vlm.models", "mlx_vlm.models.kimi_vl"):
        bare = ModuleType(package)
        bare.__path__ = [str(folder.parent.joinpath(*package.split(".")))]
        monkeypatch.setitem(sys.modules, package, bare)
    return importlib.import_module("mlx_vlm.models.kimi_vl.processing_kimi_vl").KimiVLImageProcessor


def picture(seed: int, *, most: int = 1_500) -> Image.Image:
    """A random image of any size and shape, in RGB."""
    random = Random(seed)
    size = tuple(round(most ** random.random()) + 8 for _ in range(2))
    draws = np.random.default_rng(seed)
    coarse = draws.integers(0, 256, (9, 7, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)


def expected(name: str, checkpoint: Path, image: Image.Image, detail: Detail) -> Pixels:
    """What transformers' class makes of the image."""
    is_low = detail is Detail.LOW
    options: dict[str, Any] = {}
    family = PUBLISHED[name].family if name in PUBLISHED else name
    if family.startswith("qwen"):
        processor = Qwen2VLImageProcessorPil.from_pretrained(checkpoint)
        if is_low:
            least = processor.size["shortest_edge"]
            options["size"] = {"shortest_edge": least, "longest_edge": least}
        made = processor(image, **options)
        return Pixels(made["pixel_values"], tuple(made["image_grid_thw"][0]))
    if family == "gemma4":
        options = {"max_soft_tokens": 70} if is_low else {}
        made = Gemma4ImageProcessorPil.from_pretrained(checkpoint)(image, **options)
        columns, rows = made["image_position_ids"][0].max(0) + 1
        return Pixels(made["pixel_values"][0], (rows, columns))
    if family == "gemma3":
        processor = Gemma3ImageProcessorPil.from_pretrained(checkpoint)
        made, patch = processor(image, do_pan_and_scan=False), 14 if name in PUBLISHED else 4
    else:
        processor = PixtralImageProcessorPil.from_pretrained(checkpoint)
        side = PATCHES[name]
        if is_low:
            options["size"] = {"longest_edge": min(processor.size["longest_edge"], 512)}
        made = processor(image, patch_size={"height": side, "width": side}, **options)
        patch = side // (2 if family == "mistral3" else 1)
    array = made["pixel_values"][0]
    return Pixels(array, (array.shape[1] // patch, array.shape[2] // patch))


@pytest.mark.parametrize("name", [name for name in NAMES if "imi" not in name])
@pytest.mark.parametrize("detail", list(Detail))
def test_pixels_are_those_of_transformers(
    checkpoints: Checkpoints, name: str, detail: Detail
) -> None:
    checkpoint = checkpoints(name)
    processor = Processor(checkpoint)
    for seed in SEEDS:
        image = picture(seed)
        try:
            wanted = expected(name, checkpoint, image, detail)
        except ValueError:
            with pytest.raises(UnreadableImage):
                processor.pixels(image, detail)
            continue
        found = processor.pixels(image, detail)
        assert found.grid == wanted.grid
        assert found.array.dtype == np.float32
        assert found.array.flags["C_CONTIGUOUS"]
        np.testing.assert_array_equal(found.array, np.asarray(wanted.array, np.float32))


@pytest.mark.parametrize("seed", range(40))
def test_images_with_alpha_and_of_all_kinds_are_as_transformers_reads_them(
    checkpoints: Checkpoints, seed: int
) -> None:
    """transformers composes on white, too. Grey of 16 bits, and of few bits with transparency, is
    cut or mistaken there.
    """
    made = PICTURES[0](Random(seed))
    if " 16 bits" in made.name or "type 0, keyed" in made.name:
        return
    checkpoint = checkpoints("gemma3")
    with Image.open(BytesIO(made.encoded)) as image:
        wanted = expected("gemma3", checkpoint, image, Detail.FULL)
    found = Processor(checkpoint).pixels(decode(made.encoded), Detail.FULL)
    np.testing.assert_array_equal(found.array, wanted.array)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # mlx-vlm's use of Pillow
@pytest.mark.parametrize("pads", [True, False])
@pytest.mark.parametrize("limit", [40, 4096])
def test_pixels_of_kimi_are_those_of_mlx_vlm(
    tmp_path: Path, kimi_class: Any, pads: bool, limit: int
) -> None:
    checkpoint = write_settings("kimi_vl", tmp_path)
    settings: dict[str, Any] = {"patch_size": 4, "pad_input": pads, "in_token_limit": limit}
    settings |= {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.25, 0.2]}
    (checkpoint / "preprocessor_config.json").write_text(json.dumps(settings))
    processor, reference = Processor(checkpoint), kimi_class(**settings)
    for seed in SEEDS:
        image = picture(seed, most=100)
        wanted = reference(image)
        found = processor.pixels(image, Detail.FULL)
        np.testing.assert_array_equal(found.array, np.array(wanted["pixel_values"]))
        assert [found.grid] == wanted["_grid_shapes"]


@pytest.mark.parametrize("name", NAMES)
def test_a_digest_is_of_pixels_grid_and_settings(
    checkpoints: Checkpoints, tmp_path: Path, name: str
) -> None:
    processor, image = Processor(checkpoints(name)), picture(3, most=300)
    pixels = processor.pixels(image, Detail.FULL)
    digest = processor.digest(pixels)
    assert digest == processor.digest(processor.pixels(image.copy(), Detail.FULL))
    changed = pixels.array.copy()
    changed.flat[-1] = np.nextafter(changed.flat[-1], 9)
    turned = Pixels(pixels.array, pixels.grid[::-1])
    others = [processor.digest(Pixels(changed, pixels.grid)), processor.digest(turned)]
    other = write_settings(name, tmp_path) / "preprocessor_config.json"
    other.write_text(other.read_text()[:-1] + ', "unknown": 1}')
    others.append(Processor(tmp_path).digest(pixels))
    is_square = pixels.grid == pixels.grid[::-1]
    assert len({digest, *others}) == 4 - is_square


@pytest.mark.parametrize("name", NAMES)
def test_no_image_has_more_tokens_than_the_layout_says(checkpoints: Checkpoints, name: str) -> None:
    checkpoint = checkpoints(name)
    processor, layout = Processor(checkpoint), image_layout(checkpoint)
    assert layout is not None
    sizes = [(8, 8), (1600, 8), (8, 1600), (20, 3_000), (3_100, 17), (1, 200), (2_000, 2_000)]
    n_prepared = 0
    for size in sizes:
        for detail in Detail:
            try:
                pixels = processor.pixels(Image.new("RGB", size), detail)
            except UnreadableImage:
                continue
            prepared = layout.prepared(bytes(32), pixels.grid, "")
            assert len(prepared.tokens) <= layout.max_tokens
            assert prepared.image.n_tokens == prepared.tokens.count(layout.part)
            n_prepared += 1
    assert n_prepared > 3


@pytest.mark.parametrize("name", NAMES)
def test_low_detail_has_at_most_as_many_tokens_as_full(checkpoints: Checkpoints, name: str) -> None:
    checkpoint = checkpoints(name)
    processor, layout = Processor(checkpoint), image_layout(checkpoint)
    assert layout is not None
    n_tokens = [
        len(layout.prepared(bytes(32), pixels.grid, "").tokens)
        for detail in (Detail.LOW, Detail.FULL)
        for pixels in [processor.pixels(Image.new("RGB", (1_400, 1_000)), detail)]
    ]
    assert n_tokens[0] <= n_tokens[1]
    if name in PUBLISHED and not name.startswith("gemma-3"):
        assert n_tokens[0] < n_tokens[1] / 2


def test_nothing_here_imports_mlx_or_torch() -> None:
    program = (
        "import engine.images.worker, sys;"
        "from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl;"
        "sys.exit(bool({'mlx', 'torch', 'mlx_vlm'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
