"""Write down what is said in audio files, with a model of Whisper's kind.

Any file that FFmpeg reads will do, of any length. Text goes to stdout as it is heard, window after window of thirty
seconds; the length of what was heard so far is shown on stderr, on a terminal.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli.options import common
from shoal.cli.options.parser import Parser

if TYPE_CHECKING:
    from shoal.audio import Samples
    from shoal.speech.transcribe import Segment, Transcriber, Transcript, Wish

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
    group.add_argument("--batch-size", metavar="N", type=int, help="decode up to N windows together: one of each file, "
                       "which changes no word; with --no-context also of one file, cut where it is quiet")
    group.add_argument("--draft", metavar="M", help="a smaller Whisper model, which hears each window first: its words "
                       "are guessed, and no word changes")
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
                method=args.method, word_times=args.word_timestamps,
                apart=args.no_context and args.batch_size is not None)
    _check(args)
    transcriber = Transcriber(common.load_engine(args, chats=False), _draft(args))
    transcriber.check(wish, args.batch_size or 1)
    reports = _hear(args, transcriber, wish)
    if args.json:
        common.print_json({"files": reports, **args.method.to_dict(), "model": args.model})
    return 0


def _check(args: argparse.Namespace) -> None:
    """Refuse, before a model is loaded, files that are not there and options that do not go together."""
    for path in args.files:
        if str(path) != "-" and not path.is_file():
            raise ValueError(f"there is no file {str(path)!r}")
    if args.batch_size is not None and args.batch_size < 1:
        raise ValueError(f"--batch-size is {args.batch_size}; it must be 1 or more windows")
    if (args.batch_size or 1) > 1 and len(args.files) == 1 and not args.no_context:
        raise ValueError("--batch-size with one file, whose windows need what was said before; add --no-context, or "
                         "give several files")
    if args.draft is not None and args.method.name != "full":
        raise ValueError(f"--draft with --method {args.method.name}, and one of them guesses; leave the other out")
    if args.draft is not None and args.memory is not None:
        raise ValueError("--memory with --draft, which holds a second model that is not counted; leave one of them out")


def _draft(args: argparse.Namespace) -> Transcriber | None:
    """The smaller model, loaded as the other one is."""
    from shoal.speech.transcribe import Transcriber

    if args.draft is None:
        return None
    return Transcriber(common.load_engine(argparse.Namespace(**{**vars(args), "model": args.draft, "revision": None})))


class _File:
    """A file under way: what was heard in it, how much of that was printed, and its report once it has ended."""

    def __init__(self, args: argparse.Namespace, path: Path) -> None:
        from tqdm import tqdm

        from shoal.audio import Audio

        self._args, self._path, self._began, self._printed = args, path, time.perf_counter(), 0
        self._found: list[Segment] = []
        self.report: dict[str, Any] = {}
        with ExitStack() as opened:
            file = sys.stdin.buffer if str(path) == "-" else opened.enter_context(path.open("rb"))
            self._audio = opened.enter_context(Audio(file, str(path)))
            hidden = args.quiet or args.json or not sys.stderr.isatty() or sys.stdout.isatty()
            self._bar = opened.enter_context(tqdm(total=self._audio.seconds, unit="s", unit_scale=True, disable=hidden,
                                                  file=sys.stderr))
            self._opened = opened.pop_all()

    def pieces(self) -> Iterator[Samples]:
        """Its samples."""
        return self._audio.pieces()

    def heard(self, segments: Sequence[Segment]) -> None:
        """Keep what was heard."""
        self._found += segments
        for one in segments:
            self._bar.update(max(0.0, min(one.end, self._audio.seconds or one.end) - self._bar.n))

    def show(self) -> None:
        """Print what was heard since the last time."""
        from shoal.speech import subtitles

        for one in self._found[self._printed :]:
            if self._args.timestamps:
                print(subtitles.timed_line(one), flush=True)
            elif not (self._args.srt or self._args.vtt or self._args.json):
                print(one.text.strip(), flush=True)
        self._printed = len(self._found)
        if self.report and (self._args.srt or self._args.vtt):
            print(subtitles.CUES["srt" if self._args.srt else "vtt"](self._found), end="")
        if self.report and not (self._args.quiet or self._args.json):
            seconds, took = self.report["duration"], self.report["seconds"]
            print(f"{seconds:.1f} s of audio in {took:.1f} s, {seconds / max(took, 0.001):.1f} times as fast as it was "
                  "spoken", file=sys.stderr)

    def end(self, course: Transcript) -> None:
        """Close it, and report."""
        from shoal.audio import RATE
        from shoal.speech import subtitles

        self.close()
        parts = ("segment", "word") if course.wish.word_times else ("segment",)
        told = subtitles.report(self._found, course.language or "en", course.heard / RATE, course.wish.task, parts)
        self.report = {"file": str(self._path), "seconds": round(time.perf_counter() - self._began, 3), **told}

    def close(self) -> None:
        """Close it."""
        self._opened.close()


def _hear(args: argparse.Namespace, transcriber: Transcriber, wish: Wish) -> list[dict[str, Any]]:
    """Transcribe all files, print them one after another, and return their reports."""
    files, shown = list[_File](), 0

    def begun(path: Path) -> Iterator[Samples]:
        files.append(_File(args, path))
        return files[-1].pieces()

    try:
        for number, course, segments in transcriber.together(map(begun, args.files), wish, args.batch_size or 1):
            files[number].heard(segments)
            if not segments and course.ended:
                files[number].end(course)
            while shown < len(files):
                files[shown].show()
                if not files[shown].report:
                    break
                shown += 1
    finally:
        for one in files:
            one.close()
    return [one.report for one in files]
