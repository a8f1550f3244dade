"""Python that a model wrote, as text: what of it can be read. Runs nothing."""

from __future__ import annotations

import ast
import re
import tokenize
import warnings
from typing import Any

NAME = "<what a model wrote>"
"""What such code is compiled as: no warning about it is anybody's here."""
_TRIES = 50
_QUIET = ("ignore", None, Warning, re.compile(re.escape(NAME)), 0)


def whole(code: str) -> str:
    """The code without the last lines, where an answer that was cut off can only be read without them.

    It is cut behind statements alone, before what is wrong, and read 50 times at most, since some takes long to read.
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
    """What it says, or None where it is no Python."""
    found = _read(code)
    return found if isinstance(found, ast.Module) else None


def parsed(code: str, mode: str = "exec") -> Any:
    """`ast.parse` without warnings; raises what that does.

    They are filtered by name, and not for a while: that would change the filters of other threads.
    """
    if _QUIET not in warnings.filters:
        warnings.filterwarnings("ignore", module=re.escape(NAME))
    return ast.parse(code, NAME, mode)


def text_of(tree: ast.Module, otherwise: str) -> str:
    """A tree as code; what it was read from where it is nested too deeply to be written."""
    try:
        return ast.unparse(tree) + "\n"
    except RecursionError:
        return otherwise


def _read(code: str) -> ast.Module | float:
    """What it says, or the line, from 1, before which it has to end to be Python; infinity where nothing tells."""
    try:
        tree: ast.Module = parsed(code)
        compile(tree, NAME, "exec")
        return tree
    except SyntaxError as error:
        return error.lineno or float("inf")
    except (ValueError, RecursionError, MemoryError):
        return float("inf")


def _ends(lines: list[str]) -> list[int]:
    """The numbers of lines, from 1, that end a statement or the head of one, up to what cannot be Python."""
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
