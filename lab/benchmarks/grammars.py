"""Whether answers under a grammar are valid, how many tokens it replaces, and the cost of asking it.

    python lab/benchmarks/grammars.py [--model hub/shoal-canvas] [--n 2000] [--json OUT]

`--n` answers, spread over the grammars, one half greedy and the other sampled, on canvases of several lengths and in
several numbers of steps; each request once under its grammar and once without. A separate recogniser judges them: it
shares no code with the decoder. The last line on stdout is the result as JSON.
"""

from __future__ import annotations

import itertools
import re
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import script
import shoal
from shoal.engine.engine import Engine
from shoal_lab.bench import idle, report
from shoal_lab.eval import suites
from shoal_lab.loops.canvas import Guess
from shoal_lab.loops.denoising import Canvas
from shoal_lab.methods.diffusion_grammar import DiffusionGrammar

_NAMES = 'name ::= "ann" | "bob" | "cid" | "dee" | "kim"'
GRAMMARS = {
    "finite": 'turn ::= "ann" "bob" "cid" | "bob" "cid" "ann" | "the" "dog" "sits" "by" "the" "river" | "7"',
    "list": f'list ::= name | name "at" list\n{_NAMES}',
    "brackets": 's ::= "put" "there" | "put" s "there" | s s',
    "empty": 'line ::= "" | the names end\nthe ::= "" | "the"\nend ::= "." | ""\n'
             f'names ::= name | names names\n{_NAMES}',
    "mirror": 'm ::= "" | "ann" m "ann" | "bob" m "bob" | "red" m "red" | "1" m "1"',
    "sums": 'sum ::= sum "+" term | term\nterm ::= term ":" one | one\none ::= "put" sum "there" | digits\n'
            'digits ::= digit | digit digits\ndigit ::= "1" | "2" | "3" | "4" | "5"',
    "quads": 'quads ::= "ann" "bob" "cid" "dee" | "kim" "kim" quads',
    "sentences": """
        text ::= said "." | said "." text
        said ::= simple | simple "+" said | "there" is some
        is ::= "is" | "sits"
        simple ::= who does | who does where | name tells
        tells ::= "is" kind | "put" what | "put" what where
        does ::= "sits" | "is" kind | "is" where
        who ::= name | "the" being | "a" being | "the" described | "a" described
        some ::= "a" being | "a" described | "a" place
        what ::= "the" being | "a" being | "the" thing | number thing
        described ::= kind being | kind described
        kind ::= size | colour | age
        size ::= "big" | "small"
        colour ::= "red" | "blue" | "green"
        age ::= "old"
        being ::= animal | bird
        animal ::= "dog" | "cat" | "cow" | fish
        fish ::= "fish"
        bird ::= "bird" | "hen"
        thing ::= "tree" | "house" | "road"
        place ::= "lake" | "river" | "hill" | thing
        where ::= near "the" place | near "the" far | near name | "anywhere"
        far ::= kind place | kind far
        near ::= "at" | "by"
        number ::= few | tens few | tens
        few ::= "2" | "3" | "4" | "5"
        tens ::= "10" | "11" | "12"
        name ::= woman | man
        woman ::= "ann" | "dee" | "eve" | "fay" | "ida" | "kim" | "mia" | "ola" | "pam"
        man ::= "bob" | "cid" | "gus" | "hal" | "jon" | "lee" | "ned"
    """,
}
MASKS, STEPS = (8, 12, 16), (None, 4, 1)
MODES: Mapping[str, Mapping[str, float]] = {"greedy": {}, "drawn": {"temperature": 1.0}}


def main() -> None:
    """Decode, judge, print."""
    parser = script.parser(__doc__)
    parser.add_argument("--model", default="hub/shoal-canvas")
    parser.add_argument("--n", type=int, default=2000, help="answers, rounded up to as many for each grammar and mode")
    args = parser.parse_args()
    engine = shoal.load(args.model, dtype="float32")
    found = {**script.heading(__file__, sys.argv[1:]), "model": engine.model_name, "fingerprint": engine.fingerprint,
             "idle": {"now": idle.watch(0.5)}, **measured(engine, args.n)}
    report.publish(found, args.json)


def measured(engine: Engine, count: int) -> dict[str, Any]:
    """Every grammar in every mode, and the sums of all."""
    each = -(-count // (len(GRAMMARS) * len(MODES)))
    prompts = [item.prompt for item in suites.get("parallel").items(None)][::7]
    rows = [{"grammar": name, "rules": len(rules_of(text)), "mode": mode,
             **judged(engine, text, dict(drawn), [prompts[number % len(prompts)] for number in range(each)])}
            for name, text in GRAMMARS.items() for mode, drawn in MODES.items()]
    sums = ("answers", "in_language", "free_in_language", "words", "replaced")
    return {"total": {name: sum(row[name] for row in rows) for name in sums}, "rows": rows}


def judged(engine: Engine, text: str, drawn: dict[str, float], prompts: Sequence[str]) -> dict[str, Any]:
    """An answer to each prompt under a grammar, and one without; times are of one answer of each kind, alone."""
    rules, watch, alone = rules_of(text), Watch(), Watch()
    right, answers = {"": 0, text: 0}, set()
    for kind, (masks, steps) in enumerate(itertools.product(MASKS, STEPS)):
        asked = {"max_new_tokens": masks, "seed": kind, **drawn}
        group = prompts[kind :: len(MASKS) * len(STEPS)]
        for bound in right if group else ():
            method = DiffusionGrammar(rules=bound, steps=steps)
            with watch.over(engine) if bound else nullcontext():
                found = engine.generate(group, method=method, **asked)
            said = [[engine.tokenizer.decode([token]) for token in one.tokens if token not in engine.eos_token_ids]
                    for one in found]
            right[bound] += sum(recognises(rules, tokens) for tokens in said)
            answers |= set(map(tuple, said)) if bound else set()
        with alone.over(engine):
            engine.generate(prompts[0], method=DiffusionGrammar(rules=text, steps=steps), **asked)
    return {"answers": len(prompts), "different": len(answers), "in_language": right[text],
            "free_in_language": right[""], **watch.counts(), **alone.times()}


@dataclass
class Watch:
    """Records the cost of steps, and what became of guesses."""

    steps: int = 0
    tokens: int = 0
    replaced: int = 0
    forward_seconds: float = 0.0
    asking_seconds: float = 0.0

    @contextmanager
    def over(self, engine: Engine) -> Iterator[None]:
        """Watch the engine's steps inside the block."""
        fill, forward = Canvas.fill, engine.runner.forward

        def filled(canvas: Canvas, guesses: Sequence[Guess], logits: Any) -> None:
            started = time.perf_counter()
            fill(canvas, guesses, logits)
            self.asking_seconds += time.perf_counter() - started
            self.steps, self.tokens = self.steps + 1, self.tokens + len(guesses)
            self.replaced += sum(canvas.tokens[canvas.seq.prompt_length + one.place] != one.token for one in guesses)

        def forwarded(*args: Any) -> Any:
            started = time.perf_counter()
            logits = forward(*args)
            self.forward_seconds += time.perf_counter() - started
            return logits

        with mock.patch.object(Canvas, "fill", filled), mock.patch.object(engine.runner, "forward", forwarded):
            yield

    def counts(self) -> dict[str, Any]:
        """Number of decided tokens, and of those that are not the guess."""
        return {"words": self.tokens, "replaced": self.replaced, "replaced_share": self.replaced / self.tokens}

    def times(self) -> dict[str, Any]:
        """Milliseconds per step: the grammar's part and the forward."""
        return {"asking_ms_per_step": 1e3 * self.asking_seconds / self.steps,
                "forward_ms_per_step": 1e3 * self.forward_seconds / self.steps}


def rules_of(text: str) -> dict[str, list[list[str]]]:
    """The alternatives of each rule by name, texts in their quotes."""
    lines = [line.split("::=") for line in text.splitlines() if line.strip()]
    return {head.strip(): [re.findall(r'"[^"]*"|\w+', one) for one in body.split("|")] for head, body in lines}


def recognises(rules: Mapping[str, Sequence[Sequence[str]]], tokens: Sequence[str | None]) -> bool:
    """Whether the tokens are a text of the first rule; None stands for any token.

    For each rule and place, a table holds the ends of texts that begin there; the rules are applied to the table,
    empty at first, until it grows no more. Slow and obvious.
    """
    ends: dict[tuple[str, int], set[int]] = defaultdict(set)
    grown = True
    while grown:
        before = sum(map(len, ends.values()))
        for name, alternatives in rules.items():
            for first in range(len(tokens) + 1):
                for parts in alternatives:
                    ends[name, first] |= _after(parts, first, tokens, ends)
        grown = sum(map(len, ends.values())) > before
    return len(tokens) in ends[next(iter(rules)), 0]


def _after(
    parts: Sequence[str], first: int, tokens: Sequence[str | None], ends: Mapping[tuple[str, int], set[int]]
) -> set[int]:
    """Where the parts, one after the other, may end."""
    at = {first}
    for part in parts:
        if part == '""':
            continue
        if part.startswith('"'):
            at = {place + 1 for place in at if place < len(tokens) and tokens[place] in (None, part[1:-1])}
        else:
            at = {last for place in at for last in ends.get((part, place), ())}
    return at


if __name__ == "__main__":
    main()
