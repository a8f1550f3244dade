"""A method that evicts, merges, stores or selects KV is one short class."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MOST = 40
"""Lines of the class, its docstring apart."""
CORE = ("snapkv", "streaming_llm", "topk_oracle", "tidal", "double_sparsity", "kv_int8", "kv_int4")
LAB = ("centroid_kv", "dynamic_context", "mustafar")
FILES = [*(f"src/shoal/methods/{name}.py" for name in CORE), *(f"lab/src/shoal_lab/methods/{name}.py" for name in LAB)]


def lines(node: ast.ClassDef) -> int:
    """Lines of a class, those of its docstring apart."""
    doc = node.body[0] if ast.get_docstring(node) is not None else None
    assert node.end_lineno is not None and (doc is None or doc.end_lineno is not None)
    return node.end_lineno - node.lineno + 1 - (0 if doc is None else doc.end_lineno - doc.lineno + 1)


def is_method(node: ast.AST) -> bool:
    """Whether a class has a name in the registry."""
    return isinstance(node, ast.ClassDef) and any(
        isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name) and one.target.id == "name"
        for one in node.body)


@pytest.mark.parametrize("file", FILES)
def test_a_method_for_the_kv_is_one_short_class(file: str) -> None:
    (method,) = filter(is_method, ast.parse((ROOT / file).read_text("utf-8")).body)
    assert isinstance(method, ast.ClassDef) and lines(method) <= MOST, f"{method.name} has {lines(method)} lines"
