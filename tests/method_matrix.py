"""Every method that ships, with the settings under which the whole-matrix test runs it.

A new method adds a line here; `test_matrix.py` fails until it does. The tiny models have six layers, so counts are
small and decays steep: each lossy setting changes the number of layers within the first few tokens.
"""

from __future__ import annotations

from drafts import draft_of
from masked import masked_model
from shoal.methods.a_star import AStar
from shoal.methods.adablock import AdaBlock
from shoal.methods.adadec import AdaDec
from shoal.methods.aded import ADED
from shoal.methods.atts import ATTS
from shoal.methods.auto import Auto
from shoal.methods.base import Method
from shoal.methods.best_of import BestOf
from shoal.methods.calibrated import Calibrated
from shoal.methods.centroid_kv import CentroidKV
from shoal.methods.d3 import D3
from shoal.methods.d3_spec import D3Spec
from shoal.methods.deer import DEER
from shoal.methods.del_ import DEL
from shoal.methods.diffusion import Diffusion
from shoal.methods.diffusion_grammar import DiffusionGrammar
from shoal.methods.double_sparsity import DoubleSparsity
from shoal.methods.draft_and_verify import DraftAndVerify
from shoal.methods.draft_model import DraftModel
from shoal.methods.dynamic_context import DynamicContext
from shoal.methods.eagle import Eagle
from shoal.methods.early_exit import EarlyExit
from shoal.methods.entropy_adaptive import EntropyAdaptive
from shoal.methods.fast_dllm import FastDLLM
from shoal.methods.first import First
from shoal.methods.foreal import FoReaL
from shoal.methods.full import Full
from shoal.methods.jacobi import Jacobi
from shoal.methods.kv_int4 import KVInt4
from shoal.methods.kv_int8 import KVInt8
from shoal.methods.layerskip import LayerSkip
from shoal.methods.medusa import Medusa
from shoal.methods.mirror_sd import MirrorSD
from shoal.methods.momentum import Momentum
from shoal.methods.mustafar import Mustafar
from shoal.methods.ppd import PPD
from shoal.methods.prompt_lookup import PromptLookup
from shoal.methods.prophet import Prophet
from shoal.methods.random_switching import RandomSwitching
from shoal.methods.rapid import Rapid
from shoal.methods.read_me import ReadME
from shoal.methods.rsd import RSD
from shoal.methods.schedule import Schedule
from shoal.methods.shortgpt import ShortGPT
from shoal.methods.skipdecode import SkipDecode
from shoal.methods.snapkv import SnapKV
from shoal.methods.streaming_llm import StreamingLLM
from shoal.methods.superposed import Superposed
from shoal.methods.swift import Swift
from shoal.methods.tidal import Tidal
from shoal.methods.topk_oracle import TopKOracle
from shoal.methods.trimr import TrimR
from shoal.methods.unified_layer_skipping import UnifiedLayerSkipping
from shoal.methods.vocabtrim import VocabTrim
from trained_parts import part_for

CHANNELS = (((3, 7, 0, 4, 1, 5, 2, 6), (1, 5, 3, 7, 2, 6, 0, 4)),) * 6

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
"""Those that need a masked-diffusion model, and run in a matrix of their own."""

MATRIX: tuple[Method, ...] = (
    Full(),
    D3(alpha=1.0),
    D3(),
    D3(alpha=0.9, core=2),
    D3(alpha=0.8, start=3, order="leave_one_out", core=3, rounding="ceil"),
    SkipDecode(maximum=1.0, minimum=1.0),
    SkipDecode(maximum=0.9, minimum=0.4),
    UnifiedLayerSkipping(speedup=1),
    UnifiedLayerSkipping(speedup=1.5),
    EarlyExit(6),
    EarlyExit(3),
    ShortGPT(removed=0),
    ShortGPT(removed=2),
    Schedule((), ()),
    Schedule((2, 4, 1), (1, 3, 3)),
    Calibrated(Full()),
    Calibrated(Schedule((3, 2), (2, 5))),
    Auto(),
    BestOf(1),
    BestOf(3, inner=D3(alpha=0.9, core=2)),
    BestOf(2, inner=DraftModel(draft_of("llama"), inner=D3(alpha=0.9, core=2))),
    AStar(k=1),
    AStar(k=2, step=3, width=2, budget=40, inner=D3(alpha=0.9, core=2)),
    PromptLookup(min_ngram=1),
    PromptLookup(max_ngram=2, min_ngram=1, length=3, inner=D3(alpha=0.9, core=2)),
    ADED(),
    ADED(search="mcts", depth=3, iterations=20, inner=D3(alpha=0.9, core=2)),
    DraftModel(draft_of("llama")),
    DraftModel(draft_of("llama"), branching=(2, 2), rule="rejection"),
    DraftModel(draft_of("hybrid"), length=3, inner=D3(alpha=0.9, core=2)),
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
    D3Spec(mean=0.8, core=2),
    D3Spec(alpha=0.9, inner=D3(alpha=0.9, core=2)),
    DraftAndVerify((2, 3), (3,), greedy_stop=0.2),
    DraftAndVerify(share=0.2, inner=D3(alpha=0.9, core=2)),
    Swift(ratio=0.2, length=3, nodes=9, window=4, rounds=3),
    Swift(ratio=0.2, trees=False, window=4, inner=D3(alpha=0.9, core=2)),
    DEL((4, 5), 4, head=0.0),
    DEL((2, 5), window=0, inner=D3(alpha=0.9, core=2)),
    Eagle(part_for("eagle", "llama"), stop=0.0),
    Eagle(part_for("eagle", "llama"), width=2, nodes=5, inner=D3(alpha=0.9, core=2)),
    Medusa(part_for("medusa", "llama")),
    Medusa(part_for("medusa", "llama"), nodes=6, inner=D3(alpha=0.9, core=2)),
    PPD(part_for("ppd", "llama")),
    PPD(part_for("ppd", "llama"), nodes=9, inner=D3(alpha=0.9, core=2)),
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
    StreamingLLM(window=None),
    StreamingLLM(window=4, sinks=1, every=3),
    KVInt4(first=6),
    KVInt4(),
    KVInt4(keys=8),
    KVInt8(first=6),
    KVInt8(),
    TopKOracle(k=None),
    TopKOracle(k=3, first=1),
    Tidal(k=None),
    Tidal(k=2, select=2, reselect=6),
    SnapKV(budget=None),
    SnapKV(budget=3, window=1, pool=1),
    DoubleSparsity(CHANNELS, k=None),
    DoubleSparsity(CHANNELS, k=2, width=2, first=0),
    CentroidKV(removed=0.0),
    CentroidKV(removed=0.5, chunk=2, window=1, sinks=0, every=2),
    First(part_for("first", "llama"), threshold=None),
    First(part_for("first", "llama"), layers=4, core=2),
    First(part_for("first", "llama"), inner=D3(alpha=0.9, core=2)),
    DynamicContext(part_for("dynamic_context", "llama"), threshold=None),
    DynamicContext(part_for("dynamic_context", "llama"), every=2),
    ReadME(part_for("read_me", "llama"), experts=None),
    ReadME(part_for("read_me", "llama"), experts=2),
    Mustafar(sparsity=0.0),
    Mustafar(sparsity=0.6, window=1, every=2),
)
