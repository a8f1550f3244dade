"""Every method of the lab, with its settings in the matrix; see `method_matrix`."""

from __future__ import annotations

from typing import Any

from drafts import draft_of
from masked import masked_model
from shoal.methods.base import Method
from shoal.methods.d3 import D3
from shoal_lab.methods.a_star import AStar
from shoal_lab.methods.adablock import AdaBlock
from shoal_lab.methods.adadec import AdaDec
from shoal_lab.methods.atts import ATTS
from shoal_lab.methods.centroid_kv import CentroidKV
from shoal_lab.methods.deer import DEER
from shoal_lab.methods.del_ import DEL
from shoal_lab.methods.diffusion import Diffusion
from shoal_lab.methods.diffusion_grammar import DiffusionGrammar
from shoal_lab.methods.draft_and_verify import DraftAndVerify
from shoal_lab.methods.dynamic_context import DynamicContext
from shoal_lab.methods.dynamic_pictures import DynamicPictures
from shoal_lab.methods.entropy_adaptive import EntropyAdaptive
from shoal_lab.methods.fast_dllm import FastDLLM
from shoal_lab.methods.first import First
from shoal_lab.methods.foreal import FoReaL
from shoal_lab.methods.jacobi import Jacobi
from shoal_lab.methods.layerskip import LayerSkip
from shoal_lab.methods.medusa import Medusa
from shoal_lab.methods.mirror_sd import MirrorSD
from shoal_lab.methods.momentum import Momentum
from shoal_lab.methods.mustafar import Mustafar
from shoal_lab.methods.ppd import PPD
from shoal_lab.methods.prophet import Prophet
from shoal_lab.methods.random_switching import RandomSwitching
from shoal_lab.methods.rapid import Rapid
from shoal_lab.methods.read_me import ReadME
from shoal_lab.methods.rsd import RSD
from shoal_lab.methods.skipdecode import SkipDecode
from shoal_lab.methods.superposed import Superposed
from shoal_lab.methods.swift import Swift
from shoal_lab.methods.trimr import TrimR
from shoal_lab.methods.vocabtrim import VocabTrim
from trained_parts import part_for

MASKED: tuple[Method, ...] = (
    Diffusion(block=4, steps=6),
    Diffusion(block=5, reuse="prefix"),
    Diffusion(block=5, steps=7, reuse="dual"),
    Diffusion(guidance=0.5, steps=5),
    FastDLLM(threshold=0.2, block=6),
    FastDLLM(factor=1.5, block=4, reuse="dual"),
    Prophet(gaps=(1.0, 0.8, 0.5), block=4),
    Prophet(gaps=(2.0, 1.0, 0.5), region=(2, 3)),
    DiffusionGrammar(block=6),
    AdaBlock(threshold=0.2, delimiter_threshold=0.05, delimiters=tuple(range(40)), reuse="prefix"),
)
"""Methods that need a masked-diffusion model, and run in a matrix of their own."""

LAB: tuple[Method, ...] = (
    SkipDecode(maximum=1.0, minimum=1.0),
    SkipDecode(maximum=0.9, minimum=0.4),
    AStar(k=1),
    AStar(k=2, step=3, width=2, budget=40, inner=D3(alpha=0.9, core=2)),
    RSD(draft_of("llama")),
    MirrorSD(draft_of("llama"), k=0),
    MirrorSD(draft_of("llama"), exit_layer=5, k=3, length=3),
    MirrorSD(draft_of("hybrid"), k=2, inner=D3(alpha=0.9, core=2)),
    VocabTrim(draft_of("llama"), tokens=tuple(range(0, 97, 2))),
    VocabTrim(draft_of("hybrid"), tokens=tuple(range(60)), keep=50, inner=D3(alpha=0.9, core=2)),
    RSD(draft_of("hybrid"), branching=(2, 1), inner=D3(alpha=0.9, core=2)),
    DEER(masked_model(), length=1),
    DEER(masked_model(shift=1), rule="rejection", inner=D3(alpha=0.9, core=2)),
    Rapid(),
    Rapid(draft_of("llama"), length=3, context=8, chunk=2, begin=1, end=3, inner=D3(alpha=0.9, core=2)),
    LayerSkip(4, 3),
    LayerSkip(5, inner=D3(alpha=0.9, core=2)),
    DraftAndVerify((2, 3), (3,), greedy_stop=0.2),
    DraftAndVerify(share=0.2, inner=D3(alpha=0.9, core=2)),
    Swift(ratio=0.2, length=3, nodes=9, window=4, rounds=3),
    Swift(ratio=0.2, trees=False, window=4, inner=D3(alpha=0.9, core=2)),
    DEL((4, 5), 4, head=0.0),
    DEL(longest=3, head=0.0, judged=2),
    DEL((2, 5), window=0, inner=D3(alpha=0.9, core=2)),
    Medusa(part_for("medusa", "llama")),
    Medusa(part_for("medusa", "llama"), nodes=6, inner=D3(alpha=0.9, core=2)),
    PPD(part_for("ppd", "llama")),
    PPD(part_for("ppd", "llama"), nodes=9, inner=D3(alpha=0.9, core=2)),
    PPD(part_for("ppd", "llama"), nodes=12, measured=True),
    Momentum(alpha=0.0),
    Momentum(alpha=0.3, candidates=7),
    AdaDec(lookahead=0),
    AdaDec(threshold=0.9, candidates=4, lookahead=2),
    EntropyAdaptive(draft_of("llama", 0.3), tau=-1.0),
    EntropyAdaptive(draft_of("llama", 0.3), tau=2.0, window=2),
    ATTS(draft_of("llama", 0.3), draft_tokens=0),
    ATTS(draft_of("llama", 0.3), alpha=0.6, draft_tokens=3, target_tokens=2, scores=(4.0, 4.3, 4.5, 4.6, 4.8, 5.0)),
    FoReaL(draft_of("hybrid", 0.3), lead=None),
    FoReaL(draft_of("hybrid", 0.3), lead=4),
    RandomSwitching(draft_of("llama", 0.3), share=1.0),
    RandomSwitching(draft_of("hybrid", 0.3), share=0.0),
    TrimR(share=None, repeats=None),
    TrimR(share=0.5, thoughts=0, opening="", closing=(5, 6), inner=D3(alpha=0.9, core=2)),
    Superposed(k=1),
    Superposed(k=3, tokens=7, sharpen=0.5, inner=D3(alpha=0.9, core=2)),
    Jacobi(n=1),
    Jacobi(n=5),
    CentroidKV(removed=0.0),
    CentroidKV(removed=0.5, chunk=2, window=1, sinks=0, every=2),
    First(part_for("first", "llama"), threshold=None),
    First(part_for("first", "llama"), layers=4, core=2),
    First(part_for("first", "llama"), inner=D3(alpha=0.9, core=2)),
    DynamicContext(part_for("dynamic_context", "llama"), threshold=None),
    DynamicContext(part_for("dynamic_context", "llama"), every=2),
    DynamicPictures(part_for("dynamic_pictures", "llama"), keep=1.0),
    DynamicPictures(part_for("dynamic_pictures", "llama"), keep=0.5),
    ReadME(part_for("read_me", "llama"), experts=None),
    ReadME(part_for("read_me", "llama"), experts=2),
    Mustafar(sparsity=0.0),
    Mustafar(sparsity=0.6, window=1, every=2),
)

LAGGING: tuple[Method, ...] = tuple(method for method in LAB if isinstance(method, ATTS | EntropyAdaptive | FoReaL
                                                                           | RandomSwitching))
"""Two models take turns, and the engine's own has only read up to where it last wrote."""

SPEAKING: tuple[Method, ...] = tuple(method for method in LAB if isinstance(method, TrimR) and method.share is not None)
"""They insert tokens of their own, regardless of a request's constraint."""

COUNTING_OF_LAB: tuple[Method, ...] = tuple(
    method for method in LAB if isinstance(method, CentroidKV | Mustafar | DynamicContext | EntropyAdaptive | Superposed
                                           | ATTS))
"""They depend on each forward's output for one token, or on how many tokens of a text are stored."""

SEARCHES: tuple[Method, ...] = (AStar(k=2, step=3),)
"""Searches with a verifier."""

SELF_DRAFTING: dict[str, Method] = {
    "layerskip": LayerSkip(4, 5),
    "layerskip, stopping": LayerSkip(5, 8, stop=0.4),
    "layerskip, all layers": LayerSkip(6, 4),
    "draft_and_verify": DraftAndVerify((2, 3), (3,), greedy_stop=0.3, sampled_stop=0.2, accepted=0.5),
    "swift": Swift(ratio=0.25, length=4, stop=0.3, nodes=14, window=8, rounds=6, bayes_every=3),
    "swift, chains": Swift(ratio=0.3, length=5, stop=0.2, trees=False, window=6, rounds=3, bayes_every=0),
    "del": DEL((1, 2, 4), 6, head=0.0, window=5),
    "del, off at first": DEL((1, 3), 6, head=1.0, window=0, probe=2),
}
"""Drafting with the model's own layers, with settings under which a tiny random model accepts and rejects."""


def drafting_of_lab(draft: Any) -> dict[str, Method]:
    """Methods that draft without the target's layers and keep its tokens, with `draft` as their second model."""
    return {
        "mirror_sd": MirrorSD(draft, exit_layer=5, k=3, length=3),
        "mirror_sd on d3": MirrorSD(draft, k=2, inner=D3(alpha=0.93, core=2)),
        "deer": DEER(masked_model(), length=3),
        "rsd beam": RSD(draft, rule="match"),
        "rsd branching": RSD(draft, branching=(2, 2), rule="match"),
        "vocabtrim": VocabTrim(draft, tokens=tuple(range(60))),
    }


def switching_of_lab(draft: Any) -> list[Method]:
    """Methods in which `draft` stores what the engine's own model wrote."""
    return [ATTS(draft, alpha=1.0, draft_tokens=3, target_tokens=2)]
