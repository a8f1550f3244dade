"""Write down what is said in audio files, with a model of Whisper's kind.

Any file that FFmpeg reads will do, of any length. Text goes to stdout as it is heard, window after window of thirty
seconds; the length of what was heard so far is shown on stderr, on a terminal.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli.options import common
from shoal.cli.options.parser import Parser

if TYPE_CHECKING:
    from shoal.audio import Audio
    from shoal.speech.transcribe import Segment, Transcriber, Wish

EXAMPLES = """examples:
  shoal transcribe --model openai/whisper-base talk.mp3
  shoal transcribe --model path/to/whisper --timestamps --language en talk.flac
  shoal transcribe --model path/to/whisper --srt talk.mp4 > talk.srt
  shoal transcribe --model path/to/whisper --task translate vortrag.ogg
"""


def add_arguments(parser: Parser) -> None:
    """Declare the options."""
    parser.add_argument("files", metavar="FILE", nargs="+", type=Path, help="audio, or video with sound; `-` is stdin")
    group = parser.add_argument_group("speech")
    group.add_argument("--language", metavar="CODE", help="such as en; by default it is heard")
    group.add_argument("--task", choices=("transcribe", "translate"), default="transcribe",
                       help="translate writes English")
    group.add_argument("--prompt", metavar="TEXT", default="", help="words before the first ones, such as names that "
                       "will be heard")
    group.add_argument("--temperature", metavar="T", type=float, action="append", help="that windows are decoded at; "
                       "repeatable: the next one where a text is improbable or repeats itself; by default 0 to 1 in "
                       "steps of 0.2")
    group.add_argument("--no-context", action="store_true", help="hear each window without what was said before")
    group.add_argument("--no-speech-threshold", metavar="P", type=float, default=0.6, help="above this probability "
                       "that nobody speaks, an improbable text is left out")
    group.add_argument("--without-timestamps", action="store_true", help="have the model cut at thirty seconds, not "
                       "where sentences end")
    out = parser.add_argument_group("output")
    form = out.add_mutually_exclusive_group()
    form.add_argument("--timestamps", action="store_true", help="a line for each segment, with its times")
    form.add_argument("--srt", action="store_true", help="SubRip subtitles")
    form.add_argument("--vtt", action="store_true", help="WebVTT subtitles")
    out.add_argument("--word-timestamps", action="store_true", help="with --json: when each word was spoken")
    common.add_method(parser)
    common.add_model(parser)
    common.add_memory(parser)
    parser.add_argument("--quiet", action="store_true", help="no line of figures on stderr")
    common.add_json(parser)
    parser.show_usual("--model", "--language", "--task", "--timestamps", "--srt", "--vtt", "--prompt", "--method",
                      "--quiet", "--json")


def run(args: argparse.Namespace) -> int:
    """Transcribe and print."""
    if args.model is None:
        raise ValueError("which model? Give --model with a folder or a Hub id, such as openai/whisper-base")
    if args.without_timestamps and (args.timestamps or args.srt or args.vtt):
        raise ValueError("--without-timestamps leaves nothing to show; leave it out, or --timestamps, --srt and --vtt")
    if args.word_timestamps and not args.json:
        raise ValueError("--word-timestamps shows nothing without --json; add it")
    from shoal.speech.transcribe import FALLBACK, Transcriber, Wish

    wish = Wish(args.language, args.task, not args.without_timestamps, args.prompt,
                tuple(args.temperature or FALLBACK), silent=args.no_speech_threshold, goes_on=not args.no_context,
                method=args.method, word_times=args.word_timestamps)
    _check(args.files)
    transcriber = Transcriber(common.load_engine(args, chats=False))
    transcriber.check(wish)
    reports = [_file(args, path, transcriber, wish) for path in args.files]
    if args.json:
        common.print_json({"files": reports, **args.method.to_dict(), "model": args.model})
    return 0


def _check(files: list[Path]) -> None:
    """Refuse files that are not there before a model is loaded."""
    for path in files:
        if str(path) != "-" and not path.is_file():
            raise ValueError(f"there is no file {str(path)!r}")


def _file(args: argparse.Namespace, path: Path, transcriber: Transcriber, wish: Wish) -> dict[str, Any]:
    """Transcribe one file, print it, and return its report."""
    from shoal.audio import RATE, Audio
    from shoal.speech import subtitles

    began, found = time.perf_counter(), list[Any]()
    with ExitStack() as opened:
        file = sys.stdin.buffer if str(path) == "-" else opened.enter_context(path.open("rb"))
        audio = opened.enter_context(Audio(file, str(path)))
        course = transcriber.begin(audio.pieces(), wish)
        for segment in _shown(args, course.segments(), audio):
            found.append(segment)
            if args.timestamps:
                print(subtitles.timed_line(segment), flush=True)
            elif not (args.srt or args.vtt or args.json):
                print(segment.text.strip(), flush=True)
    if args.srt or args.vtt:
        print(subtitles.CUES["srt" if args.srt else "vtt"](found), end="")
    seconds, took = course.heard / RATE, time.perf_counter() - began
    if not (args.quiet or args.json):
        print(f"{seconds:.1f} s of audio in {took:.1f} s, {seconds / took:.1f} times as fast as it was spoken",
              file=sys.stderr)
    return {"file": str(path), "seconds": round(took, 3),
            **subtitles.report(found, course.language or "en", seconds, wish.task,
                               ("segment", "word") if wish.word_times else ("segment",))}


def _shown(args: argparse.Namespace, segments: Iterator[Segment], audio: Audio) -> Iterator[Segment]:
    """The segments, with a bar of the seconds heard on a terminal."""
    from tqdm import tqdm

    hidden = args.quiet or args.json or not sys.stderr.isatty() or sys.stdout.isatty()
    with tqdm(total=audio.seconds, unit="s", unit_scale=True, disable=hidden, file=sys.stderr) as bar:
        for segment in segments:
            bar.update(max(0.0, min(segment.end, audio.seconds or segment.end) - bar.n))
            yield segment
