"""Speech to text: Shoal beside faster-whisper and transformers, on files with their words.

    python lab/benchmarks/speech.py --model FOLDER --peer CT2_FOLDER --data ../shared/data/speech [--json OUT]

FOLDER is a Whisper model as transformers has it, CT2_FOLDER the same model as faster-whisper has it. Every engine
reads the short files, one after another, in a process of its own which is warmed by one of them; in each round all
engines take their turn. All are greedy, with timestamps, temperatures that rise as by default, no detection of voices,
and the same threads. `--engines` names them:

    shoal, shoal:bfloat16, shoal:int8, shoal:full+METHOD    precisions and methods of Shoal, with options as in
        `shoal bench`: shoal:int8+eagle:part=DIR:length=2
    shoal:int8+draft    guesses by the smaller Whisper model of --draft, through text
    shoal:int8+batch=N  the files, up to N of them together
    faster-whisper:int8, faster-whisper:float32
    transformers

With `--windows N` they read N windows of 28 to 30 seconds in place of the files: the files in a shuffled order, joined,
and cut where that is quietest. With `--minutes M` they are said again and again in one file of M minutes, and the
report has the most memory that the process took.

Of Shoal, the encoders' seconds and the decoders' stand apart; both models count. `drafts` are the seconds of guessing
among the latter, `guessed_at` and `kept_at` count guesses by their distance from the last certain token. Word error
rates are over words as the model's own normaliser writes them, of the files alone. The last line on stdout is the
report.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
import wave
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import script

_MOST_SECONDS = 30.0
_EACH = ("seconds", "encoders", "decoders", "drafts", "peak_mb")
_ONCE = ("errors", "of", "forwards", "tokens", "guessed_at", "kept_at", "texts")
"""What is told of every round, and of the first alone."""
Hear = Callable[[Sequence[Path]], list[str]]
"""Maps files to what is said in each."""


def main() -> int:
    """Measure and write."""
    parser = script.parser(__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--peer", type=Path, help="the model as faster-whisper has it")
    parser.add_argument("--data", type=Path, required=True, help="folder with transcripts.jsonl")
    parser.add_argument("--language", default="en", help="empty for a model of one language")
    parser.add_argument("--engines", default="shoal,shoal:int8,faster-whisper:int8,faster-whisper:float32,transformers")
    parser.add_argument("--draft", type=Path, help="a smaller model, which guesses")
    parser.add_argument("--windows", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        print(json.dumps(worker(args, args.worker)))
        return 0
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in args.engines.split(",")}
    for number in range(args.rounds):
        for name in list(runs)[:: 1 if number % 2 == 0 else -1]:
            runs[name].append(apart(args, name))
            print(name, runs[name][-1]["seconds"], file=sys.stderr)
    spoken = next(iter(runs.values()))[0]["spoken"]
    results = [{"engine": name, "speed": round(spoken / median(one["seconds"] for one in found), 2),
                **{key: [one[key] for one in found] for key in _EACH},
                **{key: found[0][key] for key in _ONCE}}
               for name, found in runs.items()]
    for one in results:
        one["changed"] = sum(own != plain for own, plain in zip(one["texts"], results[0]["texts"], strict=True))
        one["texts"] = one["texts"] if args.minutes == 0 else []
    script.publish(__file__, sys.argv[1:], {"model": args.model.name, "threads": args.threads, "audio_seconds": spoken,
                                            "results": results}, args.json)
    return 0


def files_of(folder: Path) -> list[dict[str, Any]]:
    """The short files, each with its words and seconds."""
    lines = map(json.loads, (folder / "transcripts.jsonl").read_text("utf-8").splitlines())
    return [one for one in lines if one["seconds"] < _MOST_SECONDS]


def apart(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """One round of an engine, in a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(args.threads)}
    done = subprocess.run([sys.executable, __file__, *sys.argv[1:], "--worker", name], env=environment,
                          stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def worker(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """Seconds and word errors of an engine over all files."""
    kind, _, how = name.partition(":")
    hear = {"shoal": of_shoal, "faster-whisper": of_peer, "transformers": of_transformers}[kind](args, how)
    with TemporaryDirectory() as folder:
        files = sounds_of(args, Path(folder))
        hear([args.data / files_of(args.data)[0]["file"]])
        TIMES.update(encoders=0.0, decoders=0.0, drafts=0.0, forwards=0, tokens=0)
        for places in COUNTS.values():
            places.clear()
        began = time.perf_counter()
        texts = hear([args.data / one["file"] for one in files])
        seconds = time.perf_counter() - began
    normal = normaliser(args.model)
    pairs = [(normal(one["text"]).split(), normal(text).split()) for one, text in zip(files, texts, strict=True)]
    wrong = {} if args.minutes or args.windows else {"errors": sum(errors(*pair) for pair in pairs)}
    return {"seconds": round(seconds, 3), "errors": None, **wrong, "of": sum(len(wanted) for wanted, _ in pairs),
            "texts": texts, "spoken": round(sum(one["seconds"] for one in files), 2),
            "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
            **{name: round(value, 3) for name, value in TIMES.items()},
            **{name: [places[at] for at in sorted(COUNTS["guessed_at"])] for name, places in COUNTS.items()}}


TIMES: dict[str, float] = {}
"""Seconds of encoders and of decoders, forwards of the target's and their tokens, as far as the engine tells."""
COUNTS: dict[str, Counter[int]] = {"guessed_at": Counter(), "kept_at": Counter()}
"""Guesses by their distance from the last certain token."""


def sounds_of(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """The sounds that are read, each with its file, words and seconds; joined ones are written to a folder."""
    files = files_of(args.data)
    if not args.windows and not args.minutes:
        return files
    from shoal.audio import RATE, quietest

    random, found = Random(0), list[dict[str, Any]]()
    while len(found) < max(args.windows, 1):
        random.shuffle(files)
        whole = np.concatenate([sound(args.data / one["file"]) for one in files])
        if args.minutes:
            count, rest = divmod(int(args.minutes * 60 * RATE), len(whole))
            return [written(folder / "long.wav", *[whole] * count, whole[:rest])]
        while len(whole) >= 30 * RATE and len(found) < args.windows:
            end = quietest(whole[: 30 * RATE], 28 * RATE)
            found.append(written(folder / f"{len(found)}.wav", whole[:end]))
            whole = whole[end:]
    return found


def sound(path: Path) -> Any:
    """The samples of a file."""
    from shoal.audio import Audio

    with path.open("rb") as file, Audio(file, path.name) as audio:
        return np.concatenate([*audio.pieces()])


def written(path: Path, *parts: Any) -> dict[str, Any]:
    """A file of these samples, one part after another; its words are not told apart."""
    from shoal.audio import RATE

    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        for samples in parts:
            file.writeframes((samples * 32768).astype(np.int16).tobytes())
    return {"file": path, "text": "", "seconds": sum(map(len, parts)) / RATE}


def timed(owner: Any, name: str, key: str) -> None:
    """Count the seconds of a function, and what generation tells, under a key of `TIMES`."""
    own = getattr(owner, name)

    def run(*given: Any, **asked: Any) -> Any:
        began = time.perf_counter()
        made = own(*given, **asked)
        TIMES[key] = TIMES.get(key, 0.0) + time.perf_counter() - began
        for one in (made if isinstance(made, list) else [made]) if name == "generate" else ():
            TIMES["forwards"] = TIMES.get("forwards", 0) + one.stats.target_forwards
            TIMES["tokens"] = TIMES.get("tokens", 0) + one.stats.new_tokens
            TIMES["drafts"] = TIMES.get("drafts", 0) + one.stats.draft_seconds
        return made

    setattr(owner, name, run)


def counted(stream: Any) -> None:
    """Count the guesses of every answer in `COUNTS`."""
    own = stream.result_of

    def told(seq: Any, *given: Any) -> Any:
        COUNTS["guessed_at"].update(seq.ledger.drafted_at)
        COUNTS["kept_at"].update(seq.ledger.accepted_at)
        return own(seq, *given)

    stream.result_of = told


def of_shoal(args: argparse.Namespace, how: str) -> Hear:
    """Shoal in a precision, or at its own with a method, a smaller model, or files together."""
    import torch

    import shoal
    from shoal.audio import Audio
    from shoal.engine.scheduling import stream
    from shoal.speech import drafts
    from shoal.speech.transcribe import Transcriber, Wish
    from shoal_lab.cli.method_list import methods_from

    torch.set_num_threads(args.threads)
    precision, _, more = how.partition("+")
    dtype = precision if precision == "bfloat16" else None
    quant: Any = precision if precision not in ("", "full", "bfloat16") else None
    engines = [shoal.load(str(path), quant=quant, dtype=dtype)
               for path in (args.model, *([args.draft] if more == "draft" else []))]
    timed(engines[0], "generate", "decoders")
    counted(stream)
    timed(drafts, "greedy", "decoders")
    for engine in engines:
        assert engine.encoder is not None
        timed(engine.encoder.module, "forward", "encoders")
    transcriber = Transcriber(engines[0], *map(Transcriber, engines[1:]))
    size = int(more.removeprefix("batch=")) if more.startswith("batch=") else 1
    named = "full" if more == "draft" or size > 1 else more or "full"
    wish = Wish(args.language or None, method=methods_from(named)[named])

    def hear(paths: Sequence[Path]) -> list[str]:
        found = [""] * len(paths)
        with ExitStack() as opened:
            files = (opened.enter_context(Audio(opened.enter_context(path.open("rb")), path.name)) for path in paths)
            for number, _, segments in transcriber.together((one.pieces() for one in files), wish, size):
                found[number] += "".join(one.text for one in segments)
        return [text.strip() for text in found]

    return hear


def each(hear: Callable[[Path], str]) -> Hear:
    """One file after another."""
    return lambda paths: [hear(path) for path in paths]


def of_peer(args: argparse.Namespace, how: str) -> Hear:
    """faster-whisper with a compute type."""
    from faster_whisper import WhisperModel

    model = WhisperModel(str(args.peer), device="cpu", compute_type=how, cpu_threads=args.threads)

    def hear(path: Path) -> str:
        found, _ = model.transcribe(str(path), beam_size=1, best_of=1, language=args.language or "en")
        return "".join(one.text for one in found).strip()

    return each(hear)


def of_transformers(args: argparse.Namespace, how: str) -> Hear:
    """transformers' own generation, in float32."""
    import torch
    from transformers import WhisperForConditionalGeneration, WhisperProcessor

    from shoal.audio import RATE

    torch.set_num_threads(args.threads)
    processor = WhisperProcessor.from_pretrained(args.model)
    model = WhisperForConditionalGeneration.from_pretrained(args.model, dtype=torch.float32).eval()
    asked = {"language": args.language, "task": "transcribe"} if args.language else {}

    def hear(path: Path) -> str:
        features = processor(sound(path), sampling_rate=RATE, return_tensors="pt").input_features
        with torch.no_grad():
            ids = model.generate(features, do_sample=False, num_beams=1, return_timestamps=True, **asked)
        return str(processor.batch_decode(ids, skip_special_tokens=True)[0]).strip()

    return each(hear)


def normaliser(folder: Path) -> Callable[[str], str]:
    """How the model's tokenizer writes words for comparison."""
    from transformers import WhisperTokenizer

    tokenizer = WhisperTokenizer.from_pretrained(folder)
    return lambda text: str(tokenizer.normalize(text))


def errors(wanted: Sequence[str], found: Sequence[str]) -> int:
    """The least number of words that are put in, left out or replaced (Levenshtein, 1966)."""
    row = list(range(len(found) + 1))
    for place, word in enumerate(wanted, start=1):
        before, row[0] = row[0], place
        for other in range(1, len(found) + 1):
            best = min(row[other] + 1, row[other - 1] + 1, before + (word != found[other - 1]))
            before, row[other] = row[other], best
    return row[-1]


if __name__ == "__main__":
    raise SystemExit(main())
