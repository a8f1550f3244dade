"""A verifier of programs: it runs them on the examples in the prompt. Imports no torch.

An example is a call and its expected value, in the form of doctest (`>>> f(2)`, and the value below it) or on one line
(`f(2) => 4`). Asserts are not examples: a prompt may show those that an answer is judged by.
"""

from __future__ import annotations

import ast
import functools
import math
import os
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from shoal.decode.branches.verifier import Attempt, BoundedVerifier
from shoal.sandbox.process import Program, Sandbox, find
from shoal.sandbox.source import parsed, text_of, tree_of, whole

SECONDS = 5.0
"""Time limit of an example in seconds; after one that exceeds it no other is tried."""
_MEANS = r"(?:={1,3}>?|-+>|➞|→|#\s*=+>|[Rr]eturns?|should return)"
_ARROW = re.compile(rf"[ \t]*(?:[-*][ \t]*)?(\w+\(.*\))\s*{_MEANS}\s*(\S.*)")
_FENCE = re.compile(r"^[ \t]*```\w*[ \t]*$\n?", re.MULTILINE)
_BLOCK = re.compile(r"^[ \t]*```\w*\n(.*?)(?:^[ \t]*```|\Z)", re.MULTILINE | re.DOTALL)
_ENDS = re.compile(r"\"\"\"|'''")
_LINES = 50
"""The most of a value that words may follow; one without any may be longer."""
_RUNS = (ast.Expr, ast.Assert, ast.If, ast.For, ast.While, ast.With, ast.Match)
_OWN = threading.local()


@dataclass(frozen=True)
class Example:
    """A call and its expected value.

    Attributes:
        call: an expression.
        wanted: the source of the expected value.
        before: statements to run first.
    """

    call: str
    wanted: str
    before: str = ""

    @property
    def test(self) -> str:
        """A program that fails where it returns something else."""
        equal = f" or found == (\n{self.wanted}\n)" if _is_value(self.wanted) else ""
        return f"{self.before}\nfound = (\n{self.call}\n)\nassert repr(found) == {self.wanted!r}{equal}\n"

    @property
    def entry(self) -> str:
        """The name of the called function; empty for a method."""
        names = (node.func.id for node in ast.walk(parsed(self.call, "eval"))
                 if isinstance(node, ast.Call) and isinstance(node.func, ast.Name))
        return next(names, "")


@dataclass(frozen=True)
class Execution(BoundedVerifier):
    """The share of the prompt's examples that a finished program passes.

    An answer that has not ended, and one to a prompt without examples, is judged by its likelihood.

    Attributes:
        seconds: time limit of all examples of a program together, counted from its start, since other programs may run
            first. Examples that are left then have failed.
    """

    seconds: float = math.inf

    def __call__(self, attempt: Attempt) -> float:
        """The share of passed examples; Unsupported if this machine has no sandbox."""
        shown = examples(attempt.question) if attempt.finished else ()
        if not shown:
            return attempt.likelihood
        code = program(attempt.question, attempt.text)
        return _workers().submit(_passed, code, shown, self.seconds).result() / len(shown)


@functools.lru_cache(maxsize=64)
def examples(prompt: str) -> tuple[Example, ...]:
    """The examples of a prompt, each once, in their order."""
    found: dict[Example, None] = {}
    lines, before = prompt.splitlines(), list[str]()
    bare = [line.strip() for line in lines]
    for number, line in enumerate(lines):
        if bare[number].startswith(">>>"):
            source, wanted = _doctest(bare, number)
            if wanted and _is_call(source):
                found[Example(source, wanted, "\n".join(before))] = None
            elif source and tree_of(source) is not None and source not in before:
                before.append(source)
        elif (arrow := _ARROW.fullmatch(line)) and _is_call(arrow[1]) and _is_value(_ENDS.split(arrow[2])[0].strip()):
            found[Example(arrow[1], _ENDS.split(arrow[2])[0].strip())] = None
    return tuple(found)


def program(prompt: str, answer: str) -> str:
    """The program of an answer: its code block, after the code of a block that the prompt's end leaves open.

    Only definitions stay; tests and other statements of the answer are left out.
    """
    fences = list(_FENCE.finditer(prompt))
    if len(fences) % 2:
        code = prompt[fences[-1].end() :] + answer.split("\n```")[0]
    elif blocks := _BLOCK.findall(answer):
        code = max(blocks, key=len)
    else:
        code = answer if fences else prompt + answer
    read = whole(code)
    tree = tree_of(read)
    if tree is None:
        return code
    tree.body = [node for node in tree.body if not isinstance(node, _RUNS)]
    return text_of(tree, read)


def _doctest(lines: list[str], first: int) -> tuple[str, str]:
    """The source that begins on that line, and the value below it; empty if there is none, or on an error."""
    end = next((place for place in range(first + 1, len(lines)) if not lines[place].startswith("...")), len(lines))
    source = "\n".join([lines[first][3:].strip(), *(line[3:].removeprefix(" ") for line in lines[first + 1 : end])])
    wanted = list[str]()
    for line in map(lines.__getitem__, range(end, len(lines))):
        text = _ENDS.split(line)[0].strip()
        if not text or text.startswith((">>>", "```")):
            break
        wanted.append(text)
        if text != line:
            break
    if wanted and wanted[0].startswith("Traceback"):
        return "", ""
    values = ("\n".join(wanted[:count]) for count in range(1, min(len(wanted), _LINES) + 1))
    return source, next(filter(_is_value, values), "\n".join(wanted))


def _is_call(source: str) -> bool:
    try:
        return any(isinstance(node, ast.Call) for node in ast.walk(parsed(source, "eval")))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def _is_value(text: str) -> bool:
    try:
        ast.literal_eval(parsed(text, "eval"))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return False
    return True


@functools.cache
def _workers() -> ThreadPoolExecutor:
    """Threads that each have a sandbox; a sandbox ends with the thread that began it."""
    return ThreadPoolExecutor(os.cpu_count() or 1, "shoal-execution")


def _passed(code: str, shown: tuple[Example, ...], seconds: float) -> int:
    """How many of the examples a program passes within `seconds` from now."""
    if not hasattr(_OWN, "sandbox"):
        _OWN.sandbox = Sandbox(find())
    count, until = 0, time.monotonic() + seconds
    for example in shown:
        left = until - time.monotonic()
        if left <= 0:
            break
        verdict = _OWN.sandbox.run(Program(code, example.test, example.entry), min(SECONDS, left))
        count += verdict == "passed"
        if verdict == "timeout":
            break
    return count
