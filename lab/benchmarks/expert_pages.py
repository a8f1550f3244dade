"""A mixture whose experts do not fit in memory: speed in a memory group, guesses, and what caches would hit.

    python lab/benchmarks/expert_pages.py --model MIXTURE.gguf [--answers DIR] [--part PART] [--share 0.5] [--json OUT]

MIXTURE is the output of lab/benchmarks/expert_files.py, DIR the answers of `shoal train read_me`, which are read token
by token; of each, the first tokens are a prompt. Without DIR the texts are random tokens, for mixtures with random
weights (lab/benchmarks/mixture_files.py): their gates spread tokens nearly evenly, the worst case. Every way of
reading runs in a process and a memory group of its own, a child of this process's group, which must be allowed (root,
or a delegated group; version 1, or 2 where processes may have groups below them). Its limit leaves what the process
takes beside the weights, and a share of their file:

    memory        no limit
    asked         no limit either, and `next` all the same: what asking costs where it brings nothing
    mapped        the file as the system reads it by itself, with what lies around a page
    chosen        Shoal asks for the pages of a layer's experts once its router has chosen them
    next          and for those that the next layer's router would choose: what it does by itself for a file of which
                  memory holds less than two thirds
    llama.cpp     its mapped file, with the same share of it in memory

`mapped` and `chosen` are parts of `next`. The routing is noted without a limit: how many of the experts that run were
guessed (by the next gate, and with --part by the router of tokens), what caches of so many experts would hit, and how
many experts a token reads where rows of a batch are grouped by what they run. The last line on stdout is the report.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

import torch

import script
import shoal
from shoal.depth.plan import DepthPlan
from shoal.model.packed import native
from shoal.model.packed.native_runner import NativeRunner
from shoal.model.runner import SequenceChunk
from shoal.speculative import draft_head_file
from shoal_lab.bench.baselines.llama_cpp import Context, library
from shoal_lab.calibrate import expert_caches
from shoal_lab.components.router import ExpertRouter
from shoal_lab.train.corpus import Corpus

MEMORY, ASKED, PEER = "memory", "asked", "llama.cpp"
WAYS = (MEMORY, ASKED, "mapped", "chosen", "next", PEER)
_PROMPT, _ENOUGH = 8, 6.0
"""Tokens of a text that are read at once, and seconds after which no further text is begun."""
_ORDINARY = 1000
"""Ids below it stand in every vocabulary."""
_SHARES = (0.125, 0.25, 0.5, 0.75)
Decode = Callable[[Sequence[int]], float]
"""Reads a text's tokens one by one, the first ones at once, and returns the seconds of the others."""


def main() -> int:
    """Measure and print."""
    parser = script.parser(__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--answers", type=Path)
    parser.add_argument("--part", help="output of `shoal train read_me`: its router guesses, too")
    parser.add_argument("--dense", help="the model that PART was trained for")
    parser.add_argument("--share", type=float, default=0.5, help="of the file that memory has room for")
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=60, help="of a text, at most")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--worker", nargs=3, metavar=("WAY", "FILE", "GROUP"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    texts = texts_of(args)
    if args.worker:
        print(json.dumps(worker(args, texts, *args.worker)))
        return 0
    with tempfile.TemporaryDirectory(dir=args.model.parent) as folder:
        os.environ["SHOAL_WEIGHTS"] = folder
        found = {"model": args.model.name, "share": args.share, "texts": len(texts), "routing": routing(args, texts),
                 "disk_gb_per_second": round(disk(args.model), 2)}
        if args.rounds:
            found["speed"] = list(speeds(args, next(Path(folder).rglob("weights.bin"))))
    script.publish(__file__, sys.argv[1:], found, args.json)
    return 0


def texts_of(args: argparse.Namespace) -> list[list[int]]:
    """Token ids of the texts."""
    if args.answers is not None:
        return [one.tokens[: args.tokens].tolist() for one in Corpus(args.answers).validation(args.texts)]
    dice = random.Random(0)
    return [[dice.randrange(1, _ORDINARY) for _ in range(args.tokens)] for _ in range(args.texts)]


def speeds(args: argparse.Namespace, woven: Path) -> Iterator[dict[str, Any]]:
    """The rounds of each way, in turns, and the medians of their speeds."""
    runs: dict[str, list[dict[str, Any]]] = {way: [] for way in args.ways.split(",")}
    for _ in range(args.rounds):
        for way, found in runs.items():
            file = args.model if way == PEER else woven
            for path in (woven, args.model):
                forget(path)
            with group() as folder:
                command = [sys.executable, __file__, *sys.argv[1:], "--worker", way, str(file), str(folder)]
                told = subprocess.run(["sh", "-c", f'echo $$ > {folder}/cgroup.procs; exec "$@"', "sh", *command],
                                      stdout=subprocess.PIPE, text=True, check=True).stdout
            found.append(json.loads(told.splitlines()[-1]))
            print(way, found[-1], file=sys.stderr)
    for way, found in runs.items():
        yield {"way": way, "tokens_per_second": round(median(one["tokens_per_second"] for one in found), 2),
               "rounds": found}


@contextmanager
def group() -> Iterator[Path]:
    """A memory group below that of this process."""
    line = next(line for line in Path("/proc/self/cgroup").read_text("ascii").splitlines()
                if ":memory:" in line or line.startswith("0::"))
    top = Path("/sys/fs/cgroup/memory" if ":memory:" in line else "/sys/fs/cgroup")
    folder = top / line.split(":", 2)[2].strip("/") / f"shoal-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        raise SystemExit(f"{folder} cannot be made ({error.strerror}): run this as root, or in a delegated group"
                         ) from None
    try:
        yield folder
    finally:
        for _ in range(50):  # until the system has taken leave of the process
            with suppress(OSError):
                folder.rmdir()
                break
            time.sleep(0.1)


def worker(args: argparse.Namespace, texts: list[list[int]], way: str, file: str, folder: str) -> dict[str, Any]:
    """One way of reading: the first text as warm-up, the second within the limit to settle, the others timed."""
    path, size = Path(file), Path(file).stat().st_size
    decode = of_llama_cpp(args) if way == PEER else of_shoal(args, way)
    decode(texts[0])
    if way != PEER:
        forget(args.model)
    limit = None
    if way not in (MEMORY, ASKED):
        limit = restrict(Path(folder), path, round(args.share * size))
    decode(texts[1])
    faults, read, tokens, seconds = _faults(), _read_bytes(), 0, 0.0
    for text in texts[2:]:
        if seconds < _ENOUGH:
            seconds += decode(text)
            tokens += len(text) - _PROMPT
    return {"tokens_per_second": round(tokens / seconds, 2), "tokens": tokens, "limit": limit, "file": size,
            "resident": resident(path), "major_faults_per_token": round((_faults() - faults) / tokens, 2),
            "bytes_read_per_token": round((_read_bytes() - read) / tokens)}


def restrict(folder: Path, path: Path, room: int) -> int:
    """Limit a group to what it uses now, with `room` bytes of a file in place of those that it has in memory."""
    old = (folder / "memory.limit_in_bytes").exists()
    used = int((folder / ("memory.usage_in_bytes" if old else "memory.current")).read_text("ascii"))
    limit = used - resident(path) + room
    for _ in range(20):
        with suppress(OSError):  # while pages cannot be taken away so fast
            (folder / ("memory.limit_in_bytes" if old else "memory.max")).write_text(str(limit), "ascii")
            return limit
        time.sleep(0.1)
    raise SystemExit(f"{folder} cannot be limited to {limit} bytes")


def of_shoal(args: argparse.Namespace, way: str) -> Decode:
    """Shoal, with as much foresight as the way says."""
    runner = loaded(args)
    if way in (ASKED, "chosen", "next"):
        runner.read_ahead()
    if way == "chosen":
        runner.decoder.foresee(native.Foresight(0))
    return lambda text: read(runner, text)


def loaded(args: argparse.Namespace) -> NativeRunner:
    """The model on the kernels."""
    runner = shoal.load(str(args.model)).runner
    assert isinstance(runner, NativeRunner)
    return runner


def read(runner: NativeRunner, text: Sequence[int], prompt: int = _PROMPT) -> float:
    """Seconds of the tokens after the prompt."""
    cache, plan, start = runner.new_cache(1), DepthPlan.full(runner.num_layers), 0.0
    for number, tokens in enumerate([text[:prompt], *([token] for token in text[prompt:])]):
        start = time.perf_counter() if number == 1 else start
        runner.argmax([SequenceChunk(0, tokens, [number] * len(tokens), plan)], cache)
        cache.commit(0, range(len(tokens)))
    return time.perf_counter() - start


def of_llama_cpp(args: argparse.Namespace) -> Decode:
    """llama.cpp with its defaults: the file is mapped."""
    api = library()
    model = api.llama_model_load_from_file(str(args.model).encode(), api.llama_model_default_params())
    vocabulary = int(api.llama_vocab_n_tokens(api.llama_model_get_vocab(model)))
    context = Context(api, model, 1, args.tokens, args.threads, vocabulary)

    def decode(text: Sequence[int]) -> float:
        context.prefill([text[:_PROMPT]])
        start = time.perf_counter()
        for place in range(_PROMPT, len(text)):
            context.decode([(text[place], place, 0, True)])
        return time.perf_counter() - start

    return decode


def routing(args: argparse.Namespace, texts: list[list[int]]) -> dict[str, Any]:
    """What runs, without a limit: guesses, caches, groups of rows."""
    runner, steps = loaded(args), list[list[expert_caches.Step]]()
    mixtures = [layer.experts for layer in runner.weights.layers if layer.experts is not None]
    nbytes = sum(one.nbytes for mixture in mixtures for one in (*mixture.gate_up, *mixture.down))
    count, right, chosen = sum(len(mixture.down) for mixture in mixtures), 0, 0
    for text in texts:
        seen = native.Foresight(1, traced=1 << 20)
        runner.decoder.foresee(seen)
        read(runner, text, prompt=1)
        steps.append(expert_caches.steps_of(seen.trace()))
        right, chosen = right + seen.found.right, chosen + seen.found.chosen
    trace = [one for text in steps for step in text for one in sorted(step)]
    beside = sum(one.nbytes for one in runner.weights.matrices()) - nbytes
    room = round(max(0, args.share * (nbytes + beside) - beside) * count / nbytes)
    rooms = sorted({round(share * count) for share in _SHARES} | {room} - {0})
    found = {"experts": count, "expert_bytes": nbytes // count, "bytes_beside": beside, "room": room,
             "run_per_token": round(len(trace) / sum(map(len, steps)), 2), "next_gate_right": round(right / chosen, 4),
             "caches": expert_caches.hit_rates(trace, rooms),
             "reads_per_token": {size: expert_caches.mean_reads(steps, size) for size in (2, 4)}}
    return found | ({} if args.part is None else {"token_router": of_router(args, texts, steps)})


def of_router(
    args: argparse.Namespace, texts: list[list[int]], steps: list[list[expert_caches.Step]]
) -> dict[str, Any]:
    """The same of the experts that Read-ME's own router chooses by tokens alone, as many as the gates choose."""
    router = ExpertRouter(draft_head_file.read(args.part, "read_me", shoal.load(str(args.dense), backend="hf").info()))
    per_layer = len(steps[0][0]) // router.layers + router.shared
    known = [[frozenset((layer, group - router.shared) for layer, mask in enumerate(router.masks(
        text[: end + 1], per_layer)) for group in range(router.shared, router.groups) if mask >> group & 1)
        for end in range(len(text))] for text in texts]
    both = [(one, other) for ours, theirs in zip(steps, known, strict=True)
            for one, other in zip(ours, theirs, strict=True)]
    trace = [one for text in known for step in text for one in sorted(step)]
    rooms = [round(share * router.layers * (router.groups - router.shared)) for share in _SHARES]
    return {"gates_right": round(sum(len(one & other) for one, other in both) / sum(len(one) for one, _ in both), 4),
            "caches": expert_caches.hit_rates(trace, rooms),
            "reads_per_token": {size: expert_caches.mean_reads(known, size) for size in (2, 4)}}


def resident(path: Path) -> int:
    """Bytes of a file that are in memory."""
    size = path.stat().st_size
    pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    if ctypes.CDLL(None).mincore(ctypes.c_void_p(start), ctypes.c_size_t(size), pages):
        raise SystemExit(f"the system does not say which pages of {path} are in memory")
    return sum(page & 1 for page in bytes(pages)) * mmap.PAGESIZE


def forget(path: Path) -> None:
    """Drop a file's pages that nobody has mapped."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def disk(path: Path, most: int = 256 << 20) -> float:
    """GB per second of reading a file from its beginning, past the system's memory."""
    piece = mmap.mmap(-1, 1 << 20)
    file, done, start = os.open(path, os.O_RDONLY | os.O_DIRECT), 0, time.perf_counter()
    while done < most and (got := os.readv(file, [piece])) > 0:
        done += got
    os.close(file)
    return done / (time.perf_counter() - start) / 1e9


def _faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt


def _read_bytes() -> int:
    lines = Path("/proc/self/io").read_text("ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


if __name__ == "__main__":
    sys.exit(main())
