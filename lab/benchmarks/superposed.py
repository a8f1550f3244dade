"""How often k drafts contain the next tokens of a real text: superposed, sampled, and by beam search.

    python lab/benchmarks/superposed.py --model FILE --text FILE [--corpus FILE] [--prompts 320] [--k 3] [--json OUT]

Prompts of 48 tokens are evenly spread over a text; a draft covers a place if its first n tokens are those that follow,
n = 1 to 4. Superposed drafts are made with n-grams of the prompt, of a corpus if one is given, and without; nucleus
sampling draws k times (top_p 0.9, each draw with its own seed); beam search keeps k by the model's log-probability.
Shares have Wilson's 95 % intervals, differences to nucleus sampling paired ones. Forwards are counted with their rows.
The last line on stdout is the report as JSON.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import script
import shoal
from shoal_lab.eval.paired import accuracy_difference, wilson

PROMPT, LONGEST = 48, 4
Drafts = list[tuple[int, ...]]


def main(argv: Sequence[str]) -> int:
    """Draft, compare and print."""
    parser = script.parser(__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--corpus")
    parser.add_argument("--prompts", type=int, default=320)
    parser.add_argument("--k", type=int, default=3)
    args = parser.parse_args(argv)
    engine = shoal.load(args.model)
    places = spread(engine, args.text.read_text("utf-8"), args.prompts)
    ways = {name: way(engine, args.k) for name, way in ways_of(args.corpus).items()}
    found = {name: [draft(prompt) for prompt, _ in places] for name, draft in ways.items()}
    result = {
        "kind": "superposed",
        "model": Path(engine.model_name).name, "text": args.text.name, "prompts": len(places), "k": args.k,
        "coverage": summary({name: covered(one, places) for name, one in found.items()}),
    }  # fmt: skip
    script.publish(__file__, argv, result, args.json)
    return 0


def spread(engine: shoal.Engine, text: str, count: int) -> list[tuple[list[int], list[int]]]:
    """Prompts and the tokens that follow them, evenly spread over the text."""
    ids: list[int] = engine.tokenizer(text)["input_ids"]
    step = (len(ids) - PROMPT - LONGEST) // count
    if step < 1:
        raise ValueError(f"{count} prompts are too many for a text of {len(ids)} tokens")
    starts = range(0, count * step, step)
    return [(ids[at : at + PROMPT], ids[at + PROMPT : at + PROMPT + LONGEST]) for at in starts]


Draft = Callable[[list[int]], Drafts]


def ways_of(corpus: str | None) -> dict[str, Callable[[shoal.Engine, int], Draft]]:
    """Drafters by name."""

    def superposed(**options: Any) -> Callable[[shoal.Engine, int], Draft]:
        return lambda engine, k: lambda prompt: of_result(
            engine.generate(prompt, method=shoal.Superposed(k, **options), max_new_tokens=LONGEST, ignore_eos=True)
        )

    ways = {"nucleus": nucleus, "beam": beam, "superposed": superposed(), "superposed_alone": superposed(alpha=0.0),
            "superposed_warm": superposed(sharpen=0.5), "superposed_warm_alone": superposed(sharpen=1.0, alpha=0.0),
            "superposed_code": superposed(unseen=-370.0)}
    if corpus is not None:
        ways["superposed_corpus"] = superposed(corpus=corpus)
        ways["superposed_corpus_code"] = superposed(corpus=corpus, unseen=-370.0)
    return ways


def of_result(result: shoal.Result) -> Drafts:
    """The answer and its alternatives."""
    return [result.tokens, *(tokens for _, tokens, _ in result.alternatives)]


def nucleus(engine: shoal.Engine, k: int) -> Draft:
    """k draws, as rows of one batch."""
    return lambda prompt: [
        one.tokens for one in engine.generate([prompt] * k, temperature=1.0, top_p=0.9, seed=sum(prompt),
                                              max_new_tokens=LONGEST, ignore_eos=True)
    ]


def beam(engine: shoal.Engine, k: int) -> Draft:
    """Beam search of width k; each beam is read again in every step."""

    def search(prompt: list[int]) -> Drafts:
        beams: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
        for _ in range(LONGEST):
            results = engine.generate([[*prompt, *tokens] for _, tokens in beams], max_new_tokens=1, logprobs=k,
                                      ignore_eos=True)
            ways = [(score + log, (*tokens, token)) for (score, tokens), one in zip(beams, results, strict=True)
                    for token, log in (one.logprobs or ())[0].top]
            beams = sorted(ways, reverse=True)[:k]
        return [tokens for _, tokens in beams]

    return search


def covered(drafts: Sequence[Drafts], places: Sequence[tuple[list[int], list[int]]]) -> dict[int, list[bool]]:
    """For each n, the places at which one of the drafts begins with the next n tokens."""
    return {n: [any(list(one[:n]) == after[:n] for one in several)
                for several, (_, after) in zip(drafts, places, strict=True)] for n in range(1, LONGEST + 1)}


def summary(found: dict[str, dict[int, list[bool]]]) -> dict[str, Any]:
    """Shares with intervals, and the paired difference to nucleus sampling."""
    said: dict[str, Any] = {}
    for name, by_length in found.items():
        said[name] = {}
        for n, right in by_length.items():
            other = accuracy_difference(found["nucleus"][n], right)
            said[name][str(n)] = {
                "covered": sum(right), "share": sum(right) / len(right),
                "interval": list(wilson(sum(right), len(right))),
                "beside_nucleus": [other.mean, other.low, other.high],
            }  # fmt: skip
    return said


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
