"""Audio files as samples, piece by piece, so that an hour takes no more memory than a minute.

PyAV reads them, by FFmpeg. Only plain files are opened: a playlist could name other files, or addresses.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from types import ModuleType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from shoal.errors import Unsupported, pip_install

RATE = 16_000
"""Samples per second that models of speech read."""
Samples = NDArray[np.float32]
_FORMATS = "wav,flac,mp3,ogg,mov,matroska,webm,aac,aiff,caf,amr,au,w64,asf"
"""Containers of FFmpeg's that hold all of their sound themselves."""
_INSTALL = f"Install it with: {pip_install('shoal[speech]')}"


def pyav(what: str) -> ModuleType:
    """PyAV; Unsupported where it is not installed, which names `what` it reads."""
    try:
        import av
    except ImportError:
        raise Unsupported(what, "PyAV, which reads it, is not installed", _INSTALL) from None
    return av


class Audio:
    """The sound of a file, mono, at `RATE`; a context manager that closes it.

    Args:
        file: the file, open for reading bytes.
        name: for errors.
        most: seconds; None for any length.

    Attributes:
        seconds: its length as the file says; None where it does not.

    Raises:
        ValueError: it is no audio file, it has no sound, or it is longer than `most`.
        Unsupported: PyAV is not installed.
    """

    def __init__(self, file: BinaryIO, name: str, most: float | None = None) -> None:
        self._av, self._name, self._most = pyav("an audio file"), name, most
        options = {"format_whitelist": _FORMATS, "protocol_whitelist": "", "enable_drefs": "0"}
        try:
            self._container: Any = self._av.open(file, mode="r", metadata_errors="ignore", options=options)
        except (self._av.error.FFmpegError, ValueError, OSError) as error:
            raise self._unreadable(error) from None
        try:
            if not self._container.streams.audio:
                raise ValueError(f"{name} has no audio stream. Give a file with sound")
            length = self._container.duration
            self.seconds = None if length is None or length < 0 else length / 1e6
            self._check(self.seconds or 0.0)
        except ValueError:
            self.close()
            raise

    def __enter__(self) -> Audio:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file's decoder."""
        with suppress(Exception):
            self._container.close()

    def pieces(self) -> Iterator[Samples]:
        """The samples, in -1..1, in pieces of any length; ValueError where the file breaks off or is too long."""
        resampler, count = self._av.AudioResampler(format="s16", layout="mono", rate=RATE), 0
        try:
            for frame in self._frames():
                for made in resampler.resample(frame):
                    piece: Samples = made.to_ndarray().reshape(-1).astype(np.float32) / 32768  # as models learned it
                    count += len(piece)
                    self._check(count / RATE)
                    yield piece
        except self._av.error.FFmpegError as error:
            raise self._unreadable(error) from None

    def _frames(self) -> Iterator[Any]:
        """Decoded frames, and None at the end, which empties the resampler."""
        for frame in self._container.decode(self._container.streams.audio[0]):
            frame.pts = None  # gaps between frames are no silence that a model should hear
            yield frame
        yield None

    def _check(self, seconds: float) -> None:
        if self._most is not None and seconds > self._most:
            raise ValueError(f"{self._name} is {seconds:.0f} s long; it must be at most {self._most:g} s. Cut it into "
                             "parts")

    def _unreadable(self, error: Exception) -> ValueError:
        why = getattr(error, "strerror", None) or error
        return ValueError(f"{self._name} cannot be read as audio: {why}. Give a WAV, FLAC, MP3, Ogg, MP4 or WebM file")


def quietest(samples: Samples, first: int) -> int:
    """The middle of the quietest fifth of a second of some samples, from sample `first` on."""
    length = RATE // 5
    sums = np.cumsum(np.concatenate([[0.0], np.square(samples[first:], dtype=np.float64)]))
    return first + int((sums[length:] - sums[:-length]).argmin()) + length // 2


class Window:
    """A window that moves forward over samples, of which only those from its beginning on are held."""

    def __init__(self, pieces: Iterator[Samples]) -> None:
        self._pieces, self._held = pieces, np.empty(0, np.float32)
        self.first, self.ended = 0, False

    @property
    def known(self) -> int:
        """Samples that were read so far; all, once it has ended."""
        return self.first + len(self._held)

    def at(self, first: int, count: int) -> Samples:
        """Samples first..first+count-1, or as many as there are; `first` never goes back."""
        self._move(first)
        parts, held = [self._held], len(self._held)
        while held < count and not self.ended:
            piece = next(self._pieces, None)
            if piece is None:
                self.ended = True
            else:
                parts.append(piece)
                held += len(piece)
        self._held = np.concatenate(parts) if len(parts) > 1 else self._held
        return self._held[:count]

    def _move(self, first: int) -> None:
        while self.first + len(self._held) < first and not self.ended:  # skip what nobody heard
            self.first += len(self._held)
            piece = next(self._pieces, None)
            self._held, self.ended = (np.empty(0, np.float32), True) if piece is None else (piece, False)
        self._held, self.first = self._held[max(0, first - self.first) :].copy(), first
