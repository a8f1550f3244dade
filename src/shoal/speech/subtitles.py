"""Transcripts as files: text, JSON, SubRip and WebVTT."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from shoal.speech.transcribe import Segment


def text(segments: Iterable[Segment]) -> str:
    """All that was said, in one line."""
    return "".join(one.text for one in segments).strip()


def fields(segment: Segment, number: int) -> dict[str, Any]:
    """A segment as OpenAI's API writes it."""
    return {"id": number, "seek": round(segment.window * 100), "start": segment.start, "end": segment.end,
            "text": segment.text, "tokens": [*segment.tokens], "temperature": segment.temperature,
            "avg_logprob": segment.avg_logprob, "compression_ratio": segment.compression_ratio,
            "no_speech_prob": segment.no_speech_prob}


def report(
    segments: Iterable[Segment], language: str, seconds: float, task: str, parts: Collection[str] = ("segment",)
) -> dict[str, Any]:
    """A whole transcript as OpenAI's `verbose_json`, with its parts: "segment", "word", or both."""
    kept = list(segments)
    found: dict[str, Any] = {"task": task, "language": language, "duration": round(seconds, 3), "text": text(kept)}
    if "segment" in parts:
        found["segments"] = [fields(one, number) for number, one in enumerate(kept)]
    if "word" in parts:
        found["words"] = [{"word": word.text.strip(), "start": word.start, "end": word.end,
                           "probability": round(word.probability, 4)} for one in kept for word in one.spoken]
    return found


def subrip(segments: Iterable[Segment]) -> str:
    """Numbered cues of a SubRip file."""
    return "\n".join(f"{number}\n{_time(one.start, ',')} --> {_time(one.end, ',')}\n{_said(one)}\n"
                     for number, one in enumerate(segments, start=1))


def webvtt(segments: Iterable[Segment]) -> str:
    """Cues of a WebVTT file (W3C, WebVTT: The Web Video Text Tracks Format)."""
    cues = (f"{_time(one.start, '.')} --> {_time(one.end, '.')}\n{_escaped(_said(one))}\n" for one in segments)
    return "\n".join(["WEBVTT\n", *cues])


def timed_line(segment: Segment) -> str:
    """A line of text with its times."""
    return f"[{_time(segment.start, '.')} --> {_time(segment.end, '.')}] {_said(segment)}"


def _said(segment: Segment) -> str:
    """A segment's text as a cue: an arrow would end it early, and so would an empty line."""
    return " ".join(segment.text.split()).replace("-->", "->")


def _escaped(line: str) -> str:
    return line.replace("&", "&amp;").replace("<", "&lt;")


def _time(seconds: float, point: str) -> str:
    whole, thousandths = divmod(round(seconds * 1000), 1000)
    minutes, rest = divmod(whole, 60)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest:02}{point}{thousandths:03}"


CUES: Mapping[str, Callable[[Iterable[Segment]], str]] = MappingProxyType({"srt": subrip, "vtt": webvtt})
"""Forms of subtitles, by the ends of their files' names."""
