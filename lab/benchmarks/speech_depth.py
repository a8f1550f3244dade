"""What decoder layers are worth to a transcript: wrong words and seconds by depth, D3 beside constant depth.

    python lab/benchmarks/speech_depth.py --model FOLDER --data ../shared/data/speech [--healed DIR:NAME,...]
        [--plans REGEX] [--rounds 3] [--json OUT]

FOLDER is a Whisper model. Its decoder leaves out layers from the middle of the stack outwards, from an answer's second
token on: always as many (`constant`), or more and more of them (`d3`); `without` leaves out one alone. DIR is the model
as `shoal train heal` wrote it without the files whose names begin with NAME; those it reads in the rows `healed`, so
that each file is read by a model that was not trained on its speaker. Everything is greedy, without rising
temperatures, and an answer that repeats itself ends at 224 tokens. In each round every plan reads all short files in
turn; encoder and decoder are timed apart. `bounded` counts at most all words of a file as wrong. Differences to full
depth are of that, with intervals over speakers. Training and Inference Efficiency of Encoder-Decoder Speech Models
(arXiv 2503.05931) moves layers from the decoder to the encoder and trains anew.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch

import script
import shoal
from shoal.audio import Audio
from shoal.methods.base import Method
from shoal.methods.d3 import D3
from shoal.methods.full import Full
from shoal.methods.schedule import Schedule
from shoal.speech.transcribe import Transcriber, Wish
from shoal_lab.eval.paired import clustered_difference
from speech import errors, files_of, normaliser

Row = dict[str, Any]
_CORE, _HORIZON = 2, 64
_FULL, _HEALED = "full", ", healed"


def main() -> int:
    """Measure and write."""
    parser = script.parser(__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True, help="folder with transcripts.jsonl")
    parser.add_argument("--healed", action="append", default=[], metavar="DIR:NAME,...", help="may be given twice")
    parser.add_argument("--plans", default="", help="those whose names it is found in, beside full depth")
    parser.add_argument("--language", default="en", help="empty for a model of one language")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    study = Study(args.model, args.healed, args.data, args.language or None)
    methods = {name: method for name, method in plans(study.layers).items()
               if name == _FULL or re.search(args.plans, name)}
    names = [*methods, *(name + _HEALED for name in methods if args.healed and "without" not in name)]
    for name in names[:: len(methods)]:
        study.read(name, methods[_FULL])  # warm
    runs: dict[str, list[Row]] = {name: [] for name in names}
    for number in range(args.rounds):
        for name in names[:: 1 if number % 2 == 0 else -1]:
            runs[name].append(study.read(name, methods[name.removesuffix(_HEALED)]))
            print(name, sum(runs[name][-1]["bounded"]), file=sys.stderr)
    results = [row(name, found, runs[_FULL][0], study.files) for name, found in runs.items()]
    script.publish(__file__, sys.argv[1:], {"model": args.model.name, "threads": args.threads, "words": study.words,
                                            "horizon": _HORIZON, "results": results}, args.json)
    return 0


def plans(layers: int) -> dict[str, Method]:
    """The methods by their names."""
    middle = sorted(range(1, layers - 1), key=lambda layer: (abs(2 * layer - (layers - 1)), -layer))
    found: dict[str, Method] = {_FULL: Full()}
    for gone in range(1, layers // 3 + 1):
        found[f"constant {layers - gone}"] = Schedule(order=tuple(middle[:gone]), steps=(1,) * gone)
    for mean in (0.8, 0.75, 0.7):
        found[f"d3 {mean}"] = D3(mean=mean, core=_CORE, order=tuple(middle), horizon=_HORIZON)
    return {**found, **{f"without {layer}": Schedule(order=(layer,), steps=(1,)) for layer in range(layers)}}


class Study:
    """Reads all files by a method, with the model or with those that were healed."""

    def __init__(self, model: Path, healed: Sequence[str], data: Path, language: str | None) -> None:
        self._data, self._normal, self._language = data, normaliser(model), language
        self.files, self._heard = files_of(data), {"": shoal.load(str(model))}
        for one in healed:
            folder, _, names = one.rpartition(":")
            self._heard |= dict.fromkeys(names.split(","), shoal.load(folder))
        self._transcribers = {id(engine): Transcriber(engine) for engine in self._heard.values()}
        self.layers: int = self._heard[""].runner.num_layers
        self._wanted = [self._normal(one["text"]).split() for one in self.files]
        self.words = sum(map(len, self._wanted))

    def read(self, name: str, method: Method) -> Row:
        """Wrong words of each file, mean layers of a token, and seconds of the encoder and of the rest."""
        spent, counts = [0.0], dict.fromkeys(("layers", "tokens", "cut"), 0)
        texts, seconds = list[str](), 0.0
        for one in self.files:
            engine = self._engine(one["file"], name.endswith(_HEALED))
            with _watched(engine, spent, counts):
                began = time.perf_counter()
                texts.append(self._hear(one["file"], engine, method))
                seconds += time.perf_counter() - began
        wrong = [errors(wanted, self._normal(text).split()) for wanted, text in zip(self._wanted, texts, strict=True)]
        bounded = [min(each, len(wanted)) for each, wanted in zip(wrong, self._wanted, strict=True)]
        return {"errors": wrong, "bounded": bounded, "texts": texts, "tokens": counts["tokens"], "cut": counts["cut"],
                "layers": round(counts["layers"] / counts["tokens"], 3),
                "encoder_seconds": round(spent[0], 3), "decoder_seconds": round(seconds - spent[0], 3)}

    def _engine(self, file: str, healed: bool) -> Any:
        if not healed:
            return self._heard[""]
        found = [engine for name, engine in self._heard.items() if name and file.startswith(name)]
        if not found:
            raise ValueError(f"{file} was trained on by every healed model, or none is given for it; name it by "
                             "--healed")
        return found[0]

    def _hear(self, name: str, engine: Any, method: Method) -> str:
        wish = Wish(self._language, method=method, temperatures=(0.0,))
        with (self._data / name).open("rb") as file, Audio(file, name) as audio:
            transcript = self._transcribers[id(engine)].begin(audio.pieces(), wish)
            return "".join(one.text for one in transcript.segments()).strip()


@contextmanager
def _watched(engine: Any, spent: list[float], counts: dict[str, int]) -> Iterator[None]:
    """Add up the encoder's seconds, the layers and number of tokens, and answers that were cut off."""
    encoder, generate = engine.encoder.module.forward, engine.generate
    engine.encoder._known.clear()  # every plan hears everything anew

    def timed(*given: Any, **options: Any) -> Any:
        began = time.perf_counter()
        found = encoder(*given, **options)
        spent[0] += time.perf_counter() - began
        return found

    def counted(*given: Any, **options: Any) -> Any:
        result = generate(*given, **options)
        counts["layers"] += result.stats.layer_tokens
        counts["tokens"] += result.stats.new_tokens
        counts["cut"] += result.finish_reason == "length"
        return result

    engine.encoder.module.forward, engine.generate = timed, counted
    try:
        yield
    finally:
        engine.encoder.module.forward, engine.generate = encoder, generate


def row(name: str, runs: Sequence[Row], full: Row, files: Sequence[Row]) -> Row:
    """Figures of one plan."""
    own, speakers = runs[0], [one["file"].partition("-")[0] for one in files]
    return {"plan": name, **own, "wrong": sum(own["errors"]), "wrong_bounded": sum(own["bounded"]),
            "more_per_file": vars(clustered_difference(full["bounded"], own["bounded"], speakers)),
            **{key: [one[key] for one in runs] for key in ("encoder_seconds", "decoder_seconds")},
            **{f"{side}_median": round(median(one[f"{side}_seconds"] for one in runs), 3)
               for side in ("encoder", "decoder")}}


if __name__ == "__main__":
    raise SystemExit(main())
