"""Does drafting change a token? Every exact method, alone and over others, against the same text without drafts.

    python lab/benchmarks/exactness.py --model FILE --json OUT [--tokens 64] [--questions JSONL --prompts 60]
        [--only WORD]

A setting is a method, a way of choosing tokens, a length of prompts, and a batch size. Its texts are compared token by
token, and log-probabilities number by number if they are asked for, with those of the method's plan or KV method
without drafts, one token and one text at a time. Seeded draws use the rule `match`, which draws the same numbers; tests
check the rules that only keep the distribution. The last line on stdout is the report as JSON; the exit code is 1 if
anything differs or fails.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import script
import shoal
from shoal.model.packed import native
from shoal_lab.bench import report
from shoal_lab.cli.method_list import methods_from

DRAFTS = ("prompt_lookup", "prompt_lookup:length=40:min_ngram=1", "aded", "aded:search=mcts:iterations=40",
          "aded:nodes=200:depth=12", "swift", "swift:trees=False", "swift:nodes=60:length=12", "d3_spec", "del",
          "draft_and_verify", "layerskip", "jacobi", "auto", "eagle", "eagle:width=4", "medusa", "ppd",
          "draft_model:draft={model}", "draft_model:draft={model}:branching=[3,2,2]",
          "draft_model:draft={model}:branching=[6,4,4]", "rsd:draft={model}:rule=match",
          "mirror_sd:draft={model}", "rapid", "vocabtrim:draft={model}")
"""Methods that draft; `{model}` is the model itself, whose guesses are mostly right."""
UNDER = ("d3:mean=0.85", "unified_layer_skipping", "early_exit:exit_layer=20", "kv_int8", "kv_int4", "mustafar",
         "tidal:k=96", "topk_oracle:k=64", "streaming_llm:window=64", "snapkv:budget=96")
"""Methods over which drafts may run: the text is theirs."""
OVER = ("prompt_lookup", "aded", "draft_model:draft={model}:branching=[3,2,2]", "swift:nodes=60:length=12")
"""Drafts that run over them: a chain from the text, trees from a table and from a model, the model's own layers."""
SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}, "parts": {"type": "array", "items": {
    "type": "string"}, "minItems": 3}}, "required": ["name", "parts"]}
CHOICES: Mapping[str, Mapping[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 0.8, "seed": 11},
    "min_p": {"temperature": 1.2, "min_p": 0.05, "seed": 5},
    "penalties": {"repetition_penalty": 1.1, "frequency_penalty": 0.3, "presence_penalty": 0.2},
    "constraint": {"constraint": SCHEMA},
    "logprobs": {"logprobs": 3},
}
"""Ways of choosing tokens, as options of `Engine.generate`."""
QUESTIONS = (
    "Explain how a bicycle works, and name its parts.",
    "Write a Python function that sorts a list of pairs by their second item, and show an example.",
    "Tell me a story about a dog that finds an old map.",
    "List ten animals, then repeat the list in reverse order.",
    "Rewrite as a table: Ann is 30 and lives in Rome. Bob is 41 and lives in Oslo. Eve is 25 and lives in Lima.",
)
TOGETHER = 5
"""Texts in a batch."""
LONG = 3000
"""Tokens of a long prompt."""
ALONE = 2
"""Long prompts that are decoded one at a time; all are decoded in a batch."""


@dataclass(frozen=True)
class Setting:
    """What is compared."""

    method: str
    choice: str
    prompts: str
    together: int

    @property
    def key(self) -> str:
        """Its name in the report."""
        return f"{self.method} | {self.choice} | {self.prompts} | {self.together}"


class Judge:
    """Runs settings, and their references once."""

    def __init__(self, engine: Any, model: str, tokens: int, questions: Sequence[str]) -> None:
        self._engine, self._model, self._tokens = engine, model, tokens
        short = [[{"role": "user", "content": question}] for question in questions]
        self._prompts = {"short": short, "long": _long(engine, TOGETHER)}
        self._plain: dict[tuple[Any, ...], Any] = {}

    def compare(self, setting: Setting) -> dict[str, Any]:
        """The result of a setting: how many texts are equal, where the others diverge, or why it cannot run."""
        started = time.perf_counter()
        try:
            method = self._method(setting.method)
            self._engine.recipe(method, self._tokens)
        except ValueError as reason:
            return {"not_run": str(reason)}
        try:
            found = self._texts(method, setting)
        except ValueError as reason:
            return {"failed": str(reason), "apart": [], "texts": 0, "tokens": 0, "drafted": 0, "accepted": 0}
        below = setting.method.partition("+")[2] or "full"
        apart = []
        for number, one in enumerate(found):
            plain = self._alone(below, setting, number)
            if (one.tokens, one.logprobs) != (plain.tokens, plain.logprobs):
                apart.append({"prompt": number, "token": _first_difference(one.tokens, plain.tokens)})
        drafted = sum(one.stats.drafted for one in found)
        return {"texts": len(found), "tokens": sum(len(one.tokens) for one in found), "apart": apart,
                "drafted": drafted, "accepted": sum(one.stats.accepted for one in found),
                "seconds": round(time.perf_counter() - started, 2)}

    def _method(self, word: str) -> Any:
        return methods_from(word.replace("{model}", self._model)).popitem()[1]

    def _texts(self, method: Any, setting: Setting) -> list[Any]:
        prompts = self._prompts[setting.prompts]
        if setting.together == 1:
            some = prompts[:ALONE] if setting.prompts == "long" else prompts
            return [self._generate(prompt, method, setting) for prompt in some]
        return self._by_groups(prompts, method, setting)

    def _generate(self, prompt: Any, method: Any, setting: Setting) -> Any:
        return self._engine.generate(prompt, method=method, max_new_tokens=self._tokens, **CHOICES[setting.choice])

    def _by_groups(self, prompts: list[Any], method: Any, setting: Setting) -> list[Any]:
        groups = [prompts[first : first + setting.together] for first in range(0, len(prompts), setting.together)]
        return [one for group in groups for one in self._generate(group, method, setting)]

    def _alone(self, below: str, setting: Setting, number: int) -> Any:
        """The reference text of a setting: decoded alone, except that draws are keyed by the place in the batch."""
        drawn = setting.together > 1 and "seed" in CHOICES[setting.choice]
        key = (below, setting.choice, setting.prompts, drawn, None if drawn else number)
        if key not in self._plain:
            method, prompts = self._method(below), self._prompts[setting.prompts]
            self._plain[key] = (self._by_groups(prompts, method, setting) if drawn
                                else self._generate(prompts[number], method, setting))
        return self._plain[key][number] if drawn else self._plain[key]


def _questions(path: Path | None, count: int) -> list[str]:
    """Our questions, or the first turns of the first lines of a JSONL file with `turns`."""
    if path is None:
        return [QUESTIONS[number % len(QUESTIONS)] for number in range(count)]
    lines = path.read_text("utf-8").splitlines()[:count]
    return [json.loads(line)["turns"][0] for line in lines]


def _long(engine: Any, count: int) -> list[Any]:
    """Prompts of `LONG` tokens: a passage of the licence, each from another place, with a question after it."""
    text = (Path(__file__).parents[2] / "LICENSE").read_text("utf-8")
    pieces = text.split()
    prompts = []
    for number in range(count):
        some = pieces[37 * number :] + pieces
        size = LONG * 3 // 4
        while len(engine.tokenizer(" ".join(some[:size])).input_ids) > LONG - 60:
            size -= 20
        question = "\n\nQuote three sentences of this text word for word, then say what it is about."
        prompts.append([{"role": "user", "content": " ".join(some[:size]) + question}])
    return prompts


def _first_difference(a: tuple[int, ...], b: tuple[int, ...]) -> int | None:
    return next((place for place, (x, y) in enumerate(itertools.zip_longest(a, b)) if x != y), None)


def settings(only: str | None) -> Iterator[Setting]:
    """All settings; over other methods and after long prompts, only some ways of choosing tokens."""
    specs = [*DRAFTS, *(f"{over}+{under}" for under in UNDER for over in OVER)]
    for spec, choice, prompts, together in itertools.product(specs, CHOICES, ("short", "long"), (1, TOGETHER)):
        if only is None or re.search(only, spec):
            if prompts == "long":
                wanted = choice == "greedy" and together > 1 if "+" in spec else choice in ("greedy", "min_p")
            else:
                wanted = "+" not in spec or choice not in ("seeded", "constraint")
            if wanted:
                yield Setting(spec, choice, prompts, together)


def main() -> int:
    """Compare, write, judge."""
    parser = script.parser(__doc__, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--questions", type=Path, help="JSON lines with `turns`; by default five of our own")
    parser.add_argument("--prompts", type=int, default=5)
    parser.add_argument("--lengths", default="short,long", help="of prompts: short, long or both")
    parser.add_argument("--only", help="settings whose method matches this regular expression")
    parser.add_argument("--resume", action="store_true", help="keep what the report has already")
    args = parser.parse_args()
    known = _known(args.json) if args.resume and args.json.exists() else {}
    judge = Judge(shoal.load(args.model), args.model, args.tokens, _questions(args.questions, args.prompts))
    todo = [one for one in settings(args.only) if one.prompts in args.lengths.split(",")]
    for number, setting in enumerate(todo):
        if setting.key not in known:
            known[setting.key] = judge.compare(setting) | {"vectors": native.vector_set()}
            print(f"{number + 1}/{len(todo)} {setting.key}: {known[setting.key]}", file=sys.stderr, flush=True)
            report.write(_report(args.model, known), args.json)
    found = _report(args.model, known)
    report.write(found, args.json)
    print(json.dumps({key: value for key, value in found.items() if key != "settings"}))
    return int(found["apart"] + found["failed"] > 0)


def _known(path: Path) -> dict[str, Any]:
    """Settings of an earlier report, which may be from a machine with other vectors."""
    found = json.loads(path.read_text("utf-8"))
    return {key: {"vectors": found["vectors"], **one} for key, one in found["settings"].items()}


def _report(model: str, known: Mapping[str, Any]) -> dict[str, Any]:
    ran = [one for one in known.values() if "not_run" not in one]
    sums = {name: sum(one[name] for one in ran) for name in ("texts", "tokens", "drafted", "accepted")}
    vectors = ", ".join(sorted({one["vectors"] for one in known.values()}))
    return {**script.heading(__file__, sys.argv[1:]), "kind": "exactness", "model": Path(model).name,
            "vectors": vectors, "ran": len(ran), "not_run": len(known) - len(ran), **sums,
            "apart": sum(bool(one["apart"]) for one in ran), "failed": sum("failed" in one for one in ran),
            "settings": dict(known)}


if __name__ == "__main__":
    sys.exit(main())
