"""What transformers' video processors make of films, without torchvision: the few functions that they use stand in.

    python tests/film_oracle.py FOLDER

reads `asked.pt` of a folder and writes `told.pt`; `told_of` runs that in a process of its own, so that no other test
takes torchvision for installed. The stand-ins do what torchvision's do on a CPU (transforms/v2/functional).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

_STAND_IN = '''
"""Stands in for torchvision."""
import enum
import torch
__version__ = "0.26.0"
class InterpolationMode(enum.Enum):
    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"
def resize(image, size, interpolation, antialias=True):
    flat = image.reshape(-1, *image.shape[-3:])
    made = torch.nn.functional.interpolate(flat, size=list(size), mode=interpolation.value, antialias=antialias)
    return made.reshape(*image.shape[:-2], *made.shape[-2:])
def normalize(image, mean, std, inplace=False):
    mean, std = (torch.as_tensor(one, dtype=image.dtype)[:, None, None] for one in (mean, std))
    return (image - mean) / std
def pil_to_tensor(image):
    raise NotImplementedError
def grayscale_to_rgb(image):
    return image
'''
_MODULES = ("io", "transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional")


def told_of(folder: Path, asked: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What transformers says of films.

    Args:
        asked: of each the model type (`kind`), settings, `frames` uint8 [T, H, W, 3], `rate`, and `text`.

    Returns:
        Of each its `frames_indices`, what its processor makes of frames, for Qwen2.5-VL also `second_per_grid_ts`, and
        the text that stands for it.
    """
    packages = folder / "packages"
    package, named = packages / "torchvision", packages / "torchvision-0.26.0.dist-info"
    named.mkdir(parents=True)
    (named / "METADATA").write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 0.26.0\n")
    for module in ("", *_MODULES):
        place = package.joinpath(*module.split(".")) / "__init__.py"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(_STAND_IN if not module else "from torchvision import *\n")
    (package / "transforms" / "v2" / "__init__.py").write_text("from . import functional\n")
    torch.save(asked, folder / "asked.pt")
    path = os.pathsep.join([str(packages), *filter(None, [os.environ.get("PYTHONPATH")])])
    subprocess.run([sys.executable, __file__, str(folder)], check=True, timeout=300, env={
        **os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"})
    told: list[dict[str, Any]] = torch.load(folder / "told.pt", weights_only=False)
    return told


def _told(one: dict[str, Any]) -> dict[str, Any]:
    import transformers as hf
    from transformers.video_utils import VideoMetadata

    films, processor = {
        "qwen2_vl": ("Qwen2VLVideoProcessor", "Qwen2VLProcessor"),
        "qwen2_5_vl": ("Qwen2VLVideoProcessor", "Qwen2_5_VLProcessor"),
        **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5"), ("Qwen3VLVideoProcessor", "Qwen3VLProcessor")),
        "smolvlm": ("SmolVLMVideoProcessor", "SmolVLMProcessor"),
        "internvl": ("InternVLVideoProcessor", "InternVLProcessor"),
    }[one["kind"]]
    count, height, width, _ = one["frames"].shape
    metadata = VideoMetadata(total_num_frames=count, fps=one["rate"], duration=count / one["rate"], width=width,
                             height=height, video_backend="pyav")
    videos = getattr(hf, films)(**one["settings"])
    made = videos([one["frames"]], video_metadata=[metadata], return_metadata=True, return_tensors="pt",
                  do_sample_frames=True)
    kind = getattr(hf, processor)
    writer = kind.__new__(kind)  # whose words need a tokenizer, and no more of it than these
    writer.video_processor, writer.video_token = videos, "<|video_pad|>"
    writer.vision_start_token, writer.vision_end_token = "<|vision_start|>", "<|vision_end|>"
    writer.fake_image_token, writer.global_image_token = "<fake_token_around_image>", "<global-img>"
    writer.start_image_token, writer.end_image_token = "<img>", "</img>"
    writer.image_token = {"internvl": "<IMG_CONTEXT>"}.get(one["kind"], "<image>")
    writer.image_seq_len = writer.image_seq_length = 4
    if one["kind"] == "smolvlm":  # whose package of numbers in words may not be installed
        words = {1: "one", 2: "two", 3: "three", 4: "four", 5: "five", 6: "six", 21: "twenty-one"}
        sys.modules[kind.__module__].num2words = words.__getitem__  # type: ignore[attr-defined]
    text = writer.replace_video_token(made, 0)
    (shown,) = made.pop("video_metadata")
    pace = getattr(videos, "temporal_patch_size", 1) / shown.sampled_fps
    return {**made, "frames_indices": [*map(int, shown.frames_indices)], "text": text,
            "second_per_grid_ts": torch.tensor([pace])}


if __name__ == "__main__":
    place = Path(sys.argv[1])
    torch.save([_told(one) for one in torch.load(place / "asked.pt", weights_only=False)], place / "told.pt")
