from __future__ import annotations

import argparse
import dataclasses
import json
import re
from importlib import import_module
from typing import ClassVar, Literal, get_type_hints

import pytest

from shoal.cli.entry import COMMANDS
from shoal.cli.options import common
from shoal.cli.options import parser as options
from shoal.cli.options.parser import Parser, parse
from shoal.decode.recipe import Recipe
from shoal.depth.plan import DepthPlan
from shoal.methods import get as method_class
from shoal.methods import make, names
from shoal.methods.base import Method
from shoal.methods.calibrated import Calibrated
from shoal.methods.d3 import D3
from shoal.methods.double_sparsity import DoubleSparsity
from shoal.methods.early_exit import EarlyExit
from shoal.methods.options import describe, fits
from shoal.methods.prompt_lookup import PromptLookup
from shoal.methods.tidal import Tidal
from shoal.types import ModelInfo

WITHOUT_A_METHOD = {
    "methods", "bench-drafts", "calibrate", "completion", "recommend", "env", "models", "prune", "pull", "rm",
    "train",
}
NEEDED = {"batch": ["in.jsonl", "out.jsonl"], "run": ["name"], "transcribe": ["talk.wav"]}


@dataclasses.dataclass(frozen=True)
class Odd(Method):
    """A method with every kind of option.

    Attributes:
        size: how many,
            100 % of them.
        json: collides with a common option.
    """

    name: ClassVar[str] = "odd"

    size: int
    json: float | None = 0.5
    flag: bool = False
    kind: Literal["a", "b"] = "a"
    inner: Method | None = None

    def recipe(self, info: ModelInfo) -> Recipe:
        return Recipe(DepthPlan.full(info.num_layers))


@pytest.fixture
def odd(monkeypatch):
    real = options.methods.get
    monkeypatch.setattr(options.methods, "get", lambda name: Odd if name == "odd" else real(name))


def parsed(*words: str) -> argparse.Namespace:
    parser = Parser(prog="test")
    common.add_method(parser)
    common.add_json(parser)
    return parse(parser, words)


def test_methods_are_added_with_their_options(tmp_path):
    card = tmp_path / "card.json"
    card.write_text(json.dumps({"method": "d3", "method_args": {"alpha": 0.9}}))
    drafter = PromptLookup(length=3, min_ngram=1)
    assert parsed("--method", "full", "--with", "prompt_lookup:length=3:min_ngram=1").method == make(["full", drafter])
    several = parsed("--with", str(card), "--with", "prompt_lookup").method
    assert several == make(["full", D3(alpha=0.9), PromptLookup()])
    assert parsed("--method", "d3", "--alpha", "0.9").method == D3(alpha=0.9)
    card.write_text(json.dumps(make(["d3", drafter]).to_dict()))
    assert parsed("--method", str(card), "--with", "full").method == make(["d3", drafter, "full"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--with", "early-exit"], r"--with: unknown method 'early-exit'\. Did you mean 'early_exit'"),
        (["--with", "d3:alhpa=1"], "--with: method d3 has no option --alhpa. Did you mean --alpha"),
        (["--with", "d3:alpha=2"], "--with: alpha is 2"),
        (["--with", "full"], "has full twice"),
    ],
)
def test_methods_that_cannot_be_added(words, message):
    with pytest.raises(ValueError, match=message):
        parsed(*words)


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in WITHOUT_A_METHOD])
def test_every_command_that_takes_a_method_takes_several(name):
    command = import_module(f"shoal.cli.{name.replace('-', '_')}")
    parser = Parser(prog=name)
    command.add_arguments(parser)
    args = parse(parser, [*NEEDED.get(name, ()), "--method", "d3", "--with", "prompt_lookup"])
    assert args.method == make(["d3", "prompt_lookup"])


@pytest.mark.parametrize(
    ("hint", "text", "value"),
    [
        (int, "3", 3),
        (float, "3", 3.0),
        (float | int, "1", 1),
        (float | int, "1.0", 1.0),
        (float | None, "none", None),
        (str | tuple[int, ...], "3,4,5", (3, 4, 5)),
        (str | tuple[int, ...], "[3, 4]", (3, 4)),
        (str | tuple[int, ...], "center_out", "center_out"),
        (tuple[float, ...], "0.5,2", (0.5, 2.0)),
        (bool, "true", True),
        (bool, "No", False),
        (Literal["a", 7], "7", 7),
        (int | None, "None", None),
        (dict, '{"a": 1}', {"a": 1}),
    ],
)
def test_conversion(hint, text, value):
    found = options.converter(hint)(text)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(("hint", "text"), [(int, "1.5"), (float | None, "x"), (bool, "2"), (Literal["a"], "b"),
                                            (tuple[int, ...], "1,x"), (dict, "{")])
def test_conversion_refuses(hint, text):
    with pytest.raises(argparse.ArgumentTypeError, match="is not"):
        options.converter(hint)(text)


def test_what_does_not_fit_is_answered_in_words_and_with_an_example():
    """Of every option of every method, typed and in JSON, no name of a Python type; and what is shown is taken."""
    for name in names():
        hints = get_type_hints(method_class(name))
        for hint in (hints[option] for option in method_class(name).option_names()):
            for words in (describe(hint), describe(hint, typed=True)):
                assert not re.search(r"\b(int|float|str|bool|tuple|NoneType|[Cc]allable|A,B)\b|\.\.\.", words), words
            typed = re.findall(r"such as (\S+)", describe(hint, typed=True).replace(", ", ","))
            assert all(fits(options.converter(hint)(text), hint) for text in typed), hint


def test_fields_become_options():
    words = ["--alpha", ".9", "--start", "3", "--rounding", "ceil", "--order", "low_first"]
    assert parsed("--method", "d3", *words).method == D3(alpha=0.9, start=3, rounding="ceil", order="low_first")


def test_the_default_method_needs_no_words():
    assert parsed().method.name == "full"


def test_a_card_gives_the_method_and_options_override_it(tmp_path):
    card = tmp_path / "card.json"
    card.write_text(json.dumps({"method": "d3", "method_args": {"alpha": 0.9, "start": 0.25}}))
    assert parsed("--method", str(card)).method == D3(alpha=0.9, start=0.25)
    assert parsed("--method", str(card), "--alpha", "0.8").method == D3(alpha=0.8, start=0.25)


def test_a_calibrated_cards_method_keeps_its_options_and_its_model(tmp_path):
    card = tmp_path / "card.json"
    card.write_text(json.dumps(Calibrated(Tidal(k=256, reselect=8), "m-1").to_dict()))
    assert parsed("--method", str(card), "--k", "64").method == Calibrated(Tidal(k=64, reselect=8), "m-1")
    assert common.method_from(f"{card}:k=64") == Calibrated(Tidal(k=64, reselect=8), "m-1")
    with pytest.raises(ValueError, match="no option --fingerprint"):
        parsed("--method", str(card), "--fingerprint", "m-2")


def test_a_card_s_long_tables_are_not_shown_as_defaults(tmp_path):
    card = tmp_path / "card.json"
    card.write_text(json.dumps(DoubleSparsity((((*range(64),),) * 2,) * 6, k=77).to_dict()))
    parser = Parser(prog="test")
    common.add_method(parser)
    options.Choice.of(str(card)).add_options(parser.method_options)
    text = " ".join(parser.format_help().split())
    assert "(default: 77)" in text and "(default: as the card says)" in text and "62, 63" not in text


def test_a_card_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match="none.json"):
        parsed("--method", str(tmp_path / "none.json"))


def test_an_option_that_collides_with_a_common_option(odd):
    method = parsed("--method", "odd", "--size", "2", "--odd-json", "0.75", "--flag", "yes").method
    assert method == Odd(size=2, json=0.75, flag=True)


def test_a_wrapped_method_by_name(odd):
    assert parsed("--method", "odd", "--size", "2", "--inner", "early_exit").method.inner == EarlyExit()


def test_a_required_option(odd):
    with pytest.raises(ValueError, match="method odd needs --size"):
        parsed("--method", "odd")


def test_help_has_the_fields_own_words(odd):
    parser = Parser(prog="test")
    common.add_method(parser)
    common.add_json(parser)
    options.Choice.of("odd").add_options(parser.method_options)
    text = " ".join(parser.format_help().split())
    assert "--size INT how many, 100 % of them." in text
    assert "--kind a|b (default: a)" in text


def test_owners():
    found = options.owners("--alpha")
    assert found == sorted(found) and {"d3", "d3_spec"} <= set(found) and "early_exit" not in found
    assert options.owners("--speedup") == ["unified_layer_skipping"]
    assert options.owners("--nothing") == []
