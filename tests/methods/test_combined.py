"""Several methods at once: which combine, what their recipe is, and that it decodes as its components say."""

from __future__ import annotations

import functools
import itertools
import json
import pickle
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from families import tiny
from method_matrix import MATRIX
from shoal import methods
from shoal.cli.methods import NOMINAL
from shoal.decode.recipe import PARTS, Recipe
from shoal.depth.plan import DepthPlan
from shoal.engine.cards.card import Card
from shoal.engine.engine import Engine
from shoal.engine.loading.load import engine_for
from shoal.engine.scheduling.batching import Recipes
from shoal.methods import make
from shoal.methods.aded import ADED
from shoal.methods.auto import Auto
from shoal.methods.base import Method
from shoal.methods.calibrated import Calibrated
from shoal.methods.common.combined import FAMILIES, QUESTIONS, Combined, family_of
from shoal.methods.common.drafting import DraftingMethod
from shoal.methods.d3 import D3
from shoal.methods.d3_spec import D3Spec
from shoal.methods.draft_model import DraftModel
from shoal.methods.early_exit import EarlyExit
from shoal.methods.full import Full
from shoal.methods.kv_int8 import KVInt8
from shoal.methods.prompt_lookup import PromptLookup
from shoal.methods.schedule import Schedule
from shoal.methods.streaming_llm import StreamingLLM
from shoal.methods.topk_oracle import TopKOracle
from shoal.types import ModelInfo

SHALLOW = D3(alpha=0.9, core=2)
PROMPTS = [[5, 17, 80, 3, 41, 5, 17, 80], [60, 2, 33, 9, 71, 12, 28, 90, 14], [8]]
NEW = 12
INFO = ModelInfo(6)
SENTINELS = {"keep": StreamingLLM().recipe(INFO).keep, "store": KVInt8().recipe(INFO).store,
             "select": TopKOracle(k=3).recipe(INFO).select}


@dataclass(frozen=True)
class Filling(Method):
    """A method that fills the components that it is told to."""

    name: ClassVar[str] = "filling"

    components: tuple[str, ...]

    def recipe(self, info: ModelInfo) -> Recipe:
        return replace(Recipe(DepthPlan.full(info.num_layers)), **{part: SENTINELS[part] for part in self.components})


@dataclass(frozen=True)
class Telling(Full):
    """A method that has something to say, and wants a card."""

    name: ClassVar[str] = "telling"
    words: str = "beware"

    def notice(self, info: ModelInfo) -> str | None:
        return self.words

    @property
    def wants_card(self) -> bool:
        return True


def default(name: str) -> Method:
    given: dict[str, dict[str, Any]] = {
        "schedule": {"order": (3, 2), "steps": (2, 5)}, "calibrated": {"inner": Schedule((3, 2), (2, 5))},
        "double_sparsity": {"channels": (((0, 1),),) * NOMINAL.num_layers},
    }  # fmt: skip
    return methods.get(name)(**given.get(name, {}))


@functools.cache
def engine() -> Engine:
    scores = {"influence": (9.0, 0.3, 0.1, 0.2, 0.4, 8.0), "leave_one_out": (9.0, 0.4, 0.3, 0.1, 0.2, 8.0)}
    return engine_for(tiny("llama"), card=Card(scores), backend="hf")


def tokens(method: Any, **options: Any) -> list[tuple[int, ...]]:
    return [result.tokens for result in engine().generate(PROMPTS, method=method, max_new_tokens=NEW, **options)]


@pytest.mark.parametrize("first, second", [*itertools.combinations(methods.names(), 2)])
def test_every_pair_combines_or_is_refused_naming_the_part(first: str, second: str) -> None:
    both = [default(first), default(second)]
    recipes = [method.recipe(NOMINAL) for method in both]
    parts = [recipe.components for recipe in recipes]
    shared = [part for part in parts[1] if part in parts[0]]
    excluded = [part for one, other in (recipes, recipes[::-1]) for part in one.components if part in other.excludes]
    if excluded:
        with pytest.raises(ValueError, match=f"has a loop of its own, without a place for the part {excluded[0]!r}"):
            make(both).recipe(NOMINAL)
        return
    if not shared and any(one.loop and not other.settled for one, other in (recipes, recipes[::-1])):
        with pytest.raises(ValueError, match="choice of layers by the prompt' beside a loop of its own"):
            make(both).recipe(NOMINAL)
        return
    if "tidal" in (first, second) and any(recipe.keep and recipe.keep.differs for recipe in recipes):
        with pytest.raises(ValueError, match="layers that share a choice of slots"):
            make(both).recipe(NOMINAL)
        return
    if not shared:
        assert set(make(both).recipe(NOMINAL).components) == {*parts[0], *parts[1]}
        return
    with pytest.raises(ValueError, match=f"{first} and {second} both fill the part {shared[0]!r}.*leave {first} or"):
        make(both).recipe(NOMINAL)


def test_each_part_comes_from_who_fills_it() -> None:
    drafter = DraftModel("some/model", branching=(2, 2), rule="rejection", control="width")
    several = make([D3(alpha=0.98, horizon=64), Filling(("keep", "select")), drafter])
    recipe, alone = several.recipe(NOMINAL), drafter.recipe(NOMINAL)
    assert recipe.components == ("plan", "proposer", "rule", "keep", "select")
    assert (recipe.plan, recipe.horizon) == (D3(alpha=0.98, horizon=64).recipe(NOMINAL).plan, 64)
    assert (recipe.proposer, recipe.rule) == (alone.proposer, alone.rule)
    assert recipe.keep is SENTINELS["keep"] and recipe.select is SENTINELS["select"] and recipe.store is None
    assert recipe.exact_to == "none" and not recipe.self_metered
    assert make([SHALLOW, PromptLookup()]).recipe(NOMINAL).exact_to == "plan"
    assert make([Auto(), Filling(("store",))]).recipe(replace(NOMINAL, memory={})).self_metered


@pytest.mark.parametrize("part", SENTINELS)
def test_two_that_fill_one_part_of_several_are_refused(part: str) -> None:
    class Other(Filling):
        name = "other"

    with pytest.raises(ValueError, match=f"filling and other both fill the part '{part}'.*{QUESTIONS[part]}"):
        make(["d3", Filling(tuple(SENTINELS)), Other((part,))]).recipe(NOMINAL)


def test_the_order_of_a_list_changes_no_part() -> None:
    members = [SHALLOW, PromptLookup(control="goodput"), Filling(("keep",))]
    recipes = [make(order).recipe(NOMINAL) for order in itertools.permutations(members)]
    assert all(recipe == recipes[0] for recipe in recipes)


def test_what_members_say_is_said() -> None:
    several = make([Telling(), SHALLOW])
    assert several.notice(NOMINAL) == "beware" and several.wants_card
    assert make([D3Spec(order="low_first"), D3(alpha=0.9, order="low_first")]).notice(ModelInfo(32)) is None
    assert not make([D3(alpha=0.9, order="center_out"), PromptLookup()]).wants_card


def test_what_a_member_learns_is_kept_apart_from_what_it_learns_alone() -> None:
    info = replace(NOMINAL, memory={})
    alone, both = Auto().recipe(info).proposer, make([SHALLOW, Auto()]).recipe(info).proposer
    assert alone is not both
    assert Auto().recipe(info).proposer is alone and make([SHALLOW, Auto()]).recipe(info).proposer is both


SPECS: list[list[Any]] = [
    ["full", "d3"],
    ["d3", {"method": "prompt_lookup", "method_args": {"length": 3}}],
    [SHALLOW, PromptLookup(rule="lenient", margin=0.5), Full()],
    [Calibrated(Schedule((3, 2), (2, 5)), "0123456789abcdef"), ADED("text.txt")],
]


@pytest.mark.parametrize("specs", SPECS, ids=str)
def test_a_combination_survives_json(specs: list[Any]) -> None:
    several = make(specs)
    assert isinstance(several, Combined)
    spec = json.loads(json.dumps(several.to_dict(), allow_nan=False))
    assert spec == several.to_dict() == {"method": [make(one).to_dict() for one in specs]}
    forms = [spec, spec["method"], {**spec, "method_args": {}}, tuple(specs), [several], [[specs[0]], *specs[1:]]]
    for form in forms:
        assert make(form) == several
    assert make(several) is several
    assert len({several, make(spec)}) == 1 and pickle.loads(pickle.dumps(several)).name == several.name
    assert several.name == "+".join(make(one).name for one in specs)


def test_a_list_may_be_inner_and_stand_in_a_card(tmp_path: Path) -> None:
    path = tmp_path / "card.json"
    path.write_text(json.dumps({**make(SPECS[1]).to_dict(), "device": "cpu"}))
    assert make(path) == make([str(path)]) == make(SPECS[1])
    assert make([str(path), "full"]) == make([*SPECS[1], "full"])
    wrapped = make({"method": "prompt_lookup", "inner": ["full", "d3"]})
    assert wrapped == PromptLookup(inner=make(["full", "d3"])) and make(wrapped.to_dict()) == wrapped


def test_a_list_of_one_is_that_method() -> None:
    assert make([SHALLOW]) is SHALLOW and make({"method": ["d3"]}) == D3()


@pytest.mark.parametrize(
    "spec, words",
    [
        ([], "list of methods is empty.*'full'"),
        ({"method": []}, "list of methods is empty"),
        (["d3", D3(alpha=0.9)], "has d3 twice"),
        (["d3", "d4"], "unknown method 'd4'"),
        (["d3", 4], "got 4"),
        ({"method": ["d3", "full"], "method_args": {"alpha": 0.9}}, "method_args is .* beside a list"),
        ({"method": ["d3", "full"], "inner": "full"}, "inner is 'full' beside a list"),
        ("combined", "unknown method 'combined'"),
    ],
)
def test_lists_that_are_refused(spec: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make(spec)


def test_members_are_two_or_more() -> None:
    with pytest.raises(ValueError, match="must hold two methods"):
        Combined((Full(),))
    with pytest.raises(ValueError, match="members of combined"):
        Combined(("d3", "full"))  # type: ignore[arg-type]


def test_every_part_has_a_question_and_a_family() -> None:
    assert set(PARTS) <= set(QUESTIONS)
    assert sorted(QUESTIONS) == sorted(part for parts in FAMILIES.values() for part in parts)


def test_a_family_follows_from_the_parts_or_from_the_class() -> None:
    class Misread(Filling):
        family = "depth"

    assert family_of(Full, ()) == "baseline"
    assert family_of(D3, ("plan",)) == "depth"
    assert family_of(DraftModel, ("plan", "proposer", "rule")) == "drafting"
    assert [family_of(Filling, (part,)) for part in SENTINELS] == ["KV eviction", "KV compression", "sparse attention"]
    assert family_of(Misread, ("keep",)) == "depth"


@pytest.mark.parametrize("method", MATRIX, ids=repr)
def test_what_a_class_says_it_fills_is_what_it_fills(method: Method) -> None:
    parts = method.recipe(engine().info(NEW)).components
    assert not method.fills or parts in ((), method.fills)


@pytest.mark.parametrize(
    "method", [one for one in MATRIX if isinstance(one, DraftingMethod) and one.inner is not None], ids=repr
)
def test_a_drafting_method_in_a_list_has_the_recipe_that_inner_gives(method: DraftingMethod) -> None:
    info = engine().info(NEW)
    assert method.inner is not None
    within, united = method.recipe(info), make([method.inner, replace(method, inner=None)]).recipe(info)
    for field in fields(Recipe):
        if field.name != "proposer":  # some hold the method itself, and so its inner
            assert getattr(united, field.name) == getattr(within, field.name), field.name
    assert type(united.proposer) is type(within.proposer)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "seed": 7}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("drafter", [PromptLookup(min_ngram=1), D3Spec(alpha=0.9)], ids=["prompt_lookup", "d3_spec"])
def test_a_list_decodes_what_inner_decodes(drafter: DraftingMethod, options: dict[str, Any]) -> None:
    expected = tokens(replace(drafter, inner=SHALLOW), **options)
    assert tokens([SHALLOW, drafter], **options) == expected
    assert tokens([drafter, SHALLOW.to_dict()], **options) == expected
    assert tokens(drafter, **options) != expected


def test_a_lossless_combination_gives_the_plain_tokens() -> None:
    several = make([D3(alpha=1.0), PromptLookup(min_ngram=1)])
    assert several.recipe(engine().info(NEW)).exact_to == "full"
    assert tokens(several) == tokens(["full", "aded"]) == tokens("full")
    assert tokens([SHALLOW, "full"]) == tokens(SHALLOW) != tokens("full")


def test_streams_and_sessions_take_a_list_and_requests_share_its_recipe() -> None:
    several = [SHALLOW, "prompt_lookup"]
    (expected,) = {tuple(step.token for step in engine().stream(PROMPTS[0], method=one, max_new_tokens=NEW))
                   for one in (several, SHALLOW)}  # fmt: skip
    assert expected == tokens(several)[0]
    assert engine().generate(PROMPTS[0], method=several, max_new_tokens=NEW).stats is not None
    recipes = Recipes(engine())
    assert recipes.of(several, NEW) is recipes.of({"method": several}, NEW)
    with pytest.raises(ValueError, match="d3 and early_exit both fill the part 'plan'"):
        engine().generate(PROMPTS[0], method=[D3(), EarlyExit(2)], max_new_tokens=NEW)
