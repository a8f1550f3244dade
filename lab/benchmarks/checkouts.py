"""Two checkouts of Shoal by turns: seconds of the same greedy texts, and whether the texts are the same.

    python lab/benchmarks/checkouts.py --old FOLDER --new FOLDER --model FILE [FILE ...] [--batches 1,8] [--tokens 64]
        [--rounds 15] [--text FILE --prompts 512,2048] [--json OUT]

With --prompts, prompts of so many tokens of the text are read as well, and one token is decoded.
Each checkout runs in a process of its own, with this interpreter and its libraries. In every round both decode, in
turn first. The last line on stdout is the report; a ratio over 1 says that the new one is faster.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import script
from shoal_lab.bench import rounds
from shoal_lab.bench.idle import others, snapshot

PROMPTS = ("The history of bread begins", "def merge(left, right):\n", "Dear Anna, thank you for", "1, 1, 2, 3, 5, 8,",
           "In the year 1850 the city", "A recipe for soup:", "The river rises in", "class Queue:\n")
_WORKER = """
import json, sys, time
import shoal
engine = shoal.load(sys.argv[1])
for line in sys.stdin:
    prompts, tokens, method, length = json.loads(line)
    if length:
        prompts = [engine.tokenizer(text)["input_ids"][:length] for text in prompts]
    start = time.perf_counter()
    found = engine.generate(prompts, method=method, max_new_tokens=tokens, ignore_eos=True, temperature=0)
    seconds = time.perf_counter() - start
    print(json.dumps([seconds, [list(one.tokens) for one in found]]), flush=True)
"""


class Checkout:
    """A process that decodes with the code of a folder."""

    def __init__(self, folder: Path, model: Path) -> None:
        if not (folder / "src" / "shoal").is_dir():
            raise SystemExit(f"{folder} is no checkout: there is no folder src/shoal in it")
        self.commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True,
                                     check=True).stdout.strip()
        environment = {**os.environ, "PYTHONPATH": str(folder.resolve() / "src")}
        self._process = subprocess.Popen([sys.executable, "-c", _WORKER, str(model)], env=environment, text=True,
                                         stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.pid = self._process.pid

    def decode(
        self, prompts: Sequence[str], tokens: int, method: str = "full", length: int = 0
    ) -> tuple[float, list[list[int]]]:
        """Seconds, and the tokens of each text; `length` cuts prompts to so many tokens."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([prompts, tokens, method, length]) + "\n")
        self._process.stdin.flush()
        seconds, texts = json.loads(self._process.stdout.readline())
        return seconds, texts

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def main() -> int:
    """Measure and write."""
    parser = script.parser(__doc__)
    parser.add_argument("--old", type=Path, required=True)
    parser.add_argument("--new", type=Path, required=True)
    parser.add_argument("--model", type=Path, nargs="+", required=True)
    parser.add_argument("--batches", default="1,8", help="numbers of texts, up to 8")
    parser.add_argument("--tokens", type=int, default=64, help="of each text")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--text", type=Path, help="what prompts are cut from")
    parser.add_argument("--prompts", default="", help="numbers of tokens")
    args = parser.parse_args()
    lengths = [int(length) for length in args.prompts.split(",") if length]
    if lengths and args.text is None:
        raise SystemExit("--prompts are cut from a text; name it with --text FILE")
    text = args.text.read_text("utf-8")[: 8 * max(lengths)] if lengths else ""
    results = []
    for model in args.model:
        pair = [Checkout(args.old, model), Checkout(args.new, model)]
        for batch in filter(None, args.batches.split(",")):
            results.append(_compare(pair, model, PROMPTS[: int(batch)], args.tokens, args.rounds))
        results += [_compare(pair, model, [text], 1, args.rounds, length) for length in lengths]
        for one in pair:
            one.close()
    found = {"kind": "checkouts", "commits": [one.commit for one in pair], "results": results}
    script.publish(__file__, sys.argv[1:], found, args.json)
    return int(any(one["apart"] for one in results))


def _compare(
    pair: list[Checkout], model: Path, prompts: Sequence[str], tokens: int, count: int, length: int = 0
) -> dict[str, Any]:
    texts = [one.decode(prompts, tokens, length=length)[1] for one in pair]
    pids = [one.pid for one in pair]
    before, seconds = snapshot(pids), ([0.0] * count, [0.0] * count)
    for number in range(count):
        for side in rounds.in_order([0, 1], number):
            seconds[side][number] = pair[side].decode(prompts, tokens, length=length)[0]
    old, new = seconds
    result = {
        "model": model.name, "batch": len(prompts), "prompt": length or None, "tokens": tokens,
        "apart": texts[0] != texts[1],
        "old_seconds": rounds.figure(old), "new_seconds": rounds.figure(new),
        "old_over_new": rounds.ratio(a / b for a, b in zip(old, new, strict=True)),
        "processors_of_others": others(before, snapshot(pids)),
    }
    print(json.dumps(result), file=sys.stderr, flush=True)
    return result


if __name__ == "__main__":
    sys.exit(main())
