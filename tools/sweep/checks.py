"""One tiny model through everything that is asked of it, against transformers' own generate."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig

from oracle import greedy_under_plan
from shoal.engine.engine import Engine
from shoal.engine.loading.load import engine_for
from shoal.errors import Unsupported
from shoal.methods.d3 import D3

from .configs import VOCAB, tiny_config

NEW = 14
DRAFTING = ("prompt_lookup", {"method": "d3_spec", "method_args": {"core": 2, "alpha": 0.7}}, "aded", "layerskip")
SHALLOW = D3(alpha=0.8, core=2)
DRAWS = [(seed, gain) for seed in (1, 2, 3) for gain in (1.0, 0.3, 0.1, 0.03)]
"""Seeds, and how large embeddings are."""
VARIED = 20
"""Different tokens in the texts of all prompts that are enough not to draw again."""
TIES = {torch.float32: 1e-4, torch.float64: 1e-5}
"""A difference is a tie where the reference's two best logits are nearer than this share of its largest."""


@dataclass
class Row:
    """What came out for one configuration.

    Attributes:
        outcome: "right", "refused", "broken" (transformers itself cannot run it) or "wrong".
        reason: why it was refused, what transformers said, or what was wrong.
        packed: "right", or why the packed executor does not run it.
        varied: different tokens in the reference's texts, of 42.
        ties: differences where the reference hardly prefers a token.
        left_out: methods that refuse the model, and why; float64 where transformers cannot run that.
    """

    model_type: str
    configuration: str
    outcome: str = "right"
    reason: str = ""
    packed: str = ""
    varied: int = 0
    ties: int = 0
    left_out: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Reference:
    """Tokens that are right, and the logits [T, V] that they were taken from."""

    tokens: list[int]
    logits: Tensor

    def judge(self, tokens: Sequence[int], tie: float) -> tuple[str, int]:
        """What is wrong with other tokens, if anything, and whether a tie excuses a difference."""
        for place, (got, wanted) in enumerate(zip(tokens, self.tokens, strict=True)):
            if got != wanted:
                logits = self.logits[place].double()
                gap = float((logits[wanted] - logits[got]) / logits[logits.isfinite()].abs().max())
                return ("", 1) if gap < tie else (f"token {place} is {got}, not {wanted}, ahead by {gap:.0e}", 0)
        return "", 0


def check(model_type: str, configuration: str, others: dict[str, Any]) -> Row:
    """Run one configuration."""
    row, model = Row(model_type, configuration), None
    try:
        config = tiny_config(model_type, others)
        model, draw, references = wandering(config)
    except Exception as error:
        row.outcome, row.reason = "broken", one_line(error)
    if model is None:
        return row
    try:
        engine = engine_for(model)
    except ValueError as error:
        return without_modules(model, references, row, why(error))
    except Exception as error:
        row.outcome, row.reason = "wrong", f"raw error at load: {one_line(error)}"
    if row.outcome != "right":
        return row
    row.varied = sum(len(set(reference.tokens)) for reference in references)
    wrong = [*against(engine, references, row), *in_float64(build(config, *draw, torch.float64), row)]
    row.packed, faults = packed(model, references, row)
    if wrong := [*wrong, *faults]:
        row.outcome, row.reason = "wrong", "; ".join(wrong)
    return row


def without_modules(model: Any, references: list[Reference], row: Row, reason: str) -> Row:
    """A row whose modules are refused: right if the packed executor runs the type all the same."""
    found, faults = packed(model, references, row)
    if found != "right":
        row.outcome, row.reason = "refused", reason
        return row
    row.varied = sum(len(set(reference.tokens)) for reference in references)
    row.packed, row.left_out["its own modules"] = found, reason
    if faults:
        row.outcome, row.reason = "wrong", "; ".join(faults)
    return row


def prompts() -> list[list[int]]:
    """Of several lengths around the window, without the numbers that special tokens have."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(8, VOCAB, (length,), generator=generator).tolist() for length in (11, 3, 7)]


def wandering(config: Any) -> tuple[Any, tuple[int, float], list[Reference]]:
    """A model whose texts are not one token over and over, how it was drawn, and its texts.

    A tied embedding that dominates the residual stream makes every token predict itself.
    """
    found = []
    for seed, gain in DRAWS:
        model = build(config, seed, gain, torch.float32)
        references = [of_generate(model, prompt) for prompt in prompts()]
        found.append((sum(len(set(reference.tokens)) for reference in references), model, (seed, gain), references))
        if found[-1][0] >= VARIED:
            break
    best = max(found, key=lambda one: one[0])
    return best[1], best[2], best[3]


def build(config: Any, seed: int, gain: float, dtype: torch.dtype) -> Any:
    """A random model in which every layer counts, its embeddings times `gain`."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    if dtype == torch.float64 and hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the other one has no kernel for it
    for parameter in model.parameters():
        noise = torch.randn_like(parameter)
        parameter.data = noise * 1.5 / parameter.shape[-1] ** 0.5 if parameter.dim() > 1 else parameter + 0.1 * noise
    model.get_input_embeddings().weight.data *= gain
    return model.to(dtype)


def of_generate(model: Any, prompt: list[int]) -> Reference:
    """What transformers' own generate answers."""
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, num_beams=1,
                         eos_token_id=None, pad_token_id=0, return_dict_in_generate=True, output_scores=True)
    return Reference(out.sequences[0, len(prompt):].tolist(), torch.cat(out.scores))


def against(engine: Engine, references: list[Reference], row: Row, tie: float = TIES[torch.float32]) -> Iterator[str]:
    """What differs from the references: plain and drafting, in a batch and alone."""
    for method in ("full", *DRAFTING):
        name = method if isinstance(method, str) else method["method"]
        try:
            yield from judged(name, answers(engine, method), references, row, tie)
        except Unsupported as error:
            if method == "full":
                yield f"full: {error}"
            row.left_out[name] = why(error)
        except Exception as error:
            yield f"{name}: {one_line(error)}"


def answers(engine: Engine, method: Any) -> Iterator[tuple[str, int, list[int]]]:
    """How, which prompt, tokens."""
    options = {"method": method, "max_new_tokens": NEW, "ignore_eos": True}
    together = engine.generate(prompts(), **options)
    for number, result in enumerate(together):
        yield "batch", number, list(result.tokens)
    for number, prompt in enumerate(prompts()):
        yield "alone", number, list(engine.generate(prompt, **options).tokens)


def judged(name: str, found: Any, references: list[Reference], row: Row, tie: float) -> Iterator[str]:
    for how, number, tokens in found:
        fault, tied = references[number].judge(tokens, tie)
        row.ties += tied
        if fault:
            yield f"{name}, {how}, prompt {number}: {fault}"


def in_float64(model: Any, row: Row) -> list[str]:
    """Plain decoding and D3 where rounding blurs nothing; D3 against uncached passes with hooks."""
    tie = TIES[torch.float64]
    try:
        references = [of_generate(model, prompt) for prompt in prompts()]
    except Exception as error:
        row.left_out["float64"] = one_line(error)
        return []
    try:
        engine = engine_for(model)
    except Exception as error:
        return [f"float64: {one_line(error)}"]
    found = [*judged("full in float64", answers(engine, "full"), references, row, tie)]
    model.generation_config = GenerationConfig()  # the oracle knows no forced tokens
    engine = engine_for(model)
    plan = engine.recipe(SHALLOW, NEW).plan
    oracle = [Reference(*greedy_under_plan(model, prompt, plan, NEW)) for prompt in prompts()]
    return [*found, *judged("d3 in float64", answers(engine, SHALLOW), oracle, row, tie)]


def packed(model: Any, references: list[Reference], row: Row) -> tuple[str, list[str]]:
    """The packed executor's outcome, and what is wrong with it."""
    try:
        engine = engine_for(model, backend="packed")
    except Unsupported as error:
        return why(error), []
    except Exception as error:
        return "", [f"packed: raw error {one_line(error)}"]
    faults = [f"packed, {fault}" for fault in against(engine, references, row)]
    return "right", faults


def why(error: ValueError) -> str:
    """A refusal without its remedy."""
    return f"{error.what}: {error.why}" if isinstance(error, Unsupported) else one_line(error)


def one_line(error: BaseException) -> str:
    """An error as a line, without the place of a file on this machine."""
    return f"{type(error).__name__}: {re.sub(r' ?[(]/[^)]*[)]', '', ' '.join(str(error).split()))[:300]}"
