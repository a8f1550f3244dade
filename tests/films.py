"""Films for tests, made by PyAV, and what transformers' models read of them."""

from __future__ import annotations

import base64
import io
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import seers

av = pytest.importorskip("av")
Frames = NDArray[np.uint8]


def noise(seed: int, count: int = 12, width: int = 48, height: int = 32) -> Frames:
    """Coloured noise, coarse enough to outlive a codec [count, height, width, 3]."""
    small = np.random.default_rng(seed).integers(0, 256, (count, height // 8, width // 8, 3), dtype=np.uint8)
    return small.repeat(8, 1).repeat(8, 2)


def film(
    frames: Frames, rate: int = 4, form: str = "mp4", codec: str = "mpeg4", sound: bool = False, pixels: str = "yuv420p"
) -> bytes:
    """A film's file."""
    out = io.BytesIO()
    with av.open(out, "w", format=form) as container:
        stream = container.add_stream(codec, rate=rate)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt, stream.bit_rate = pixels, 4_000_000
        beside = container.add_stream("aac", rate=16000) if sound else None
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode(None))
        if beside is not None:
            quiet = av.AudioFrame.from_ndarray(np.zeros((1, 16000), np.float32), format="fltp", layout="mono")
            quiet.rate = 16000
            container.mux([*beside.encode(quiet), *beside.encode(None)])
    return out.getvalue()


def frames_of(data: bytes) -> Frames:
    """All frames of a film."""
    with av.open(io.BytesIO(data)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def url(data: bytes, kind: str = "mp4") -> str:
    """A film's data URL."""
    return f"data:video/{kind};base64,{base64.b64encode(data).decode()}"


def part(data: bytes) -> dict[str, Any]:
    """A film as a part of a message."""
    return {"type": "video_url", "video_url": {"url": url(data)}}


@cache
def noisy(seed: int, count: int = 12, width: int = 48, height: int = 32, rate: int = 4) -> bytes:
    """A film of coloured noise."""
    return film(noise(seed, count, width, height), rate)


def asked(*parts: Any) -> list[dict[str, Any]]:
    """A conversation of one message of texts, pictures, and films as files."""
    return [{"role": "user", "content": [
        {"type": "text", "text": one} if isinstance(one, str) else part(one) if isinstance(one, bytes) else
        seers.part(one) for one in parts]}]


def shown_text(messages: list[dict[str, Any]], tokenizer: Any) -> str:
    """The text of a conversation by its template, with marks."""
    kinds = {"image_url": "image", "video_url": "video"}
    told = [{**one, "content": [part if part["type"] == "text" else {"type": kinds[part["type"]]}
                                for part in one["content"]]} for one in messages]
    text: str = tokenizer.apply_chat_template(told, tokenize=False, add_generation_prompt=True)
    return text


def places(kinds: list[int], grids: dict[int, list[list[int]]], intervals: list[float], merge: int = 2) -> torch.Tensor:
    """By which places tokens are turned [3, 1, tokens], as the authors of Qwen's models had it (max + 1 behind each).

    Args:
        kinds: of each token 0 for text, 1 for pictures, 2 for films.
        grids: steps, rows and columns of patches of each run of 1, and of 2.
        intervals: of each run of 2, how many places a step takes.
    """
    made, at, begin = list[list[int]](), 0, 0
    left, paces = {kind: list(runs) for kind, runs in grids.items()}, list(intervals)
    while at < len(kinds):
        if kinds[at] == 0:
            made.append([begin] * 3)
            at, begin = at + 1, begin + 1
            continue
        pace = paces.pop(0) if kinds[at] == 2 else 1.0
        steps, rows, columns = left[kinds[at]].pop(0)
        run = [[begin + int(step * pace), begin + row, begin + column] for step in range(steps)
               for row in range(rows // merge) for column in range(columns // merge)]
        made, at, begin = [*made, *run], at + len(run), max(map(max, run)) + 1
    return torch.tensor(made).T[:, None]
