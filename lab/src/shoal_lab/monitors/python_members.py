"""Members of Python objects, as far as jedi knows them."""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from typing_extensions import override

from shoal.engine.constraints.monitor import Monitor
from shoal.errors import Unsupported, needs
from shoal.sandbox.helper import Helpers, NoAnswer

_jedi = Helpers("shoal_lab.monitors.jedi_process", seconds=None, memory=None, at_once=4)
_ROOT = re.compile(r"(?<![\w.)\]}'\"])([^\W\d]\w*)(?:\.\w+)*\Z")
_CLOSED = re.compile(r"([)\]}'\"])(?:\.\w+)*\Z")
_TEXT = re.compile(r"'[^']*'|\"[^\"]*\"")
_DEFINES = re.compile(r"\s*(?:[\w.]+\s*,\s*)*(?:self|cls)\Z")
"""What makes an attribute, and need not be one yet."""
_PAIR = re.compile(r"(?<!\w)\d*([^\W\d]\w*) +(?=([^\W\d]\w*))")
_BETWEEN = {*keyword.kwlist, *keyword.softkwlist}
_OPEN_TEXT = re.compile("['\"#]")
_OPENS = {")": "(", "]": "[", "}": "{"}


@dataclass(frozen=True)
class PythonMembers(Monitor):
    """Python code in which only members follow a dot, as far as jedi knows what stands before the dot.

    The text is prompt and answer. Where it has fences of Markdown, only what stands within them is bound. Strings,
    comments, lines that are no Python, and `self.` where it may define an attribute stay free.

    Attributes:
        folder: where the code lies, so that its own imports are found beside installed modules; empty for none. No
            path that the text names is followed.
        seconds: see `Monitor`. The start of jedi's process does not count.

    Raises:
        Unsupported: jedi is not installed, or there is no such folder.
        ValueError: `seconds` is not above 0.
    """

    keeps_time: ClassVar[bool] = True

    folder: str = ""
    seconds: float = 20.0

    def __post_init__(self) -> None:
        if self.folder and not Path(self.folder).is_dir():
            raise Unsupported(f"PythonMembers({self.folder!r})", "there is no such folder", "Give one, or leave it out")
        if not self.seconds > 0:
            raise ValueError(f"seconds is {self.seconds!r}; it must be above 0")
        with needs("members", "PythonMembers", "shoal-lab"):
            import jedi  # noqa: F401

    @override
    def watches(self, text: str) -> bool:
        # jedi cannot know a name that is no builtin and has not come before in the text
        code = _code(text)
        line = code[code.rfind("\n") + 1 : -1]
        bare = _TEXT.sub("", line)
        if _DEFINES.match(line) or _OPEN_TEXT.search(bare) or any(map(_BETWEEN.isdisjoint, _PAIR.findall(bare))):
            return False
        if (root := _ROOT.search(line)) is not None:
            before = code[: len(code) - 1 - len(line) + root.start()]
            return root[1] in before or hasattr(builtins, root[1])
        closed = _CLOSED.search(line)
        return closed is not None and code.count(_OPENS.get(closed[1], "")) >= code.count(closed[1])

    @override
    def follows(self, text: str) -> Collection[str] | None:
        # RuntimeError: jedi's process dies, does not start, or takes too long
        folder = str(Path(self.folder).absolute()) if self.folder else ""
        try:
            members: list[str] | None = _jedi.ask([_code(text), folder], self.seconds)
        except NoAnswer as error:
            raise RuntimeError(f"jedi has no answer: {error}") from error
        return members


def _code(text: str) -> str:
    """The Python in a text: all of it, or what stands behind the last fence if that is open."""
    parts = text.split("```")
    if len(parts) == 1:
        return text
    return parts[-1].partition("\n")[2] if len(parts) % 2 == 0 else ""
