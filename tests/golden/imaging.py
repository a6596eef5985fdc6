"""Images of tiny checkpoints with towers, and an independent forward to compare with: mlx-vlm's
whole model, with the masks of transformers where mlx-vlm's are others.
"""

import importlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from blake3 import blake3
from mlx.nn.layers.activations import GELU
from mlx.nn.layers.base import Module

from engine.images.layout import ImageLayout, image_layout
from engine.mlx_backend.attentions import attentions
from engine.mlx_backend.kv.layout import Layout
from engine.mlx_backend.loading.loader import load_weights, open_images, open_model
from engine.mlx_backend.model.attention import Attention
from engine.mlx_backend.vision.families import KimiVL
from engine.mlx_backend.vision.modules import PACKAGE, vision_modules
from engine.values.images import Image, PreparedImage
from engine.values.output import TokenLogprob
from engine.values.request import Request, SamplingParams
from engine.values.settings import KVFormat
from engine.values.tokens import pack
from tests.golden.driving import random_tokens
from tests.offline import OfflineDaemon, Room, Served
from tests.stored_peer import store_in_format

STEP_TOKENS = 120
Logits = npt.NDArray[np.float32]
Prompt = tuple[list[int], tuple[Image, ...]]


def load_with_images(checkpoint: Path, kv_format: KVFormat = KVFormat.AUTO) -> Served:
    """The model of a checkpoint, with its tower, as the daemon loads it."""
    opened = open_model(checkpoint, 1 << 30, kv_format=kv_format)
    loaded = open_images(opened, checkpoint, STEP_TOKENS)
    return Served(loaded, load_weights(loaded, attentions("auto", loaded), lambda line: None))


_AROUND = "vision_start_token_id", "vision_end_token_id"


@dataclass(frozen=True)
class Scene:
    """A family's checkpoint with a tower."""

    family: str
    checkpoint: Path

    @cached_property
    def config(self) -> dict[str, Any]:
        config: dict[str, Any] = json.loads((self.checkpoint / "config.json").read_text())
        return config

    @cached_property
    def layout(self) -> ImageLayout:
        layout = image_layout(self.checkpoint)
        assert layout is not None
        return layout

    def prompt(self, *parts: list[int] | PreparedImage) -> Prompt:
        """The tokens and the images of a prompt of these parts, with the tokens that the family's
        template has around images.
        """
        start, end = ([self.config[name]] if name in self.config else [] for name in _AROUND)
        tokens, images = list[int](), list[Image]()
        for part in parts:
            if isinstance(part, PreparedImage):
                tokens += start
                images.append(part.at(len(tokens)))
                tokens += [*part.tokens, *end]
            else:
                tokens += part
        return tokens, tuple(images)

    def image(self, seed: int, rows: int = 2, columns: int = 3) -> PreparedImage:
        """Random pixels, that many squares of patches high and wide where the family's images have
        any size. Most images are shown in tiles, too, where the family has some.
        """
        merge, vision = self.layout.merge, self.config["vision_config"]
        patch = int(vision["patch_size"])
        draw = np.random.default_rng(seed)
        if self.family == "gemma3":
            side = int(vision["image_size"])
            grid: tuple[int, ...] = (side // patch, side // patch)
            shape: tuple[int, ...] = (3, side, side)
        else:
            grid = rows * merge, columns * merge
            n_patches = grid[0] * grid[1]
            tiles = (1, 1) if seed % 4 == 2 else (rows - 1, columns - 1)
            n_tiles = tiles[0] * tiles[1] if tiles != (1, 1) else 0
            if self.family in ("llama4", "lfm2_vl"):
                grid = (*tiles, *((4, 4) if self.family == "llama4" else grid))
            shape = {
                "llama4": (n_tiles + 1, 3, 4 * patch, 4 * patch),
                "lfm2_vl": (16 * n_tiles + n_patches, 3 * patch**2),
                "pixtral": (3, grid[0] * patch, grid[1] * patch),
                "mistral3": (3, grid[0] * patch, grid[1] * patch),
                "gemma4": (70 * merge**2, 3 * patch**2),
                "kimi_vl": (n_patches, 3, patch, patch),
            }.get(self.family, (n_patches, 6 * patch**2))
            if "qwen" in self.family:
                grid = (1, *grid)
        pixels = draw.normal(size=shape).astype(np.float32)
        digest = blake3(pixels.tobytes() + repr(grid).encode()).digest()
        file = self.checkpoint.parent / f"{digest.hex()}.npy"
        np.save(file, pixels)
        return self.layout.prepared(digest, grid, str(file))


class WholeModel:
    """mlx-vlm's model of a scene, which computes all tokens of a prompt in one forward."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        family, config = scene.family, scene.config
        vision_modules("pixtral")  # makes the packages known
        with _real_packages():
            package = importlib.import_module(f"mlx_vlm.models.{family}")
            fields = importlib.import_module(f"mlx_vlm.models.{family}.config")
        if family == "kimi_vl":  # mlx-vlm has other names for fields of the tower
            config = {**config, "vision_config": KimiVL.vision_fields(config["vision_config"])}
        own = fields.ModelConfig.from_dict(dict(config))
        for name, kind in (("text", fields.TextConfig), ("vision", fields.VisionConfig)):
            part = getattr(own, f"{name}_config")
            if isinstance(part, dict) or part is None:
                named = config.get(f"{name}_config") or config
                setattr(own, f"{name}_config", kind.from_dict(dict(named)))
        if family == "gemma3":  # mlx-vlm reads these from other places
            own.hidden_size = config["text_config"]["hidden_size"]
            own.text_config.mm_tokens_per_image = config["mm_tokens_per_image"]
            own.text_config.vocab_size = config["vocab_size"]
        self._model: Module = package.Model(own)
        tensors = mx.load(str(scene.checkpoint / "model.safetensors"))
        assert isinstance(tensors, dict)
        weights = dict(tensors)
        if family == "kimi_vl":
            weights = _with_joint_projections(weights)
        tower: Any = self._model.vision_model if family == "llama4" else self._model.vision_tower
        if family == "llama4":  # mlx-vlm approximates the function that transformers has
            for module in (*tower.model.layers, tower.vision_adapter):
                module.mlp.activation_fn = GELU()
        for part in (self._model, tower, self._model.language_model):
            if hasattr(part, "sanitize"):
                weights = part.sanitize(weights)
        self._model.load_weights(list(weights.items()))

    def store_in_format(self, layout: Layout) -> None:
        """Attend to K and V as `layout` stores them."""
        store_in_format(self._model.language_model, layout)

    def logits(self, tokens: Sequence[int], images: Sequence[Image]) -> Logits:
        """After every token, `[tokens, vocabulary]`."""
        compute = _COMPUTE.get(self._scene.family, _compute_spliced)
        logits = compute(self._model, list(tokens), images)
        return np.array(logits[0].astype(mx.float32))


@contextmanager
def _real_packages() -> Iterator[None]:
    """Within the context mlx-vlm's packages of families are imported as they are. The engine has
    bare ones in their place, which come back afterwards.
    """

    def take() -> dict[str, ModuleType]:
        names = [name for name in sys.modules if name.partition(".")[0] == PACKAGE]
        return {name: sys.modules.pop(name) for name in names}

    bare = take()
    for name in (PACKAGE, f"{PACKAGE}.models"):
        sys.modules[name] = bare[name]
    try:
        yield
    finally:
        take()
        sys.modules.update(bare)


def _with_joint_projections(weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Weights with `kv_b_proj` in place of the two that mlx-lm makes of it."""
    joint = dict(weights)
    for name in [name for name in weights if name.endswith(".embed_q.weight")]:
        layer = name.removesuffix("embed_q.weight")
        keys = joint.pop(name).swapaxes(1, 2)  # [heads, dimensions, rank]
        values = joint.pop(f"{layer}unembed_out.weight")
        both = mx.concatenate([keys, values], axis=1)
        joint[f"{layer}kv_b_proj.weight"] = both.reshape(-1, both.shape[-1])
    return joint


def _embedded(model: Module, image: Image) -> Any:
    """What mlx-vlm makes of one image alone: its embeddings, and what else a model is given."""
    ids = mx.array([[image_token(model)] * image.n_tokens])
    pixels = mx.array(np.load(image.file))
    more: dict[str, Any] = {}
    match model.config.model_type:
        case "gemma4":
            rows, columns = image.grid
            at = np.full((len(pixels), 2), -1, np.int32)
            at[: rows * columns, 0] = np.arange(rows * columns) % columns
            at[: rows * columns, 1] = np.arange(rows * columns) // columns
            pixels, more = pixels[None], {"image_position_ids": mx.array(at[None])}
        case "kimi_vl":
            more = {"image_grid_hws": mx.array([image.grid])}
        case "pixtral" | "mistral3":
            pixels, more = pixels[None], {"image_sizes": [pixels.shape[1:]]}
        case "gemma3":
            pixels = pixels[None]
        case "llama4":
            pass
        case "lfm2_vl":
            pixels, more = _views(np.load(image.file), image.grid)
        case _:
            more = {"image_grid_thw": mx.array([image.grid])}
    return model.get_input_embeddings(ids, pixels, mask=mx.ones_like(ids), **more)


def _views(patches: Logits, grid: tuple[int, ...]) -> tuple[mx.array, dict[str, mx.array]]:
    """The tiles of an image of LFM2-VL, and the whole of it, all of one size."""
    tiles, whole = grid[0] * grid[1], grid[2:]
    shapes = [*([(4, 4)] * tiles if tiles > 1 else ()), whole]
    sizes = [rows * columns for rows, columns in shapes]
    views = np.zeros((len(sizes), 64, patches.shape[1]), np.float32)
    for view, size, stop in zip(views, sizes, np.cumsum(sizes), strict=True):
        view[:size] = patches[stop - size : stop]
    mask = np.arange(64) < np.array(sizes)[:, None]
    return mx.array(views), {
        "pixel_attention_mask": mx.array(mask.astype(np.int32)),
        "spatial_shapes": mx.array(np.array(shapes, np.int32)),
    }


def image_token(model: Module) -> int:
    config = model.config
    for name in ("image_token_index", "image_token_id", "media_placeholder_token_id"):
        if getattr(config, name, None) is not None:
            return int(getattr(config, name))
    raise LookupError("no image token")


def _spliced(embeddings: mx.array, images: Sequence[Image], found: Sequence[mx.array]) -> mx.array:
    for image, features in zip(images, found, strict=True):
        part = 0
        for first, n in image.runs:
            embeddings[0, first : first + n] = features[part : part + n]
            part += n
    return embeddings


def _compute_spliced(model: Module, tokens: list[int], images: Sequence[Image]) -> mx.array:
    language = model.language_model
    embeddings = language.model.embed_tokens(mx.array([tokens]))
    found = [_embedded(model, image).inputs_embeds[0] for image in images]
    embeddings = _spliced(embeddings, images, found)
    cache = language.make_cache() if hasattr(language, "make_cache") else None
    logits: mx.array = language(mx.array([tokens]), inputs_embeds=embeddings, cache=cache).logits
    return logits


def _compute_qwen(model: Module, tokens: list[int], images: Sequence[Image]) -> mx.array:
    language, ids = model.language_model, mx.array([tokens])
    embeddings = language.model.embed_tokens(ids)
    found = [_embedded(model, image) for image in images]
    embeddings = _spliced(embeddings, images, [each.inputs_embeds[0] for each in found])
    # mlx-vlm reads positions from ids, of which sent ones may be any.
    at_offsets = mx.broadcast_to(mx.arange(len(tokens)), (3, 1, len(tokens)))
    more: dict[str, Any] = {"position_ids": at_offsets}
    if images:
        # Which tokens stand for images is read from ids, of which generated ones may be any.
        known = np.ones((1, len(tokens)), np.int32)
        for image in images:
            known[:, image.start - 1] = model.config.vision_start_token_id
            known[:, image.start : image.stop] = image_token(model)
        grids, placed = mx.array([image.grid for image in images]), mx.array(known)
        more["position_ids"], _ = language.get_rope_index(placed, grids, None, mx.ones_like(placed))
    if images and found[0].deepstack_visual_embeds is not None:
        at = np.zeros((1, len(tokens)), bool)
        for image in images:
            at[:, image.start : image.stop] = True
        layers = zip(*(each.deepstack_visual_embeds for each in found), strict=True)
        more["visual_pos_masks"] = mx.array(at)
        more["deepstack_visual_embeds"] = [mx.concatenate(list(each)) for each in layers]
    cache = language.make_cache() if hasattr(language, "make_cache") else None
    logits: mx.array = language(ids, inputs_embeds=embeddings, cache=cache, **more).logits
    return logits


class _TwoWay:
    """Masks of transformers for Gemma: tokens of an image see each other, within the window in
    layers that have one.
    """

    def __init__(self, cache: Any, images: Sequence[Image], window: int | None) -> None:
        self._cache, self._images, self._window = cache, images, window

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def make_mask(self, length: int, **_: Any) -> mx.array:
        mask = np.tril(np.ones((length, length), bool))
        for image in self._images:
            for row in range(image.start, image.stop):
                mask[row, image.start : image.stop] = True
        if self._window is not None:
            for row in range(length):
                mask[row, : max(row - self._window + 1, 0)] = False
        return mx.array(mask)


def _compute_gemma3(model: Module, tokens: list[int], images: Sequence[Image]) -> mx.array:
    language, ids = model.language_model, mx.array([tokens])
    embeddings = language.model.embed_tokens(ids)
    found = [_embedded(model, image).inputs_embeds[0] for image in images]
    embeddings = _spliced(embeddings, images, found)
    pattern, window = language.config.sliding_window_pattern, language.config.sliding_window
    cache = [
        _TwoWay(each, images, None if index % pattern == pattern - 1 else window)
        for index, each in enumerate(language.make_cache())
    ]
    logits: mx.array = language(ids, inputs_embeds=embeddings, cache=cache).logits
    return logits


def _compute_gemma4(model: Module, tokens: list[int], images: Sequence[Image]) -> mx.array:
    language, ids = model.language_model, mx.array([tokens])
    plain = model.get_input_embeddings(ids)
    found = [_embedded(model, image).inputs_embeds[0] for image in images]
    text = np.array(tokens)
    for image in images:
        text[image.start : image.stop] = 0
    embeddings = _spliced(plain.inputs_embeds, images, found)
    window, two_way = language.config.sliding_window, [each for each in images if each.is_whole]
    cache = [
        _TwoWay(each, two_way, window)
        if layer.layer_type == "sliding_attention"
        else _TwoWay(each, (), None)
        for layer, each in zip(language.model.layers, language.make_cache(), strict=False)
    ]
    per_layer = language.model.get_per_layer_inputs(mx.array(text[None]))
    logits: mx.array = language(
        ids, inputs_embeds=embeddings, cache=cache, per_layer_inputs=per_layer
    ).logits
    return logits


_COMPUTE: Mapping[str, Callable[[Module, list[int], Sequence[Image]], mx.array]] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5"), _compute_qwen),
    "gemma3": _compute_gemma3,
    "gemma4": _compute_gemma4,
}


ROOM = Room(n_blocks=128, block_size=8, max_running=8, step_tokens=STEP_TOKENS)
GREEDY = SamplingParams(temperature=0, top_logprobs=5)
N_TOKENS = 8

TOLERANCES = {"qwen3_5": 1e-3}
"""Of log-probabilities; 1e-4 without an entry. Random recurrent weights amplify what is rounded."""


class Bench:
    """A family's model as it is served, and its whole model to compare with."""

    def __init__(self, scene: Scene, served: Served) -> None:
        self.scene, self.served = scene, served
        self.whole = WholeModel(scene)

    def daemon(self, room: Room = ROOM, attention: Attention | None = None) -> OfflineDaemon:
        return OfflineDaemon(self.served, attention or self.served.execution.attention, room)

    def text(self, n_tokens: int, seed: int) -> list[int]:
        """Tokens of text."""
        return random_tokens(n_tokens, seed)

    def expect(self, prompt: Prompt, said: Sequence[int], logprobs: Sequence[TokenLogprob]) -> None:
        """The answer is greedy by the whole model, and log-probabilities are the whole model's."""
        assert len(said) == len(logprobs) == N_TOKENS
        tolerance = TOLERANCES.get(self.scene.family, 1e-4)
        assert self.error(prompt, said, logprobs) < tolerance

    def error(self, prompt: Prompt, said: Sequence[int], logprobs: Sequence[TokenLogprob]) -> float:
        """The largest difference of a log-probability from the whole model's, and of a token's from
        the best.
        """
        tokens, images = prompt
        logits = self.whole.logits([*tokens, *said], images)[len(tokens) - 1 : -1]
        expected = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
        errors = [
            max(own.max() - own[token], *(abs(own[at] - logprob) for at, logprob in found.top))
            for own, token, found in zip(expected, said, logprobs, strict=True)
        ]
        return float(max(errors))


def request_of(name: str, prompt: Prompt) -> Request:
    tokens, images = prompt
    return Request(
        name,
        pack(tokens),
        max_tokens=N_TOKENS,
        sampling=GREEDY,
        ignore_eos=True,
        images=images,
    )


def serve(
    daemon: OfflineDaemon, bench: Bench, prompts: Mapping[str, Prompt]
) -> Mapping[tuple[str, int], Sequence[int]]:
    """All at once; each answer is the whole model's. Returns the answers."""
    said = daemon.serve(*(request_of(name, prompt) for name, prompt in prompts.items()))
    for name, prompt in prompts.items():
        bench.expect(prompt, said[name, 0], daemon.logprobs[name, 0])
    return said


def encoded(daemon: OfflineDaemon) -> int:
    """How many images were encoded."""
    assert daemon.scheduler.images is not None
    return daemon.scheduler.images.stats().encoded


def prompts_of(bench: Bench) -> dict[str, Prompt]:
    """Images at every place of a prompt."""
    scene, text = bench.scene, bench.text
    one, other = scene.image(1), scene.image(2, 3, 2)
    return {
        "middle": scene.prompt(text(9, 1), one, text(7, 2)),
        "first": scene.prompt(one, text(11, 3)),
        "two": scene.prompt(text(5, 4), one, text(6, 5), other, text(8, 6)),
        "in a row": scene.prompt(text(4, 7), one, other, text(5, 8)),
        "twice": scene.prompt(text(3, 9), other, text(4, 10), other, text(2, 11)),
        "text": scene.prompt(text(30, 12)),
    }
