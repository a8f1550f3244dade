"""Parses Python code that a model wrote. Runs nothing."""

from __future__ import annotations

import ast
import re
import tokenize
import warnings
from typing import Any

NAME = "<what a model wrote>"
"""The file name that such code is compiled under; warnings about it are hidden."""
_TRIES = 50
_QUIET = ("ignore", None, Warning, re.compile(re.escape(NAME)), 0)


def whole(code: str) -> str:
    """The code, without its last lines if an answer that was cut off parses only without them.

    Cuts are made after whole statements and before the line in error. At most 50 are tried, as some code parses slowly.
    """
    lines = code.splitlines()
    ends = [*_ends(lines), len(lines)]
    for _ in range(_TRIES):
        found = _read("\n".join(lines[: ends[-1]]))
        if isinstance(found, ast.Module):
            return "\n".join(lines[: ends[-1]]) + "\n"
        ends = [end for end in ends[:-1] if end < found]
        if not ends:
            break
    return code


def tree_of(code: str) -> ast.Module | None:
    """The syntax tree; None if the code is not Python."""
    found = _read(code)
    return found if isinstance(found, ast.Module) else None


def parsed(code: str, mode: str = "exec") -> Any:
    """`ast.parse` without warnings.

    The filter goes by file name and stays: a temporary one would change the filters of other threads.
    """
    if _QUIET not in warnings.filters:
        warnings.filterwarnings("ignore", module=re.escape(NAME))
    return ast.parse(code, NAME, mode)


def text_of(tree: ast.Module, otherwise: str) -> str:
    """A tree as code; `otherwise` if it is nested too deeply to be written."""
    try:
        return ast.unparse(tree) + "\n"
    except RecursionError:
        return otherwise


def _read(code: str) -> ast.Module | float:
    """The syntax tree, or the line, from 1, of the syntax error; infinity if the line is unknown."""
    try:
        tree: ast.Module = parsed(code)
        compile(tree, NAME, "exec")
        return tree
    except SyntaxError as error:
        return error.lineno or float("inf")
    except (ValueError, RecursionError, MemoryError):
        return float("inf")


def _ends(lines: list[str]) -> list[int]:
    """Numbers of lines, from 1, that end a statement or its head, up to the first error."""
    found, rest = list[int](), (line + "\n" for line in lines)
    try:
        for token in tokenize.generate_tokens(lambda: next(rest, "")):
            if token.type == tokenize.ERRORTOKEN:
                break
            if token.type == tokenize.NEWLINE:
                found.append(token.end[0])
    except (tokenize.TokenError, SyntaxError, ValueError):
        pass
    return found
