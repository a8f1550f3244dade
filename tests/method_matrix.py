"""Every method that ships, with the settings under which the whole-matrix test runs it.

A new method adds a line here; `test_matrix.py` fails until it does. The tiny models have six layers, so counts are
small and decays steep: each lossy setting changes the number of layers within the first few tokens. Where shoal-lab is
installed, its methods are in the matrix too; see `lab_matrix`.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from drafts import draft_of
from eagle_drafters import drafter
from eagle_part import eagle_part
from shoal.methods.aded import ADED
from shoal.methods.auto import Auto
from shoal.methods.base import Method
from shoal.methods.best_of import BestOf
from shoal.methods.calibrated import Calibrated
from shoal.methods.d3 import D3
from shoal.methods.d3_spec import D3Spec
from shoal.methods.double_sparsity import DoubleSparsity
from shoal.methods.draft_model import DraftModel
from shoal.methods.eagle import Eagle
from shoal.methods.early_exit import EarlyExit
from shoal.methods.full import Full
from shoal.methods.kv_int4 import KVInt4
from shoal.methods.kv_int8 import KVInt8
from shoal.methods.mtp import Mtp
from shoal.methods.prompt_lookup import PromptLookup
from shoal.methods.schedule import Schedule
from shoal.methods.shortgpt import ShortGPT
from shoal.methods.snapkv import SnapKV
from shoal.methods.streaming_llm import StreamingLLM
from shoal.methods.tidal import Tidal
from shoal.methods.topk_oracle import TopKOracle
from shoal.methods.unified_layer_skipping import UnifiedLayerSkipping

CHANNELS = (((3, 7, 0, 4, 1, 5, 2, 6), (1, 5, 3, 7, 2, 6, 0, 4)),) * 6

CORE: tuple[Method, ...] = (
    Full(),
    D3(alpha=1.0),
    D3(),
    D3(alpha=0.9, core=2),
    D3(alpha=0.8, start=3, order="leave_one_out", core=3, rounding="ceil"),
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
    PromptLookup(min_ngram=1),
    PromptLookup(max_ngram=2, min_ngram=1, length=3, inner=D3(alpha=0.9, core=2)),
    ADED(),
    ADED(search="mcts", depth=3, iterations=20, inner=D3(alpha=0.9, core=2)),
    DraftModel(draft_of("llama")),
    DraftModel(draft_of("llama"), branching=(2, 2), rule="rejection"),
    DraftModel(draft_of("hybrid"), length=3, inner=D3(alpha=0.9, core=2)),
    D3Spec(mean=0.8, core=2),
    D3Spec(alpha=0.9, inner=D3(alpha=0.9, core=2)),
    Eagle(eagle_part("llama"), stop=0.0),
    Eagle(drafter("eagle3"), stop=0.0),
    Mtp(stop=0.0),
    Eagle(eagle_part("llama"), width=2, nodes=5, inner=D3(alpha=0.9, core=2)),
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
)

if find_spec("shoal_lab"):
    from lab_matrix import (
        COUNTING_OF_LAB,
        LAB,
        LAGGING,
        MASKED,
        SEARCHES,
        SELF_DRAFTING,
        SPEAKING,
        drafting_of_lab,
        switching_of_lab,
    )
else:
    LAB = MASKED = LAGGING = SEARCHES = SPEAKING = COUNTING_OF_LAB = ()
    SELF_DRAFTING = {}

    def drafting_of_lab(draft: Any) -> dict[str, Method]:
        return {}

    def switching_of_lab(draft: Any) -> list[Method]:
        return []

MATRIX: tuple[Method, ...] = CORE + LAB

COUNTING: tuple[Method, ...] = (*(method for method in CORE if method.name == "snapkv"), *COUNTING_OF_LAB)
"""Those that go by what each forward shows of one token, or by how many tokens of a text are stored."""
