"""Methods as words, several in one option: `full,d3:mean=0.6:core=4`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from shoal.cli import common
from shoal.cli.parser import Parser, parse

if TYPE_CHECKING:
    from shoal.methods.base import Method


def methods_from(text: str | None) -> dict[str, Method]:
    """The methods of such a text by their words; none of an empty one."""
    return {word: _method(word) for word in (text or "").split(",") if word}


def _method(word: str) -> Method:
    name, *knobs = word.split(":")
    parser = Parser(add_help=False)
    common.add_method(parser, card=False)
    options = ["--" + knob.replace("_", "-", knob.partition("=")[0].count("_")) for knob in knobs]
    method: Method = parse(parser, ["--method", name, *options]).method
    return method


def label_of(method: Method) -> str:
    """The word that means this method: its name and what differs from the defaults."""
    changed = [
        f"{field.name}={value}"
        for field in dataclasses.fields(method)
        if (value := getattr(method, field.name)) != field.default
    ]
    return ":".join([method.name, *changed])
