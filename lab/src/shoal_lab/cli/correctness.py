"""Compare greedy tokens: the plain loop with Hugging Face's generate, and a method with the plain loop.

The exit code is 1 if the plain loop, or a method that is exact by its parts, differs and not by a tie. A method rounds
like the plain loop; against Hugging Face the tolerance of a tie follows from the activations' type, such as int8 for a
file of 4-bit weights. Differences of lossy methods are reported and never fail. With `--all`, every method that is
exact with its defaults is compared.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from shoal import catalog, methods
from shoal.cli.options import common
from shoal.cli.options.parser import Parser
from shoal_lab.cli.divergence import TOLERANCE, Divergence, diverge

if TYPE_CHECKING:
    from shoal.engine.engine import Engine
    from shoal.methods.base import Method
    from shoal.model.runner import ModelRunner

Thing = TypeVar("Thing")
EXAMPLES = """examples:
  shoal correctness --method full
  shoal correctness --all --max-new-tokens 128
  shoal correctness --method d3 --alpha 0.99 --max-new-tokens 128
  shoal correctness --model path/to/model --dtype bfloat16 --tie 0.25 "Once upon a time" "The capital of France"
"""
PROMPTS = (
    "Mia buys 9 coins for $5 each and sells them for $8 each. How much profit does Mia make?\n",
    "Tom has 15 cups. He buys 4 boxes with 6 cups each. Then he gives away 9 cups. How many cups does he have now?\n",
    "Once upon a time, there was a little girl who lived by the sea.",
    "The three most important things about water are",
)


def add_arguments(parser: Parser) -> None:
    """Declare the options."""
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="texts to continue; four built-in ones if none")
    parser.add_argument("--raw", action="store_true", help="do not wrap prompts in the tokenizer's chat template")
    parser.add_argument("--max-new-tokens", metavar="N", type=int, default=64, help="length of each continuation")
    parser.add_argument("--tie", metavar="T", type=float, help="top-two margin in logits below which a difference is a "
                        "tie (default: 0.001 in float32, 0.5 in bfloat16, 0.05 in float16, 1e-9 in float64; against "
                        "Hugging Face 0.5 where the kernels take activations in int8)")
    parser.add_argument("--all", action="store_true", help="compare every method that is exact with its defaults")
    parser.add_argument("--with-draft", metavar="M", help="with --all: the model that methods draft with which need a "
                        "second one (default: the model itself, whose guesses are all right)")
    common.add_method(parser)
    common.add_model(parser, dtype="float32")
    common.add_json(parser)
    parser.show_usual("--model", "--method", "--all", "--with-draft", "--max-new-tokens", "--tie", "--raw", "--json")


def run(args: argparse.Namespace) -> int:
    """Compare, report, judge."""
    engine = common.load_engine(args)
    judge = _Judge(args, engine, HuggingFace(load_peer(args, engine)))
    if args.all:
        report = _all(args, engine, judge)
        text = _all_text(report)
    else:
        report = judge.report(args.method)
        text = _text(report, args.method.name)
    if args.json:
        common.print_json(report)
    else:
        print(text)
    return 0 if report["passed"] else 1


class _Judge:
    """Compares methods on the same prompts; the plain loop and Hugging Face run once."""

    def __init__(self, args: argparse.Namespace, engine: Engine, peer: HuggingFace) -> None:
        self._args, self._engine = args, engine
        self._tolerance = TOLERANCE[args.dtype] if args.tie is None else args.tie
        self._peer_tolerance = tie_below(engine.runner) if args.tie is None else args.tie
        prompts = _bar(args.prompts or PROMPTS, "prompts in full")
        self._bases = [_Base(engine, peer, prompt, args) for prompt in prompts]

    def report(self, method: Method) -> dict[str, Any]:
        """The report of one method."""
        args, engine = self._args, self._engine
        exact_to = method.recipe(engine.info(args.max_new_tokens)).exact_to
        bounds = self._tolerance, self._peer_tolerance
        rows = [_compare(engine, base, method, *bounds) for base in _bar(self._bases, method.name)]
        failed = [row for row in rows if _fails(row, exact_to == "full", args.quant is None)]
        return {**method.to_dict(), "model": engine.model_name, "dtype": args.dtype, "tie_below": self._tolerance,
                "tie_below_huggingface": self._peer_tolerance, "exact_to": exact_to, "passed": not failed,
                "prompts": rows}


def _bar(things: Sequence[Thing], label: str) -> Iterable[Thing]:
    from tqdm import tqdm

    bar: Iterable[Thing] = tqdm(things, desc=label, leave=False, disable=None)
    return bar


def _all(args: argparse.Namespace, engine: Engine, judge: _Judge) -> dict[str, Any]:
    """A report per exact method, and the methods that could not run."""
    info = engine.info(args.max_new_tokens)
    draft = args.with_draft or catalog.find(args.model)
    reports: list[dict[str, Any]] = []
    skipped: dict[str, str] = {}
    for name in methods.names():
        try:
            method = _by_default(name, draft)
            if method.recipe(info).exact_to == "full":
                reports.append(judge.report(method))
        except ValueError as reason:
            skipped[name] = str(reason)
        except TypeError:
            skipped[name] = "it has options without defaults; compare it with --method"
    return {"model": engine.model_name, "dtype": args.dtype, "passed": all(report["passed"] for report in reports),
            "methods": reports, "skipped": skipped}


def _by_default(name: str, draft: str) -> Method:
    """The method with its defaults, and with a draft model if it needs one."""
    cls = methods.get(name)
    return cls(**({"draft": draft} if "draft" in cls.option_names() else {}))


class HuggingFace:
    """The same model in Hugging Face's implementation: its generate, and its logits."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def generate(self, ids: Sequence[int], max_new_tokens: int) -> list[int]:
        """Greedy tokens after `ids`, by transformers' generate."""
        import torch

        row = torch.tensor([list(ids)], device=self.model.device)
        with torch.inference_mode():
            out = self.model.generate(row, attention_mask=torch.ones_like(row), do_sample=False, num_beams=1,
                                      max_new_tokens=max_new_tokens, repetition_penalty=1.0)
        tokens: list[int] = out[0, len(ids) :].tolist()
        return tokens

    def margin(self, ids: Sequence[int]) -> float:
        """Logit of the argmax token after `ids` minus that of the second."""
        import torch

        with torch.inference_mode():
            logits = self.model(torch.tensor([list(ids)], device=self.model.device), use_cache=False).logits[0, -1]
        best, second = logits.double().topk(2).values.tolist()
        return float(best - second)


class _Base:
    """One prompt, with the answers of the plain loop and of Hugging Face."""

    def __init__(self, engine: Engine, peer: HuggingFace, prompt: str, args: argparse.Namespace) -> None:
        self.prompt, self._peer = prompt, peer
        self.ids = common.encode(engine, prompt, args.raw)
        self.length = _room(engine, self.ids, args.max_new_tokens)
        self.tokens = {"huggingface": peer.generate(self.ids, self.length),
                       "plain": _greedy(engine, self.ids, "full", self.length)}

    def margin(self, generated: Sequence[int]) -> float:
        """The reference's top-two margin after the prompt and `generated`."""
        return self._peer.margin([*self.ids, *generated])


def tie_below(runner: ModelRunner) -> float:
    """The top-two margin below which rounding may change the runner's token from that of the same weights elsewhere."""
    return max(TOLERANCE[str(dtype).removeprefix("torch.")] for dtype in (runner.dtype, runner.activation_dtype))


def _compare(engine: Engine, base: _Base, method: Any, tolerance: float, peer_tolerance: float) -> dict[str, Any]:
    tokens = {**base.tokens, "method": _greedy(engine, base.ids, method, base.length)}
    plain = diverge(tokens["huggingface"], tokens["plain"], base.margin, peer_tolerance)
    found = diverge(tokens["plain"], tokens["method"], base.margin, tolerance)
    return {"prompt": base.prompt, "new_tokens": {name: len(row) for name, row in tokens.items()},
            "plain_vs_huggingface": _outcome(plain), "method_vs_plain": _outcome(found)}


def _room(engine: Engine, ids: list[int], max_new_tokens: int) -> int:
    """Tokens to compare: Hugging Face's generate runs past the end of the context, where nothing can be compared."""
    limit = engine.runner.max_positions
    return max_new_tokens if limit is None else min(max_new_tokens, limit - len(ids))


def _greedy(engine: Engine, ids: list[int], method: Any, max_new_tokens: int) -> tuple[int, ...]:
    return engine.generate(ids, method=method, max_new_tokens=max_new_tokens).tokens


def _outcome(found: Divergence) -> dict[str, Any]:
    return {**dataclasses.asdict(found), "wrong": found.wrong}


def _fails(row: dict[str, Any], claims_exact: bool, same_weights: bool) -> bool:
    """Whether a prompt fails. Hugging Face runs no quantised weights, so there only the method is judged."""
    plain, method = row["plain_vs_huggingface"]["wrong"], row["method_vs_plain"]["wrong"]
    return bool((plain and same_weights) or (method and claims_exact))


def _text(report: dict[str, Any], name: str) -> str:
    rows = report["prompts"]
    peer = report["tie_below_huggingface"]
    wider = f" ({peer:g} against Hugging Face)" if peer != report["tie_below"] else ""
    lines = [f"{report['model']} in {report['dtype']}, ties below {report['tie_below']:g}{wider}"]
    for row in rows:
        lines += ["", _shorten(row["prompt"]),
                  f"  plain loop against Hugging Face: {_line(row, 'plain_vs_huggingface')}",
                  f"  {name} against the plain loop: {_line(row, 'method_vs_plain')}"]
    return "\n".join([*lines, "", _verdict(report, name)])


def _all_text(report: dict[str, Any]) -> str:
    lines = [f"{report['model']} in {report['dtype']}"]
    lines += [_verdict(one, one["method"]) for one in report["methods"]]
    lines += [f"not compared: {name}: {why}" for name, why in report["skipped"].items()]
    return "\n".join([*lines, "passed" if report["passed"] else "FAILED"])


def _verdict(report: dict[str, Any], name: str) -> str:
    agree = [row["method_vs_plain"]["at"] for row in report["prompts"]]
    equal = sum(at is None for at in agree)
    claim = "exact" if report["exact_to"] == "full" else "lossy"
    apart = [at for at in agree if at is not None]
    median = f", the others part at token {statistics.median_low(apart)} (median)" if apart else ""
    judged = "passed" if report["passed"] else "FAILED"
    return f"{judged}: {name} is {claim}; {equal} of {len(agree)} texts equal the plain loop's{median}"


def _line(row: dict[str, Any], which: str) -> str:
    found = row[which]
    if found["at"] is None:
        return f"equal, {row['new_tokens']['plain']} tokens"
    kind = "a tie" if found["tie"] else "not a tie"
    return (f"parts at token {found['at']} (expected {found['expected']}, found {found['found']}), "
            f"top-two margin {found['margin']:.3g}: {kind}")


def _shorten(text: str, width: int = 80) -> str:
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 3] + "..."


def load_peer(args: argparse.Namespace, engine: Engine) -> Any:
    """The transformers model of the engine's checkpoint, for a comparison; the engine's own if it holds one."""
    if engine.model is not None:
        return engine.model
    from shoal.engine.loading.checkpoint import Checkpoint, hush_libraries

    hush_libraries()
    files = Checkpoint(catalog.find(args.model), args.revision, args.trust_remote_code)
    return files.model(engine.runner.dtype).to(engine.runner.device).eval()
