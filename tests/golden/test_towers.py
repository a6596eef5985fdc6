"""Vision towers: by stages as at once, quantized or not, and reasons where they cannot be used."""

import json
import shutil
import sys
from importlib.machinery import PathFinder
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from engine.core.step import Encode
from engine.images.packages import INSTALL
from engine.mlx_backend.loading.images import Vision, open_vision
from engine.mlx_backend.vision.modules import NoVision
from engine.values.images import Image
from tests.golden.driving import random_tokens
from tests.golden.imaging import N_TOKENS, ROOM, STEP_TOKENS, load_with_images, request_of
from tests.offline import OfflineDaemon
from tests.vision_checkpoints import REFUSED_FAMILIES, VISION_FAMILIES, write_vision_checkpoint

pytest.importorskip("mlx_vlm", reason="the packages for images are not installed")


def opened(checkpoint: Path) -> Vision:
    vision = open_vision(checkpoint, STEP_TOKENS, has_states=False)
    assert vision is not None
    return vision


def example(vision: Vision, folder: Path) -> Image:
    tower = vision.encoder.tower
    shape, grid = tower.example()
    file = folder / "image.npy"
    np.save(file, np.random.default_rng(0).normal(size=shape).astype(np.float32))
    return Image(bytes(32), ((0, tower.n_parts(grid)),), grid, str(file))


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_stages_equal_the_whole(family: str, tmp_path: Path) -> None:
    vision = opened(write_vision_checkpoint(family, tmp_path))
    encoder, image = vision.encoder, example(vision, tmp_path)
    whole = encoder.at_once(mx.array(np.load(image.file)), image.grid)
    mx.eval(whole)
    for stage in range(encoder.n_stages):
        mx.eval(encoder.encode(Encode(image, stage, 1)))
    staged = encoder.features(image)
    assert mx.array_equal(staged.embeddings, whole.embeddings)
    for one, other in zip(staged.added, whole.added, strict=True):
        assert mx.array_equal(one, other)


def test_quantized_tower(tmp_path: Path) -> None:
    """A tower of which some layers are quantized computes what their codes say."""
    plain = write_vision_checkpoint("qwen3_vl", tmp_path)
    tensors = mx.load(str(plain / "model.safetensors"))
    assert isinstance(tensors, dict)
    coded, decoded = dict(tensors), dict(tensors)
    for name in [name for name in tensors if ".mlp.linear_fc1.weight" in name]:
        parts = mx.quantize(tensors[name], group_size=32, bits=8)
        decoded[name] = mx.dequantize(*parts, group_size=32, bits=8)
        names = (name, *(name.replace("weight", of) for of in ("scales", "biases")))
        coded.update(zip(names, parts, strict=True))
    features = []
    for kind, weights in (("coded", coded), ("decoded", decoded)):
        folder = tmp_path / kind
        shutil.copytree(plain, folder)
        mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        config["quantization"] = {"group_size": 32, "bits": 8}
        (folder / "config.json").write_text(json.dumps(config))
        vision = opened(folder)
        image = example(vision, tmp_path)
        features.append(vision.encoder.at_once(mx.array(np.load(image.file)), image.grid))
    assert mx.allclose(features[0].embeddings, features[1].embeddings, atol=1e-5)


def test_weights_in_half_precision(tmp_path: Path) -> None:
    checkpoint = write_vision_checkpoint("pixtral", tmp_path, dtype=mx.bfloat16)
    assert load_with_images(checkpoint).execution.images is not None


def test_text_is_served_where_the_tower_is_broken(tmp_path: Path) -> None:
    checkpoint = write_vision_checkpoint("pixtral", tmp_path)
    file = str(checkpoint / "model.safetensors")
    tensors = mx.load(file)
    assert isinstance(tensors, dict)
    kept = {name: array for name, array in tensors.items() if "ln_pre" not in name}
    mx.eval(kept)
    mx.save_safetensors(file, kept, {"format": "pt"})
    served = load_with_images(checkpoint)
    assert served.images is None
    assert "cannot be loaded: Missing 1 parameters" in served.execution.images_refused


@pytest.mark.parametrize("family", REFUSED_FAMILIES)
def test_text_is_served_where_the_tower_is_not_supported(family: str, tmp_path: Path) -> None:
    served = load_with_images(write_vision_checkpoint(family, tmp_path))
    assert served.images is None
    assert f"tower of {family} is not supported: " in served.execution.images_refused
    daemon = OfflineDaemon(served, served.execution.attention, ROOM)
    said = daemon.serve(request_of("text", (random_tokens(30, 1), ())))
    assert len(said["text", 0]) == N_TOKENS


def test_reasons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = write_vision_checkpoint("gemma3", tmp_path)
    with pytest.raises(NoVision, match="raise step_tokens"):
        open_vision(checkpoint, 8, has_states=False)
    for name in [name for name in sys.modules if name.partition(".")[0] == "mlx_vlm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(PathFinder, "find_spec", lambda *_: None)
    with pytest.raises(NoVision, match="not installed") as missing:
        open_vision(checkpoint, STEP_TOKENS, has_states=False)
    assert INSTALL in str(missing.value)
