from __future__ import annotations

import importlib.metadata
import inspect
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

import shoal
import shoal.methods
from shoal.decode.recipe import Recipe
from shoal.depth.plan import DepthPlan
from shoal.integrations import transformers
from shoal.methods import get, make, names
from shoal.methods.aded import ADED
from shoal.methods.auto import Auto
from shoal.methods.base import Method
from shoal.methods.calibrated import Calibrated
from shoal.methods.d3 import D3
from shoal.methods.d3_spec import D3Spec
from shoal.methods.draft_model import DraftModel
from shoal.methods.early_exit import EarlyExit
from shoal.methods.full import Full
from shoal.methods.prompt_lookup import PromptLookup
from shoal.methods.schedule import Schedule
from shoal.methods.shortgpt import ShortGPT
from shoal.methods.unified_layer_skipping import UnifiedLayerSkipping
from shoal.types import ModelInfo

SHIPPED = {
    "full": Full,
    "auto": Auto,
    "d3": D3,
    "unified_layer_skipping": UnifiedLayerSkipping,
    "early_exit": EarlyExit,
    "shortgpt": ShortGPT,
    "schedule": Schedule,
    "calibrated": Calibrated,
    "prompt_lookup": PromptLookup,
    "draft_model": DraftModel,
    "aded": ADED,
    "d3_spec": D3Spec,
}
CONFIGURED = [
    Full(),
    Auto(7),
    D3(),
    D3(alpha=0.98, start=1, order=(3, 2, 4), core=5, horizon=9, rounding="ceil"),
    D3(start=1.0, mean=0.7),
    UnifiedLayerSkipping(2),
    EarlyExit(7),
    ShortGPT(3),
    Schedule((3, 2), (4, 9)),
    Calibrated(Schedule((3, 2), (4, 9)), fingerprint="0123456789abcdef"),
    PromptLookup(5, 1, 7, inner=D3(alpha=0.9), rule="lenient", margin=0.5),
    D3Spec(rule="lenient", margin=math.inf),
    ADED("some/text.txt", search="mcts", step=0.04, nodes=64),
    DraftModel("some/model", branching=(2, 2), rule="rejection"),
    D3Spec(mean=0.4, order=(3, 2, 4), core=5, length=6, inner=D3(alpha=0.9)),
]


@dataclass(frozen=True)
class Twice(Method):
    """A method that wraps another one, as a package from outside might define it."""

    name: ClassVar[str] = "twice"

    inner: Method
    often: int = 2

    def recipe(self, info: ModelInfo) -> Recipe:
        return self.inner.recipe(info)


class FakeEntry:
    name = "twice"

    def load(self) -> type[Method]:
        return Twice


@pytest.fixture
def from_outside(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def entry_points(*, group: str) -> list[FakeEntry]:
        return [FakeEntry()] if group == "shoal.methods" else []

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
    shoal.methods._entries.cache_clear()
    yield
    shoal.methods._entries.cache_clear()


def test_the_names_are_the_files_and_lead_to_the_classes() -> None:
    assert set(SHIPPED) <= set(names())
    for name, cls in SHIPPED.items():
        assert get(name) is cls
        assert cls.name == name == Path(inspect.getfile(cls)).stem.removesuffix("_")


def test_every_shipped_method_has_a_summary_and_a_name_of_its_own() -> None:
    for name in names():
        assert get(name).name == name
        assert inspect.getdoc(get(name)) != inspect.getdoc(Method)


def test_the_registry_imports_no_method_and_no_torch() -> None:
    code = (
        "import sys, shoal.methods as m; m.names(); loaded = set(sys.modules);"
        "assert not [n for n in loaded if n.startswith('shoal.methods.') and n[14:].rstrip('_') in m.names()], loaded;"
        "[m.get(n) for n in m.names()];"
        "print('torch' in sys.modules, 'numpy' in sys.modules, 'transformers' in sys.modules)"
    )
    source = str(Path(shoal.methods.__file__).parents[2])
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": source}
    )
    assert out.stdout.split() == ["False", "False", "False"]


@pytest.mark.parametrize("method", CONFIGURED)
def test_a_method_survives_json(method: Method) -> None:
    spec = json.loads(json.dumps(method.to_dict(), allow_nan=False))
    assert spec == method.to_dict()
    again = make(spec)
    assert again == method and repr(again) == repr(method)
    assert make(method) is method


def test_a_name_makes_the_defaults() -> None:
    assert make("d3") == D3()
    assert make({"method": "d3"}) == make({"method": "d3", "method_args": None}) == D3()
    assert make({"method": "d3", "method_args": {"alpha": 1, "order": [2, 3]}}) == D3(alpha=1, order=(2, 3))


def test_a_card_may_hold_other_things(tmp_path: Path) -> None:
    spec = {"method": "d3", "method_args": {"alpha": 0.97}}
    flat, nested = tmp_path / "flat.json", tmp_path / "nested.json"
    flat.write_text(json.dumps({**spec, "device": "cpu"}))
    nested.write_text(json.dumps({"method": spec, "device": "cpu"}))
    assert make(flat) == make(str(flat)) == make(nested) == D3(alpha=0.97)


@pytest.mark.parametrize(
    ("content", "words"), [(None, "cannot be read"), ("{", "cannot be read"), ("{}", "no key"), ("[1]", "no key")]
)
def test_a_card_that_cannot_be_used(tmp_path: Path, content: str | None, words: str) -> None:
    path = tmp_path / "card.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=words):
        make(str(path))


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("d33", r"unknown method 'd33'\. Did you mean 'd3'\?.*shortgpt"),
        ("D3", r"Did you mean 'd3'\?"),
        ("early-exit", r"Did you mean 'early_exit'\?"),
        ("base", "unknown method 'base'"),
        ("tidal+auto", r"unknown method .tidal\+auto.: \+ joins .*--method tidal --with auto"),
        ({"method": "d3", "method_args": {"alhpa": 0.9}}, r"option of d3 'alhpa'\. Did you mean 'alpha'\?.*horizon"),
        ({"method": "full", "method_args": {"alpha": 0.9}}, r"option of full 'alpha'.*Known: none"),
        ({"method": "d3", "alpha": 0.9}, r"key of a method 'alpha'.*method_args"),
        ({"method": "d3", "method_args": [1]}, "must be a mapping"),
        ({"method": "d3", "method_args": {"alpha": 2}}, "alpha is 2"),
        ({"method": "d3", "inner": "full"}, "option of d3 'inner'"),
        ({"method_args": {}}, "a name under 'method'"),
        ({"method": 3}, "a name under 'method'"),
        (3, "got 3"),
        (None, "got None"),
    ],
)
def test_specs_that_are_refused(spec: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make(spec)  # type: ignore[arg-type]


@pytest.mark.usefixtures("from_outside")
def test_methods_from_outside_join_through_the_entry_point() -> None:
    assert "twice" in names()
    assert get("twice") is Twice
    with pytest.raises(ValueError, match="twice"):
        make("nothing_like_it")


@pytest.mark.usefixtures("from_outside")
def test_a_wrapped_method_sits_under_inner() -> None:
    method = Twice(Twice(D3(alpha=0.9), often=3))
    spec = json.loads(json.dumps(method.to_dict()))
    assert spec["inner"]["inner"] == D3(alpha=0.9).to_dict()
    assert spec["method_args"] == {"often": 2}
    assert make(spec) == method
    assert make({"method": "twice", "method_args": {"inner": {"method": "full"}}}) == Twice(Full())
    with pytest.raises(ValueError, match="inner of twice is 5"):
        Twice(5)  # type: ignore[arg-type]


def test_methods_are_frozen_and_hashable() -> None:
    assert len({D3(alpha=0.9, order=[2, 3]), D3(alpha=0.9, order=(2, 3)), Full()}) == 2  # type: ignore[arg-type]
    with pytest.raises(AttributeError):
        D3().alpha = 0.5  # type: ignore[misc]


def test_a_method_is_the_callable_that_generate_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    monkeypatch.setattr(transformers, "run_custom_generate",
                        lambda *args, **kwargs: seen.append((args, kwargs)) or "ids")
    method = D3(alpha=0.9)
    assert method("model", "input", "processors", "criteria", generation_config="config", use_cache=True) == "ids"
    keywords = {
        "logits_processor": "processors",
        "stopping_criteria": "criteria",
        "generation_config": "config",
        "use_cache": True,
    }
    assert seen == [((method, "model", "input"), keywords)]
    carried = transformers.BoundMethod(method, 1, 2, ("end",))
    assert method.bind(streamer=1, tokenizer=2, stop_strings="end") == carried
    assert method.bind(streamer=1, tokenizer=2, stop_strings=["end"]) == carried
    assert list(inspect.signature(method).parameters) == [
        "model", "input_ids", "logits_processor", "stopping_criteria", "generation_config", "model_kwargs"
    ]


def test_a_recipe_from_outside_runs_its_inner_plan() -> None:
    assert Twice(Full()).recipe(ModelInfo(6)).plan == DepthPlan.full(6)
