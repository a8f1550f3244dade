"""A monitor for Python: after a dot come only members that jedi finds, where it finds any."""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from shoal.engine.constraints.monitor import Monitor
from shoal.errors import Unsupported, needs
from shoal.sandbox.helper import Helpers, NoAnswer

_jedi = Helpers("shoal.engine.constraints.jedi_process", seconds=None, memory=None, at_once=4)
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
    """Python code in which a dot is followed by a member, as far as jedi knows what stands before the dot.

    The text is prompt and answer; where it has fences of Markdown, only what stands within them. Free stay strings,
    comments, lines that are no Python, and `self.` where it may define an attribute.

    Attributes:
        folder: where the code lies, so that its imports are found, beside modules that are installed; none if empty.
            No path that the text names is followed.
        seconds: see `Monitor`; the start of a process for jedi does not count.

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
        with needs("constraints", "PythonMembers"):
            import jedi  # noqa: F401

    def watches(self, text: str) -> bool:
        """See the base class. A name that the text has not had before, and no builtin, jedi cannot know either."""
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

    def follows(self, text: str) -> Collection[str] | None:
        """See the base class; RuntimeError where jedi's process dies, does not start, or takes too long."""
        folder = str(Path(self.folder).absolute()) if self.folder else ""
        try:
            members: list[str] | None = _jedi.ask([_code(text), folder], self.seconds)
        except NoAnswer as error:
            raise RuntimeError(f"jedi has no answer: {error}") from error
        return members


def _code(text: str) -> str:
    """What of a text is Python: all of it, or what stands behind the last fence if that is open."""
    parts = text.split("```")
    if len(parts) == 1:
        return text
    return parts[-1].partition("\n")[2] if len(parts) % 2 == 0 else ""
