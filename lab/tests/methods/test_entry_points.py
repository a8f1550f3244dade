"""The lab's methods are found by name through entry points, and survive a round trip through JSON."""

from __future__ import annotations

import inspect
import json
import math
from pathlib import Path

import pytest

from shoal.methods import get, make, names
from shoal.methods.base import Method
from shoal.methods.d3 import D3
from shoal_lab.methods.adablock import AdaBlock
from shoal_lab.methods.deer import DEER
from shoal_lab.methods.del_ import DEL
from shoal_lab.methods.diffusion import Diffusion
from shoal_lab.methods.diffusion_grammar import DiffusionGrammar
from shoal_lab.methods.draft_and_verify import DraftAndVerify
from shoal_lab.methods.fast_dllm import FastDLLM
from shoal_lab.methods.layerskip import LayerSkip
from shoal_lab.methods.mirror_sd import MirrorSD
from shoal_lab.methods.prophet import Prophet
from shoal_lab.methods.rapid import Rapid
from shoal_lab.methods.rsd import RSD
from shoal_lab.methods.skipdecode import SkipDecode
from shoal_lab.methods.swift import Swift
from shoal_lab.methods.vocabtrim import VocabTrim

CONFIGURED = [
    SkipDecode(maximum=22, minimum=0.3, warm_up=2, horizon=50),
    VocabTrim("some/model", tokens=(3, 5, 1), keep=2),
    RSD("some/model", beam=2, inner=D3(alpha=0.9)),
    MirrorSD("some/model", exit_layer=3, k=0, length=2, inner=D3(alpha=0.9)),
    Rapid("some/model", context=600, eta=5.0),
    DEER("some/model", length=32, rule="rejection"),
    LayerSkip(3, 5, stop=0.4, rule="rejection"),
    DraftAndVerify((3, 5), (4,), accepted=0.8),
    Swift(ratio=0.3, trees=False),
    DEL((2, 4, 8), 9, head=0.0),
    Diffusion(8, steps=4, remasking="entropy", guidance=0.5),
    FastDLLM(factor=1.5, reuse="dual"),
    DiffusionGrammar(rules='a ::= "b" | "c" a'),
    Prophet(gaps=(math.inf, 5.0, 2), region=(3, 5)),
    AdaBlock(delimiters=("\n", 7), delimiter_threshold=2),
]


def test_the_names_are_those_of_the_files() -> None:
    folder = Path(inspect.getfile(LayerSkip)).parent
    files = {file.stem.removesuffix("_") for file in folder.glob("[a-z]*.py")}
    assert files <= set(names())
    for name in files:
        assert get(name).name == name == Path(inspect.getfile(get(name))).stem.removesuffix("_")


@pytest.mark.parametrize("method", CONFIGURED)
def test_a_method_survives_json(method: Method) -> None:
    spec = json.loads(json.dumps(method.to_dict(), allow_nan=False))
    assert spec == method.to_dict()
    again = make(spec)
    assert again == method and repr(again) == repr(method)
