"""Images become exactly what the processors of their families give."""

import ast
import importlib.metadata
import importlib.util
import json
import math
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from random import Random
from types import ModuleType, SimpleNamespace
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np
import pytest
from PIL import Image
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from engine.images.decode import UnreadableImage, decode
from engine.images.layout import image_layout
from engine.images.pixels import Pixels, closest_tiles
from engine.images.processors import Processor
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
def processors_of_mlx_vlm(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """The module of mlx-vlm's processor of a family, without the code of the packages around it."""
    folder = Path(importlib.metadata.distribution("mlx-vlm").locate_file("mlx_vlm"))  # type: ignore[arg-type]

    def module(family: str) -> Any:
        for package in ("mlx_vlm", "mlx_vlm.models", f"mlx_vlm.models.{family}"):
            bare = ModuleType(package)
            bare.__path__ = [str(folder.parent.joinpath(*package.split(".")))]
            monkeypatch.setitem(sys.modules, package, bare)
        return importlib.import_module(f"mlx_vlm.models.{family}.processing_{family}")

    return module


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


OTHERS = ("kimi", "llama", "lfm2")
"""Families whose processors transformers has with torch alone."""


@pytest.mark.parametrize("name", [name for name in NAMES if not name.lower().startswith(OTHERS)])
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
    tmp_path: Path, processors_of_mlx_vlm: Callable[[str], Any], pads: bool, limit: int
) -> None:
    kimi_class = processors_of_mlx_vlm("kimi_vl").KimiVLImageProcessor
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


@pytest.mark.parametrize("name", ["lfm2_vl", "LFM2-VL-1.6B"])
@pytest.mark.parametrize("changes", [{}, {"resample": 3}, {"do_image_splitting": False}])
def test_pixels_of_lfm2_vl_are_those_of_mlx_vlm(
    tmp_path: Path,
    processors_of_mlx_vlm: Callable[[str], Any],
    name: str,
    changes: dict[str, Any],
) -> None:
    checkpoint = write_settings(name, tmp_path)
    settings = json.loads((checkpoint / "preprocessor_config.json").read_text()) | changes
    (checkpoint / "preprocessor_config.json").write_text(json.dumps(settings))
    processor = Processor(checkpoint)
    reference = processors_of_mlx_vlm("lfm2_vl").Lfm2VlNumpyImageProcessor(**settings)
    grids = set[bool]()
    for seed in range(12):
        image = picture(seed, most=3_000 if name in PUBLISHED else 90)
        wanted = reference.preprocess([image])
        found = processor.pixels(image, Detail.FULL)
        present = wanted["pixel_attention_mask"].astype(bool)
        np.testing.assert_array_equal(found.array, wanted["pixel_values"][present])
        tiles = wanted["image_rows"][0], wanted["image_cols"][0]
        assert found.grid == (*tiles, *wanted["spatial_shapes"][-1])
        grids.add(tiles == (1, 1))
    assert len(grids) == 1 + bool(settings["do_image_splitting"])


@pytest.mark.parametrize(("least", "most"), [(2, 10), (1, 6), (4, 4)])
def test_tiles_of_lfm2_vl_are_those_of_mlx_vlm(
    processors_of_mlx_vlm: Callable[[str], Any], least: int, most: int
) -> None:
    """Also where several grids of tiles have one ratio."""
    layout_of, random = processors_of_mlx_vlm("lfm2_vl")._get_grid_layout, Random(most)
    for _ in range(3_000):
        width, height = (random.randint(200, 2_500) for _ in range(2))
        columns, rows, *_ = layout_of(height, width, least, most, 512)
        assert closest_tiles((width, height), 512, least, most) == (rows, columns)


@pytest.fixture(scope="module")
def llama4_functions() -> SimpleNamespace:
    """The functions of transformers' module of Llama 4 that choose sizes. The module needs torch;
    of that, these functions need what numpy has, with numbers of 32 bits.
    """
    spec = importlib.util.find_spec("transformers.models.llama4.image_processing_llama4")
    assert spec is not None
    assert spec.origin is not None
    module = ast.parse(Path(spec.origin).read_text())
    functions = list[ast.stmt]()
    for function in module.body:
        if not isinstance(function, ast.FunctionDef):
            continue
        functions.append(function)
        function.decorator_list.clear()
        function.args.defaults.clear()
        for argument in function.args.args:
            argument.annotation = None
        function.returns = None
    numbers = SimpleNamespace(where=np.where, max=np.max, min=np.min, argmin=np.argmin)
    names = {"math": math, "defaultdict": defaultdict, "torch": numbers}
    exec(compile(ast.Module(functions, []), spec.origin, "exec"), names)
    return SimpleNamespace(**names)


@pytest.mark.parametrize("enlarges", [True, False])
@pytest.mark.parametrize("most", [1, 4, 16])
def test_pixels_of_llama4_are_those_of_transformers(
    tmp_path: Path, llama4_functions: SimpleNamespace, enlarges: bool, most: int
) -> None:
    checkpoint = write_settings("llama4", tmp_path)
    settings = json.loads((checkpoint / "preprocessor_config.json").read_text())
    settings |= {"max_patches": most, "resize_to_max_canvas": enlarges}
    settings |= {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.25, 0.2]}
    (checkpoint / "preprocessor_config.json").write_text(json.dumps(settings))
    processor, of = Processor(checkpoint), llama4_functions
    side = SimpleNamespace(height=16, width=16)
    canvases = np.array(of.find_supported_resolutions(most, side), np.float32)
    for seed in range(12):
        image = picture(seed, most=120)
        size = image.size[1], image.size[0]
        canvas = tuple(map(int, of.get_best_fit(size, canvases, enlarges)))
        limits = canvas
        if not enlarges:
            limits = tuple(min(max(a, 16), b) for a, b in zip(size, canvas, strict=True))
        height, width = (max(n, 1) for n in of.get_max_res_without_distortion(size, limits))
        levels = np.zeros((*canvas, 3), np.uint8)
        bilinear = Image.Resampling.BILINEAR
        levels[:height, :width] = np.asarray(image.resize((width, height), bilinear))
        rows, columns = canvas[0] // 16, canvas[1] // 16
        tiles = levels.reshape(rows, 16, columns, 16, 3).swapaxes(1, 2).reshape(-1, 16, 16, 3)
        if len(tiles) > 1:
            tiles = np.concatenate([tiles, np.asarray(image.resize((16, 16), bilinear))[None]])
        mean, std = (mx.array(settings[f"image_{name}"], mx.bfloat16) for name in ("mean", "std"))
        scaled = (mx.array(tiles).astype(mx.float32) * (1 / 255)).astype(mx.bfloat16)
        values = (scaled - mean) / std
        found = processor.pixels(image, Detail.FULL)
        assert found.grid == (rows, columns, 4, 4)
        wanted = np.array(values.astype(mx.float32)).transpose(0, 3, 1, 2)
        np.testing.assert_array_equal(found.array, wanted)


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
