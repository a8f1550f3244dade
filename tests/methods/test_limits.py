"""What a request may set a method's numbers to: every one has a bound, and nothing beyond it gets through."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, get_args, get_origin, get_type_hints

import pytest

from shoal import methods
from shoal.methods import make
from shoal.methods.base import WRAPPED, Method
from shoal.methods.common import limits
from shoal.methods.common.limits import UNDECLARED, Most, beyond, limits_of
from shoal.methods.prompt_lookup import Index
from shoal.serve import policy
from shoal.serve.errors import ApiError
from shoal.serve.settings import Settings

ALL = Settings(methods=frozenset(methods.names()))
NUMBERS = [(name, field.name) for name in methods.names() for field in fields(methods.get(name))
           if field.name not in WRAPPED]


def has_number(hint: Any) -> bool:
    return hint in (int, float) or (get_origin(hint) is not Callable and any(map(has_number, get_args(hint))))


def has_list(hint: Any) -> bool:
    return get_origin(hint) is tuple or any(map(has_list, get_args(hint)))


def refusal(method: Any, args: dict[str, Any], settings: Settings = ALL) -> str:
    with pytest.raises(ApiError) as error:
        policy.choose(method, args, settings)
    assert error.value.status == 400
    return error.value.message


def test_every_number_of_every_method_has_a_bound_of_its_own() -> None:
    for name in methods.names():
        hints, limits = get_type_hints(methods.get(name)), limits_of(methods.get(name))
        numbers = {field.name for field in fields(methods.get(name)) if has_number(hints[field.name])}
        assert numbers <= limits.keys(), name
        assert all(limits[option] is not UNDECLARED for option in numbers), name


@pytest.mark.parametrize(("name", "option"), NUMBERS)
def test_nothing_beyond_a_bound_gets_through_however_it_is_written(name: str, option: str) -> None:
    hint, limit = get_type_hints(methods.get(name))[option], limits_of(methods.get(name)).get(option, Most(0))
    huge: list[Any] = ["x" * 100_000]
    if has_number(hint):
        huge += [10**400, -(10**400), [10**400], [[-(10**30)]]]
        huge += [sign * limit.value * 1.01 for sign in (1, -1) if math.isfinite(limit.value)]
    if has_list(hint):
        huge.append([1] * (limit.items + 1))
    for value in huge:
        for method, args in (
            (name, {option: value}),
            ([{"method": name, "method_args": {option: value}}], {}),
            (["full", {"method": name, "method_args": {option: value}}], {}),
            ("prompt_lookup", {"inner": {"method": name, "method_args": {option: value}}}),
            ("prompt_lookup", {"inner": {"method": [{"method": name, "method_args": {option: value}}]}}),
            ([{"method": "aded", "inner": {"method": name, "method_args": {option: value}}}], {}),
        ):
            assert refusal(method, args)


def test_the_bound_and_the_remedy_are_named() -> None:
    assert refusal("prompt_lookup", {"max_ngram": 10**9}) == (
        "max_ngram of prompt_lookup is 1000000000; 16 is the most from a request. The operator may allow more with "
        "--method-limit prompt_lookup.max_ngram=N")
    assert "is a list of 17; 16 entries" in refusal("draft_model", {"branching": [1] * 17})
    assert "a text of 5000 characters" in refusal("d3", {"order": "x" * 5000})
    assert "is more than 18446744073709551616; 1048576 is" in refusal("tidal", {"k": 10**5000})


def test_the_operator_allows_more() -> None:
    more = Settings(limits={"aded.iterations": 5000, "d3.horizon": 100})
    assert policy.choose("aded", {"iterations": 5000}, more) == make({"method": "aded",
                                                                      "method_args": {"iterations": 5000}})
    assert "5000 is the most" in refusal("aded", {"iterations": 5001}, more)
    assert policy.choose("d3", {"alpha": 0.9}, more)
    policy.check_limits(more.limits)
    for place in ("aded.nothing", "nothing.k", "aded", "aded.search", ""):
        with pytest.raises(ValueError, match="no method has such an option"):
            policy.check_limits({place: 3})
    with pytest.raises(ValueError, match="must be 0 or more"):
        policy.check_limits({"aded.nodes": math.nan})


def test_defaults_are_within_their_bounds() -> None:
    for name in methods.names():
        limits = limits_of(methods.get(name))
        for field in fields(methods.get(name)):
            if field.name in limits:
                assert beyond(field.default, limits[field.name]) is None, (name, field.name)


def test_methods_do_not_lie_within_each_other_without_end() -> None:
    inner: Any = "full"
    for _ in range(300):
        inner = {"method": "prompt_lookup", "method_args": {"inner": inner}}
    assert "nested in each other" in refusal([inner], {})
    lists: Any = "full"
    for _ in range(300):
        lists = [lists]
    assert "nested in each other" in refusal(lists, {})
    assert "more than 16 methods" in refusal(["full"] * 17, {})


def test_a_foreign_method_that_declares_nothing_is_bound_all_the_same() -> None:
    @dataclass(frozen=True)
    class Foreign(Method):
        name: ClassVar[str] = "foreign"
        k: int = 3
        spread: tuple[float, ...] = ()
        word: str = ""
        held: int | str = 0

        def recipe(self, info: Any) -> Any:
            raise NotImplementedError

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "Foreign", Foreign)
        assert limits_of(Foreign) == dict.fromkeys(("k", "spread", "held"), UNDECLARED)
    assert beyond(1025, UNDECLARED) and not beyond(1024, UNDECLARED) and not beyond(True, UNDECLARED)
    assert beyond([[1, 2000.5]], UNDECLARED) and beyond(math.inf, UNDECLARED) and beyond(math.nan, UNDECLARED)
    assert not beyond(math.inf, Most(math.inf)) and beyond("x" * (limits.LONGEST_TEXT + 1), Most(math.inf))


def test_an_index_of_ngrams_costs_what_the_text_has() -> None:
    """Whoever asks from Python for n-grams longer than any text gets those that there are."""
    index, text = Index(10**12, 1), [1, 2, 3, 1, 2]
    assert index.find(text) == 2 and index.find([*text, 3]) == 3
