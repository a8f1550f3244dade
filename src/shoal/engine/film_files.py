"""Films as clients send them: read within bounds, frame by frame, and none fetched.

PyAV reads them, by FFmpeg. Only plain files are opened, as of sounds, and only by decoders of films that browsers show.
Frames are counted by their packets, which are not decoded for it: a header may say anything, or nothing.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from shoal.audio import pyav

FORMATS = "mov,matroska,webm,avi,ogg"
"""Containers of FFmpeg's that hold all of their frames themselves."""
_DECODERS = ("h264", "hevc", "vp8", "vp9", "av1", "libdav1d", "mpeg4", "mjpeg", "theora")
MOST_BYTES = 64 << 20
"""Of one film."""
MOST_SECONDS = 3600.0
"""Of one film."""
MOST_PIXELS = 16 << 20
"""Of a frame; 4K has 8 million."""
MOST_DECODED = 16 << 30
"""Pixels of all frames of a conversation's films: of those that no model sees, most are decoded too."""
_MOST_FRAMES, _MOST_STREAMS = 1 << 20, 64
_GIVE = "Give an MP4, MOV, WebM, MKV, AVI or Ogg file of H.264, HEVC, VP8, VP9, AV1, MPEG-4, MJPEG or Theora"


class FilmFile:
    """A film, of which the first frame alone is decoded so far.

    Args:
        name: for errors.

    Attributes:
        width: of a frame as it is shown, upright.
        height: likewise.
        count: frames.
        rate: frames per second, on average.

    Raises:
        ValueError: it is no film, a broken one, or one beyond the bounds.
        Unsupported: PyAV is not installed.
    """

    def __init__(self, data: bytes, name: str) -> None:
        self._data, self._name = data, name
        with self._opened() as (container, stream):
            self._bounded(stream.width, stream.height)
            self.count = self._counted(container, stream)
            long = (container.duration or 0) / 1e6
            rate = stream.average_rate or stream.guessed_rate or (self.count / long if long > 0 else 0)
            self.rate = float(rate) or 1.0
            self._within_time(max(self.seconds, long))
        with self._opened() as (container, stream):  # again: not every file can be wound back
            first = next(self._decoded(container, stream), None)
            if first is None:
                raise ValueError(f"{name} has no frame that can be decoded. {_GIVE}")
            sides = first.height, first.width
            self.height, self.width = sides[::-1] if first.rotation % 180 else sides

    @cached_property
    def digest(self) -> str:
        """What tells it from others, by its bytes."""
        return hashlib.sha256(self._data).hexdigest()

    @property
    def seconds(self) -> float:
        """How long it is shown."""
        return self.count / self.rate

    @property
    def decoded_pixels(self) -> int:
        """Of all frames."""
        return int(self.count * self.width * self.height)

    def frames(self, wanted: Sequence[int], *sizes: tuple[int, int]) -> Tensor:
        """Frames by their numbers, which ascend, brought to sizes one after the other: uint8 [wanted, 3, H, W].

        A frame that the file counts and does not show is as the one before it. They are resized as torchvision does,
        and so transformers' video processors.

        Raises:
            ValueError: the file breaks off.
        """
        made = list[Tensor]()
        with self._opened() as (container, stream):
            for number, frame in enumerate(self._decoded(container, stream)):
                if number == wanted[len(made)]:
                    one = _resized(frame, sizes)
                    made += [one] * sum(place == number for place in wanted)
                if len(made) == len(wanted):
                    break
        if not made:
            raise ValueError(f"{self._name} breaks off before the first frame that is looked at; send a whole one")
        return torch.stack([*made, *made[-1:] * (len(wanted) - len(made))])

    @contextmanager
    def _opened(self) -> Iterator[tuple[Any, Any]]:
        """The file's container and its stream of pictures."""
        av, bound = pyav("a film"), {"max_pixels": str(4 * MOST_PIXELS)}  # for what headers hide
        how = {"format_whitelist": FORMATS, "protocol_whitelist": "", "enable_drefs": "0",
               "codec_whitelist": ",".join(_DECODERS)}
        try:
            with av.open(io.BytesIO(self._data), mode="r", metadata_errors="ignore", options=how,
                         stream_options=[bound] * _MOST_STREAMS) as container:  # some of which FFmpeg tries to decode
                covers = av.stream.Disposition.attached_pic  # of sounds
                stream = next((one for one in container.streams.video if not one.disposition & covers), None)
                if stream is None:
                    raise ValueError(f"{self._name} has no pictures that move. {_GIVE}")
                if stream.codec_context is None or stream.codec_context.name not in _DECODERS:
                    raise ValueError(f"{self._name} is of a codec that is not read. {_GIVE}")
                stream.codec_context.options = bound
                yield container, stream
        except (av.error.FFmpegError, OSError) as error:
            why = getattr(error, "strerror", None) or error
            raise ValueError(f"{self._name} cannot be read as a film: {why}. {_GIVE}") from None

    def _decoded(self, container: Any, stream: Any) -> Iterator[Any]:
        for frame in container.decode(stream):
            self._bounded(frame.width, frame.height)
            yield frame

    def _counted(self, container: Any, stream: Any) -> int:
        count, told = 0, int(stream.frames)
        for packet in container.demux(stream):
            count += int(packet.size > 0)
            if count > _MOST_FRAMES:
                raise ValueError(f"{self._name} has more than {_MOST_FRAMES} frames, the most that are read; cut it "
                                 "into parts")
        if count < told:
            raise ValueError(f"{self._name} breaks off: its header says {told} frames, and it has {count}; "
                             "send a whole one")
        return count

    def _bounded(self, width: int, height: int) -> None:
        if width * height > MOST_PIXELS:
            raise ValueError(f"{self._name} has frames of {width} by {height}, more than {MOST_PIXELS >> 20} million "
                             "pixels, the most that is decoded; send a smaller one")

    def _within_time(self, seconds: float) -> None:
        if seconds > MOST_SECONDS:
            raise ValueError(f"{self._name} is {seconds:.0f} s long; it must be at most {MOST_SECONDS:g} s. Cut it "
                             "into parts")


def all_opened(files: Sequence[bytes]) -> list[FilmFile]:
    """The films of a conversation; ValueError as for `FilmFile`, and for too many pixels in all."""
    found = [FilmFile(data, f"film {number}") for number, data in enumerate(files, 1)]
    total = sum(film.decoded_pixels for film in found)
    if total > MOST_DECODED:
        raise ValueError(f"the conversation's films have {total / 2**30:.1f} billion pixels in all frames; at most "
                         f"{MOST_DECODED >> 30} billion are decoded. Send shorter or smaller ones")
    return found


def _resized(frame: Any, sizes: Sequence[tuple[int, int]]) -> Tensor:
    """A frame upright, in RGB, uint8 [3, height, width], brought to sizes one after the other."""
    whole = torch.from_numpy(frame.to_ndarray(format="rgb24")).permute(2, 0, 1)
    made: Tensor = whole.rot90(frame.rotation // 90, (1, 2)).contiguous()[None]
    for size in sizes:
        made = interpolate(made, size=size, mode="bicubic", antialias=True)
    return made[0]
