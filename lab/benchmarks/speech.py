"""Speech to text: Shoal beside faster-whisper and transformers, on files with their words.

    python lab/benchmarks/speech.py --model FOLDER --peer CT2_FOLDER --data ../shared/data/speech [--json OUT]

FOLDER is a Whisper model as transformers has it, CT2_FOLDER the same model as faster-whisper has it. Every engine
reads the short files, one after another, in a process of its own which is warmed by one of them; in each round all
engines take their turn. All are greedy, with timestamps, temperatures that rise as by default, no detection of voices,
and the same threads. `--engines` names them:

    shoal, shoal:int8, shoal:full+METHOD    precisions and methods of Shoal
    faster-whisper:int8, faster-whisper:float32
    transformers

Word error rates are over words as the model's own normaliser writes them. The last line on stdout is the report.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import script

_MOST_SECONDS = 30.0
Hear = Callable[[Path], str]
"""Maps a file to what is said in it."""


def main() -> int:
    """Measure and write."""
    parser = script.parser(__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--peer", type=Path, help="the model as faster-whisper has it")
    parser.add_argument("--data", type=Path, required=True, help="folder with transcripts.jsonl")
    parser.add_argument("--language", default="en", help="empty for a model of one language")
    parser.add_argument("--engines", default="shoal,shoal:int8,faster-whisper:int8,faster-whisper:float32,transformers")
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
    spoken = sum(one["seconds"] for one in files_of(args.data))
    results = [{"engine": name, "speed": round(spoken / median(one["seconds"] for one in found), 2),
                "seconds": [one["seconds"] for one in found], "errors": found[0]["errors"], "of": found[0]["of"],
                "texts": found[0]["texts"]} for name, found in runs.items()]
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
    files = files_of(args.data)
    hear(args.data / files[0]["file"])
    began, texts = time.perf_counter(), list[str]()
    for one in files:
        texts.append(hear(args.data / one["file"]))
    seconds = time.perf_counter() - began
    normal = normaliser(args.model)
    pairs = [(normal(one["text"]).split(), normal(text).split()) for one, text in zip(files, texts, strict=True)]
    return {"seconds": round(seconds, 3), "errors": sum(errors(*pair) for pair in pairs),
            "of": sum(len(wanted) for wanted, _ in pairs), "texts": texts}


def of_shoal(args: argparse.Namespace, how: str) -> Hear:
    """Shoal in a precision, or at its own with a method."""
    import torch

    import shoal
    from shoal.audio import Audio
    from shoal.speech.transcribe import Transcriber, Wish

    torch.set_num_threads(args.threads)
    precision, _, method = how.partition("+")
    quant = precision if precision not in ("", "full") else None
    transcriber = Transcriber(shoal.load(str(args.model), quant=quant))  # type: ignore[arg-type]
    wish = Wish(args.language or None, method=method or "full")

    def hear(path: Path) -> str:
        with path.open("rb") as file, Audio(file, path.name) as audio:
            return "".join(one.text for one in transcriber.begin(audio.pieces(), wish).segments()).strip()

    return hear


def of_peer(args: argparse.Namespace, how: str) -> Hear:
    """faster-whisper with a compute type."""
    from faster_whisper import WhisperModel

    model = WhisperModel(str(args.peer), device="cpu", compute_type=how, cpu_threads=args.threads)

    def hear(path: Path) -> str:
        found, _ = model.transcribe(str(path), beam_size=1, best_of=1, language=args.language or "en")
        return "".join(one.text for one in found).strip()

    return hear


def of_transformers(args: argparse.Namespace, how: str) -> Hear:
    """transformers' own generation, in float32."""
    import torch
    from transformers import WhisperForConditionalGeneration, WhisperProcessor

    from shoal.audio import RATE, Audio

    torch.set_num_threads(args.threads)
    processor = WhisperProcessor.from_pretrained(args.model)
    model = WhisperForConditionalGeneration.from_pretrained(args.model, dtype=torch.float32).eval()
    asked = {"language": args.language, "task": "transcribe"} if args.language else {}

    def hear(path: Path) -> str:
        with path.open("rb") as file, Audio(file, path.name) as audio:
            sound = np.concatenate([*audio.pieces()])
        features = processor(sound, sampling_rate=RATE, return_tensors="pt").input_features
        with torch.no_grad():
            ids = model.generate(features, do_sample=False, num_beams=1, return_timestamps=True, **asked)
        return str(processor.batch_decode(ids, skip_special_tokens=True)[0]).strip()

    return hear


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
