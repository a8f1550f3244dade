"""Audio files, read piece by piece: what they hold, and what is refused."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shared_models import data_path
from shoal.audio import RATE, Audio, Samples, Window
from whispers import tone, wav

av = pytest.importorskip("av")


def heard(data: bytes, most: float | None = None) -> Samples:
    with Audio(io.BytesIO(data), "x.wav", most) as audio:
        return np.concatenate([*audio.pieces()])


@pytest.mark.parametrize(("rate", "channels"), [(RATE, 1), (RATE, 2), (8000, 1), (44100, 2)])
def test_every_rate_becomes_mono_at_16_khz(rate: int, channels: int) -> None:
    times = np.arange(rate) / rate
    samples = (8000 * np.sin(2 * np.pi * 440 * times)).astype(np.int16)
    found = heard(wav(samples, rate, channels))
    assert found.dtype == np.float32 and abs(len(found) - RATE) < 50
    spectrum = np.abs(np.fft.rfft(found))
    assert abs(spectrum.argmax() * RATE / len(found) - 440) < 2
    assert 0.2 < np.abs(found).max() < 0.26


def test_samples_are_those_of_the_file() -> None:
    samples = tone(0.5)
    assert np.array_equal(heard(wav(samples)), samples.astype(np.float32) / 32768)


@pytest.mark.parametrize(("codec", "form", "layout"), [("libmp3lame", "mp3", "mono"), ("aac", "mp4", "mono"),
                                                       ("libopus", "webm", "mono"), ("flac", "flac", "mono")])
def test_what_people_have_is_read(tmp_path: Path, codec: str, form: str, layout: str) -> None:
    path = tmp_path / f"x.{form}"
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=48000, layout=layout)
        samples = np.repeat(tone(1.0), 3)[None]
        for first in range(0, samples.shape[1], 960):
            frame = av.AudioFrame.from_ndarray(samples[:, first : first + 960], format="s16", layout=layout)
            frame.sample_rate, frame.pts = 48000, first
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    found = heard(path.read_bytes())
    assert abs(len(found) / RATE - 1) < 0.1 and np.abs(found).max() > 0.15


def test_published_speech_is_as_long_as_it_says() -> None:
    path = data_path("speech", "jfk.flac")
    with path.open("rb") as file, Audio(file, "jfk") as audio:
        assert audio.seconds == pytest.approx(11.0)
        assert sum(map(len, audio.pieces())) == 11 * RATE


@pytest.mark.parametrize("data", [b"", b"no sound at all", b"RIFF\xff\xff\xff\xffWAVE", wav(tone(0.1))[:30]])
def test_broken_files_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"x.wav (cannot be read as audio|has no audio stream)"):
        heard(data)


def test_a_file_without_sound_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=5)
        stream.width = stream.height = 32
        for _ in range(5):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.zeros((32, 32, 3), np.uint8), format="rgb24")))
        container.mux(stream.encode(None))
    with pytest.raises(ValueError, match="has no audio stream"):
        heard(path.read_bytes())


@pytest.mark.parametrize("body", [
    "#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:1.0,\n{path}\n#EXT-X-ENDLIST\n", "ffconcat version 1.0\nfile {path}\n",
    '<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011"><BaseURL>{path}</BaseURL></MPD>'])
def test_a_list_of_other_files_opens_none_of_them(tmp_path: Path, body: str) -> None:
    (tmp_path / "secret.wav").write_bytes(wav(tone(0.5)))
    with pytest.raises(ValueError, match="cannot be read as audio"):
        heard(body.format(path=tmp_path / "secret.wav").encode())


def test_what_is_too_long_is_refused_whatever_its_header_says() -> None:
    whole = bytearray(wav(tone(3.0)))
    with pytest.raises(ValueError, match="x.wav is 3 s long; it must be at most 2 s"):
        heard(bytes(whole), 2.0)
    assert len(heard(bytes(whole), 3.0)) == 3 * RATE
    whole[40:44] = (0xFFFFFFFF).to_bytes(4, "little")  # of a stream, whose length nobody knew
    with pytest.raises(ValueError, match="it must be at most 2 s"):
        heard(bytes(whole), 2.0)


def pieces(sizes: list[int]) -> Iterator[Samples]:
    first = 0
    for size in sizes:
        yield np.arange(first, first + size, dtype=np.float32)
        first += size


def test_a_window_holds_what_it_is_asked_for_and_no_more() -> None:
    window = Window(pieces([3, 0, 5, 2, 7]))
    assert window.at(0, 4).tolist() == [0, 1, 2, 3]
    assert window.at(2, 4).tolist() == [2, 3, 4, 5] and len(window._held) == 6
    assert window.at(9, 20).tolist() == [*range(9, 17)]
    assert window.at(16, 5).tolist() == [16] and window.known == 17
    assert window.at(17, 5).tolist() == [] and window.at(40, 5).tolist() == [] and window.ended
    skipping = Window(pieces([3, 3, 3]))
    assert skipping.at(7, 2).tolist() == [7, 8]
