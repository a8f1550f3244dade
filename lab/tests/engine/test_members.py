"""Python's members by jedi: what is known, what is left free, answers that hold to it, and a jedi that fails."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from chat_tokenizer import MARKS_FIRST, chat_tokenizer
from families import tiny
from shoal.engine.constraints.monitor import asked
from shoal.engine.loading.load import engine_for
from shoal.engine.scheduling.scheduler import Scheduler
from shoal.errors import Unsupported
from shoal.methods.d3_spec import D3Spec
from shoal.methods.prompt_lookup import PromptLookup
from shoal.sandbox.helper import Helpers
from shoal_lab.monitors import jedi_process, python_members
from shoal_lab.monitors.python_members import PythonMembers

OtherWork = Callable[[str], list[subprocess.Popen[str]]]
BOUND = {
    "x = []\nx.": "append",
    "import os\nprint({'a': os.": "getcwd",
    " import os\nos.path.": "join",
    "from collections import OrderedDict\nd = OrderedDict()\nfor k in d.": "items",
    "import pathlib\nwith pathlib.Path('a').open() as file:\n    for line in file.": "readline",
    "'a b'.": "split",
    "x = 'a'\ny = [x.upper().": "lower",
    "class A:\n    def __init__(self):\n        self.size = 1\n\n    def f(self):\n        return 2 * self.": "size",
    "Some words.\n```python\nx = []\nx.": "append",
    "x = 3 # it's\nx.": "bit_length",
}
FREE = [
    "x.", "x = 1.", "x = 1\ny = 3.", "def f(x):\n    return x.", "import nothing_there\nnothing_there.", "from .",
    "# str.", "x = []  # x.", "x = 'str.", '"""\nA str.', '"""\nA str\nstr.', "a list.", "This adds to a list.", "...",
    "class A:\n    def __init__(self):\n        self.", "class A:\n    def f(self):\n        self.a = 1\n        self.",
    "class A:\n    def f(self):\n        self.a, self.", "str.\n```python\nx = []\n```\nThen str.", "x)].", ".", "",
    "f'{str.", "# x\n   str .",
]


def known(text: str, **options: Any) -> Any:
    """However long it takes where the machine is busy."""
    monitor = PythonMembers(**{"seconds": 300.0, **options})
    return monitor.follows(text) if monitor.watches(text) else None


@pytest.mark.parametrize("text", BOUND)
def test_members_that_are_known(text: str) -> None:
    found = known(text)
    assert BOUND[text] in found and "foo" not in found and "if" not in found


@pytest.mark.parametrize("text", FREE)
def test_what_is_left_free(text: str) -> None:
    assert not known(text)


def test_pairs_of_words_are_those_that_a_search_from_every_letter_finds() -> None:
    dice, slow = random.Random(1), re.compile(r"([^\W\d]\w*) +(?=([^\W\d]\w*))")
    texts = ["".join(dice.choices("ab_1٣é  .", k=12)) for _ in range(3000)]
    assert [python_members._PAIR.findall(text) for text in texts] == [slow.findall(text) for text in texts]
    assert sum(bool(slow.search(text)) for text in texts) > 500


@pytest.mark.parametrize("text", ["{}", "({} ", "x {}! ", "{} y", "'{}' '"], ids=repr)
@pytest.mark.parametrize("part", ["a", "1", "1a", " ", ".a", "a , ", "'", ")"])
def test_long_lines_are_looked_at_quickly(text: str, part: str) -> None:
    began = time.monotonic()
    PythonMembers().watches(text.format(part * (60_000 // len(part))) + ".")
    assert time.monotonic() - began < 20, "a search from every letter takes minutes"


def test_imports_are_found_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shapes.py").write_text("print(1)\n\nclass Ball:\n    radius = 1\n", encoding="utf-8")
    text = "import shapes\nshapes.Ball()."
    assert "radius" in known(text, folder=str(tmp_path)) and not known(text)
    monkeypatch.chdir(tmp_path)
    assert "radius" in known(text, folder=".") and not known(text) and not known("import request\nrequest.")


PATHS = {
    "append": "import sys\nsys.path.append({folder!r})\n",
    "insert": "import sys\nsys.path.insert(0, {folder!r})\n",
    "assign": "import sys\nsys.path = [{folder!r}]\n",
    "add": "import sys\nsys.path[0:0] = [{folder!r}]\n",
    "package": "__path__ = [{folder!r}]\n__file__ = {folder!r} + '/a.py'\n",
    "load": "from importlib import util\nutil.spec_from_file_location('secrets_of', {folder!r} + '/secrets_of.py')\n",
}


@pytest.mark.parametrize("way", PATHS)
def test_no_path_that_a_text_names_is_followed(way: str, tmp_path: Path) -> None:
    (tmp_path / "secrets_of.py").write_text("class Safe:\n    combination = 1\n", encoding="utf-8")
    (tmp_path / "mine").mkdir()
    text = PATHS[way].format(folder=str(tmp_path)) + "import secrets_of\nsecrets_of.Safe()."
    assert not known(text) and not known(text, folder=str(tmp_path / "mine"))
    assert "append" in known("x = []\nx.")


def test_the_process_reads_what_is_installed_and_the_folder_alone(tmp_path: Path) -> None:
    """Whatever jedi comes to follow: it is refused where the file is opened."""
    (tmp_path / "inside").mkdir()
    wall = jedi_process.Wall([str(tmp_path / "inside"), ""])
    inside, outside = tmp_path / "inside" / "a.py", tmp_path / "inside_too.py"
    for path in (inside, str(inside).encode(), tmp_path / "inside", str(tmp_path / "x" / ".." / "inside" / "a.py")):
        wall("open", (path, "r", 0))
    for path in (outside, tmp_path, "/etc/passwd", str(tmp_path / "inside" / ".." / "inside_too.py")):
        for event in ("open", "os.listdir", "os.scandir"):
            with pytest.raises(PermissionError, match="is not for a text"):
                wall(event, (path, "r", 0))
    for event in ("subprocess.Popen", "os.system", "socket.connect"):
        with pytest.raises(PermissionError, match="is not for a text"):
            wall(event, ("ls",))
    wall("open", (3, "r", 0))
    wall.folder = str(tmp_path)
    wall("open", (outside, "r", 0))


@pytest.mark.slow
def test_a_text_that_makes_strings_without_end_is_answered() -> None:
    text = "a0 = 'x' + 'y'\n" + "".join(f"a{n + 1} = a{n} + a{n}\n" for n in range(60)) + "a60."
    try:
        known(text)
    except RuntimeError as error:
        assert "jedi has no answer" in str(error)
    assert "append" in known("x = []\nx.")


class Slow(PythonMembers):
    """Takes its time."""

    def follows(self, text: str) -> Any:
        time.sleep(0.6)
        return super().follows(text)


@pytest.mark.parametrize("method", ["full", PromptLookup(min_ngram=1)], ids=str)
def test_a_row_waits_for_its_answer_and_its_neighbours_go_on(method: Any) -> None:
    engine = engine_for(tiny("llama", layers=2), chat_tokenizer(MARKS_FIRST))
    engine.eos_token_ids = frozenset({2})
    options = {"max_new_tokens": 12, "method": method}
    alone = engine.generate("x = []\nx.", constraint=Slow(), **options).tokens
    plain = engine.generate("x = []\nx.", max_new_tokens=200).tokens
    engine.constraints._vocabulary.cache_clear()
    told: list[float] = []
    with Scheduler(engine) as scheduler:
        def deliver(item: Any) -> None:
            told.append(time.monotonic())

        other = scheduler.submit("x = []\nx.", max_new_tokens=200, deliver=deliver)
        bound = scheduler.submit("x = []\nx.", constraint=Slow(), **options)
        assert len(list(bound)) == len(alone) and bound.results[0].tokens == alone
        until = time.monotonic() + 30
        while not other.done and time.monotonic() < until:
            time.sleep(0.01)
        assert other.results[0].tokens == plain
    assert max(after - before for before, after in zip(told, told[1:], strict=False)) < 0.5


@pytest.mark.parametrize("method", ["full", PromptLookup(min_ngram=1), D3Spec()], ids=str)
@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 3}], ids=["greedy", "sampled"])
@pytest.mark.quick(3)
def test_answers_go_on_with_a_member(options: dict[str, Any], method: Any) -> None:
    words = chat_tokenizer(MARKS_FIRST)
    engine = engine_for(tiny("llama", layers=2), words)
    engine.eos_token_ids = frozenset({words.eos_token_id})
    prompts = {"x = [1]\nx.": list, "y = 'a'\nz = y.up": str, "import this\nthis.": None}
    given = {"constraint": PythonMembers(), "max_new_tokens": 24, **options}
    alone = [engine.generate(prompt, **given).tokens for prompt in prompts]
    results = engine.generate(list(prompts), method=method, **given)
    assert method != "full" or [one.tokens for one in results][0] == alone[0]
    for (prompt, kind), result in zip(prompts.items(), results, strict=True):
        said = re.search(r"\.(\w*)", prompt + result.text)
        assert said and (kind is None or hasattr(kind, said[1]))
    if options == {}:
        assert [one.tokens for one in results] == alone


@pytest.fixture
def other_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OtherWork]:
    """Puts code in the place of jedi; gives the list of the processes that run it."""
    made: list[Helpers] = []

    def put(code: str) -> list[subprocess.Popen[str]]:
        (tmp_path / "jedi_twin.py").write_text(code, encoding="utf-8")
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
        helpers = Helpers("jedi_twin", seconds=None, memory=None)
        made.append(helpers)
        take, taken = helpers._taken, list[subprocess.Popen[str]]()
        monkeypatch.setattr(helpers, "_taken", lambda: taken.append(take()) or taken[-1])
        monkeypatch.setattr(python_members, "_jedi", helpers)
        return taken

    yield put
    for helpers in made:
        helpers.end()


@pytest.mark.parametrize(
    ("code", "seconds", "why"),
    [
        ("import time\n\ndef answer(question):\n    time.sleep(60)\n", 0.5, "it takes more than 0.5 s"),
        ("import sys\n\ndef answer(question):\n    sys.exit(3)\n", 60.0, "the process that worked on it ended with 3"),
        ("1 / 0", 60.0, "did not start: it ended with 1"),
    ],
    ids=["hangs", "leaves", "dies"],
)
def test_a_jedi_that_fails_is_ended_and_no_other_request_is_touched(
    code: str, seconds: float, why: str, other_work: OtherWork
) -> None:
    engine = engine_for(tiny("llama", layers=2), chat_tokenizer(MARKS_FIRST))
    engine.eos_token_ids = frozenset({2})
    taken = other_work(code)
    with Scheduler(engine) as scheduler:
        good = scheduler.submit("x = []\nx.", max_new_tokens=12)
        bad = scheduler.submit("x = []\nx.", constraint=PythonMembers(seconds=seconds), max_new_tokens=12)
        with pytest.raises(Unsupported, match=f"PythonMembers.*jedi has no answer: .*{why}"):
            list(bad)
        assert all(process.wait(10) is not None for process in taken) and taken
        list(good)
        assert good.results[0].tokens == engine.generate("x = []\nx.", max_new_tokens=12).tokens


def test_the_start_of_a_process_does_not_count(other_work: OtherWork) -> None:
    taken = other_work("import time\ntime.sleep(2.5)\n\ndef answer(question):\n    return ['append']\n")
    assert asked(PythonMembers(seconds=2.0), "x = []\nx.") == ["append"] and len(taken) == 1


@pytest.mark.parametrize("seconds", [1e10, float("inf")])
def test_jedi_may_have_any_time(seconds: float) -> None:
    assert "append" in (PythonMembers(seconds=seconds).follows("[].") or ())


def test_what_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unsupported, match="no such folder"):
        PythonMembers("missing")
    with pytest.raises(ValueError, match="seconds is 0"):
        PythonMembers(seconds=0)
    monkeypatch.setitem(sys.modules, "jedi", None)
    with pytest.raises(Unsupported, match=r"jedi is not installed.*pip install 'shoal-lab\[members\]'"):
        PythonMembers()
