"""Code that is right when its tests pass, run in a sandbox."""

from __future__ import annotations

import ast
import re
from types import CodeType
from typing import Any

from shoal.sandbox.process import Program, Sandbox
from shoal.sandbox.source import NAME, text_of, tree_of, whole
from shoal_lab.eval.items import Item

SECONDS = 15.0
"""Time limit of a program; one of the references takes half of it."""
_DEFINES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def judge(program: Program, sandbox: Sandbox) -> dict[str, Any]:
    """Right if the tests pass; `verdict` is passed, failed, error, timeout or syntax."""
    verdict = sandbox.run(program, SECONDS)
    return {"right": verdict == "passed", "verdict": verdict}


def program_of(text: str, item: Item) -> Program:
    """The program to run: the given code and the answer's, without what the tested function does not need."""
    return Program(needed(whole(item.given + block(text)), item.answer, item.tests), item.tests, item.answer)


def block(text: str) -> str:
    """The code of an answer that begins inside a code block, or starts a block of its own."""
    return re.sub(r"\A\s*```\w*\n", "", text).split("\n```")[0].rstrip() + "\n"


def needed(code: str, entry: str, tests: str) -> str:
    """Imports, and the definitions that `entry` and the tests need; all code if `entry` is not defined.

    Models like to add examples and checks of their own, which are not judged.
    """
    tree = tree_of(code)
    if tree is None or not any(entry in _bound(node) for node in tree.body):
        return code
    wanted, kept = {entry, *re.findall(r"\w+", tests)}, set[int]()
    while more := [i for i, node in enumerate(tree.body) if i not in kept and wanted & _bound(node)]:
        kept.update(more)
        wanted.update(*(_used(compile(ast.Module([tree.body[i]], []), NAME, "exec")) for i in more))
    tree.body = [node for i, node in enumerate(tree.body) if i in kept or _imports(node)]
    return text_of(tree, code)


def _bound(node: ast.stmt) -> set[str]:
    """Names that a statement of a module defines or fills; those of an import are always kept."""
    if isinstance(node, _DEFINES):
        return {node.name}
    if not isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.For | ast.While):
        return set()
    places = [place.value if isinstance(place, ast.Subscript) else place for place in ast.walk(node)
              if isinstance(getattr(place, "ctx", None), ast.Store)]
    return {place.id for place in places if isinstance(place, ast.Name)}


def _used(code: CodeType) -> set[str]:
    """Names that code looks up outside itself, in its functions too; local ones are left out."""
    inner = (part for part in code.co_consts if isinstance(part, CodeType))
    return set(code.co_names).union(*map(_used, inner))


def _imports(node: ast.stmt) -> bool:
    kinds = (ast.Import, ast.ImportFrom)
    return isinstance(node, kinds) or isinstance(node, ast.Try) and any(isinstance(n, kinds) for n in ast.walk(node))
