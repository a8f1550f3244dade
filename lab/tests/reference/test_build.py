"""The token file of a training: stretches that do not overlap, without held-out problems."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tools.reference import batches, build, corpus, hold_out, templates
from tools.reference.drills import drill

QUESTION = "{0} has 14 cups, {0} buys {1} more and gives away 9. How many cups are left?"
ANSWER = "There are 14+{1}=<<14+{1}={2}>>{2} cups.\nThen {2}-9=<<{2}-9={3}>>{3} are left.\n#### {3}"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight problems in GSM8K's form and a novel."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "gsm8k").mkdir()
    names = ("Ann", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hal")
    rows = [
        {"question": QUESTION.format(name, n), "answer": ANSWER.format(name, n, 14 + n, 5 + n)}
        for n, name in enumerate(names, 20)
    ]
    (folder / "gsm8k" / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "novels").mkdir()
    with tarfile.open(folder / "novels" / "novels_before_1900.tar.xz", "w:xz") as archive:
        text = "\n\n".join(f"Paragraph {n} of a long novel, in which the rain fell." for n in range(900)).encode()
        entry = tarfile.TarInfo("A_1850.txt")
        entry.size = len(text)
        archive.addfile(entry, io.BytesIO(text))
    return folder


def texts(monkeypatch: pytest.MonkeyPatch, data: Path, out: Path, *more: str) -> dict[str, list[str]]:
    """Run the command; the examples of each kind as text."""
    argv = ["--data", str(data), "--out", str(out), "--tokens", "12000", *more]
    monkeypatch.setattr("sys.argv", ["build", *argv])
    build.main()
    table, tokenizer = batches.Corpus(out / "corpus.pt"), Tokenizer.from_file(str(out / "tokenizer.json"))
    found: dict[str, list[str]] = {kind: [] for kind in build.KINDS}
    for first, size, kind in zip(table.offsets.tolist(), table.lengths.tolist(), table.kinds.tolist(), strict=False):
        ids = table.tokens[first : first + size].tolist()
        found[build.KINDS[kind]].append(tokenizer.decode(ids))
    sizes = {kind: int(table.lengths[table.kinds == at].sum()) for at, kind in enumerate(build.KINDS)}
    assert all(0 <= sizes[kind] - share * 12_000 < build.CONTEXT for kind, share in build.SHARES.items())
    return found


def worded(problem: templates.draw.Problem) -> str:
    return f"{problem.question}\n{problem.solution}"


def test_a_second_stretch_repeats_nothing_and_stays_clear_of_what_is_held_out(
    monkeypatch: pytest.MonkeyPatch, data: Path, tmp_path: Path
) -> None:
    out, held = tmp_path / "corpus", tmp_path / "held"
    out.mkdir()
    some = map(worded, map(templates.trained_problem, range(100)))
    build.tokenizer_from(some, 400).save(str(out / "tokenizer.json"))
    kept = (out / "tokenizer.json").read_bytes()
    first = texts(monkeypatch, data, out)
    assert first["templates"][:9] == [worded(templates.trained_problem(seed)) for seed in range(9)]
    second = texts(monkeypatch, data, out, "--stretch", "2")
    for kind in ("templates", "drills", "novels"):
        assert not set(first[kind]) & set(second[kind]), kind
    assert first["gsm8k"] != second["gsm8k"]
    assert second["drills"][0] == worded(drill(build.STRETCH))

    held.mkdir()
    own = [templates.trained_problem(build.STRETCH + count) for count in range(3)]
    known = next(corpus.gsm8k_variants(corpus.split(data).known, "train 2"))
    assert (out / "tokenizer.json").read_bytes() == kept
    hold_out.write(own, held / "own.jsonl.bz2")
    hold_out.write([known], held / "known.jsonl.bz2")
    third = texts(monkeypatch, data, out, "--stretch", "2", "--held-out", str(held))
    for problem in (*own, known):
        assert worded(problem) in (*second["templates"], *second["gsm8k"])
        assert worded(problem) not in (*third["templates"], *third["gsm8k"])
    assert set(second["templates"][3:]) <= set(third["templates"])


def test_a_folder_without_problems_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no problems"):
        hold_out.marks(tmp_path)


def test_the_shares_are_of_one_whole() -> None:
    assert sum(build.SHARES.values()) == pytest.approx(1)
    assert tuple(build.SHARES) == build.KINDS
