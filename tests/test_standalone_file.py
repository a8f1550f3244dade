"""The file that `make standalone` packs, driven where there is neither Python nor a compiler, against this source."""

from __future__ import annotations

import json
import platform
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from importlib.metadata import distributions
from pathlib import Path

import pytest

import bare_system
from documents import ROOT
from shared_models import default_model
from whispers import tone, wav, whisper, write

pytestmark = [
    pytest.mark.standalone,
    pytest.mark.skipif((sys.platform, platform.machine()) != ("linux", "x86_64"), reason="the file is for x86-64"),
]
ASK = "What is the capital of France? Answer in one sentence."
SHORT = ["--temperature", "0", "--max-new-tokens", "24"]
SANDBOX = """
from shoal.sandbox.process import Program, Sandbox, find
sandbox = Sandbox(find(unsafe=True))
print(sandbox.kind)
for name in ("fractions", "torch"):
    print(sandbox.run(Program(f"def f():\\n    import {name}\\n    return 1\\n", "assert f() == 1\\n", "f"), 20.0))
sandbox.close()
"""


@pytest.fixture(scope="module")
def file() -> Path:
    found = sorted((ROOT / "dist").glob("shoal-*-linux-x86_64"))
    if len(found) != 1:
        pytest.fail(f"there are {len(found)} files dist/shoal-*-linux-x86_64. `make clean standalone` makes one")
    return found[0]


class Bare:
    """The file on a system without anything, and what that system sees of this one."""

    def __init__(self, root: Path, file: Path, *seen: Path) -> None:
        self._file, self._bound = file, [file, *seen]
        self.root = bare_system.made(root, self._bound)

    def popen(self, *words: str) -> subprocess.Popen[str]:
        command, environment = bare_system.entering(self.root, [str(self._file), *words], self._bound)
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        return subprocess.Popen(command, env=environment, text=True, **pipes)

    def run(self, *words: str, told: str = "", code: int = 0) -> tuple[str, str]:
        """What words print on stdout and on stderr."""
        with self.popen(*words) as process:
            said = process.communicate(told, timeout=600)
        assert process.returncode == code, said
        return said


@pytest.fixture(scope="module")
def speech(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny Whisper model, and a sound."""
    folder = tmp_path_factory.mktemp("speech")
    write(folder / "model", whisper(2))
    (folder / "a.wav").write_bytes(wav(tone(1.5)))
    return folder


@pytest.fixture(scope="module")
def bare(file: Path, speech: Path, tmp_path_factory: pytest.TempPathFactory) -> Bare:
    if not bare_system.enterable():
        pytest.skip("this user may not mount anything")
    made = Bare(tmp_path_factory.mktemp("bare"), file, Path(default_model()), speech)
    out, err = made.run("--version")
    assert out.startswith("shoal ") and re.fullmatch(r"unpacking Shoal, once, into /home/user/\S+ \(\d+ MB\)\n", err)
    return made


def by_source(*words: str, told: str = "") -> str:
    """What the same words print, run from this source."""
    done = subprocess.run([sys.executable, "-m", "shoal", *words], cwd=ROOT / "src", capture_output=True, text=True,
                          input=told, check=True)
    return done.stdout


def test_it_knows_the_machine_and_has_its_kernels(bare: Bare) -> None:
    facts = json.loads(bare.run("env", "--json")[0])
    assert facts["native_kernels"] in ("amx", "avx512", "avx2") and facts["cuda"] is None
    assert not list(bare.root.rglob("libshoal.so")), "the kernels were compiled"


def test_it_says_what_the_source_says(bare: Bare) -> None:
    words = ["generate", "--model", default_model(), *SHORT, "--json", ASK]
    ours, theirs = json.loads(bare.run(*words)[0]), json.loads(by_source(*words))
    assert ours["tokens"] == theirs["tokens"] and ours["text"] == theirs["text"]
    words = ["chat", "--model", default_model(), *SHORT]
    assert bare.run(*words, told=f"{ASK}\nAnd of Italy?\n")[0] == by_source(*words, told=f"{ASK}\nAnd of Italy?\n")


def test_it_hears(bare: Bare, speech: Path) -> None:
    words = ["transcribe", "--json", "--model", str(speech / "model"), str(speech / "a.wav")]
    texts = [json.loads(said)["files"][0]["text"] for said in (bare.run(*words)[0], by_source(*words))]
    assert texts[0] == texts[1] != ""


def test_it_lists_models_and_says_how_to_get_one(bare: Bare) -> None:
    assert "qwen3:4b" in bare.run("models")[0]
    assert "Fetch another one with: shoal pull NAME" in bare.run("generate", ASK, code=2)[1]


def test_what_needs_another_python_is_refused_in_a_line(bare: Bare) -> None:
    for words, package in ((["serve", "--replicas", "2"], "'shoal[ray]'"), (["eval"], "shoal-lab")):
        _, err = bare.run(*words, "--model", default_model(), code=2)
        assert err.count("\n") == 1 and f"pip install {package}, in a Python of your own" in err


@pytest.fixture(scope="module")
def address(bare: Bare, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server, which must end when it is told to."""
    with bare.popen("serve", "--port", "0", "--model", default_model(), "--served-model-name", "m") as process:
        assert process.stderr is not None
        line = next((line for line in process.stderr if " at http" in line), "")
        found = re.search(r"at (http\S+)/v1", line)
        assert found is not None, line
        yield found[1]
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode in (0, -signal.SIGTERM)  # uvicorn raises the signal again once it has ended


def test_it_serves_chats_and_its_page(address: str) -> None:
    import openai

    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", timeout=120, max_retries=0) as client:
        options = {"model": "m", "max_tokens": 24, "temperature": 0}
        messages = [{"role": "user", "content": ASK}]
        answer = client.chat.completions.create(messages=messages, **options).choices[0].message.content
        words = ["generate", "--model", default_model(), *SHORT, "--json", ASK]
        assert answer == json.loads(by_source(*words))["text"]
        schema = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
        form = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema, "strict": True}}
        answer = client.chat.completions.create(messages=messages, response_format=form, **options)
        assert json.loads(answer.choices[0].message.content)["city"] in ("Paris", "Rome")
    with urllib.request.urlopen(f"{address}/", timeout=60) as page:
        assert b"<html" in page.read()


def run_here(file: Path, cache: Path, words: Sequence[str]) -> str:
    """What the file prints on this system, of which it sees no program."""
    environment = {"XDG_CACHE_HOME": str(cache), "PATH": "/nowhere", "HOME": str(cache)}
    done = subprocess.run([str(file), *words], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_programs_that_a_model_writes_run_as_ever(file: Path, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", SANDBOX], capture_output=True, text=True, check=True)
    _, library, torch = done.stdout.split()
    assert library == "passed" != torch
    assert run_here(file, tmp_path, ["-c", SANDBOX]) == done.stdout


def test_each_part_has_its_licence(bare: Bare) -> None:
    (folder,) = (bare.root / "home" / "user" / ".cache" / "shoal" / "standalone").iterdir()
    notices = (folder / "NOTICES.txt").read_text("utf-8")
    packed = list(distributions(path=[str(folder / "_internal")]))
    assert len(packed) > 40 and "== Python 3." in notices
    assert all(f"== {one.metadata['Name']} {one.version}: " in notices for one in packed)
    natives = [path.name for path in (folder / "_internal").glob("lib*.so*") if not path.is_symlink()]
    assert natives and all(f"== {name}, of the system" in notices for name in natives) and "libx264" in notices
