"""Python that a model wrote, as text: what of it can be read. Runs nothing."""

from __future__ import annotations

import ast


def whole(code: str) -> str:
    """The code without the last lines, where an answer that was cut off can only be read without them."""
    lines = code.splitlines()
    for count in range(len(lines), 0, -1):
        if tree_of("\n".join(lines[:count])) is not None:
            return "\n".join(lines[:count]) + "\n"
    return code


def tree_of(code: str) -> ast.Module | None:
    """What it says, or None where it is no Python."""
    try:
        tree = ast.parse(code)
        compile(tree, "", "exec")
        return tree
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
