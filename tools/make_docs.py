"""Write the parts of the documentation that follow from the code.

    python tools/make_docs.py            writes them
    python tools/make_docs.py --check    says what is out of date, exit code 1 if anything is

Written are docs/methods.md and lab/methods.md, whose facts come from the classes of the methods,
docs/supported_models.md, which says what `sweep_models.py` has reported, the table of it that the package holds, and in
docs/architecture.md the folders of both packages, from their docstrings and imports.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from pathlib import Path
from typing import Any

import grimp

import shoal
from shoal import methods
from shoal.cli.methods import filled, partners, table
from shoal.decode.recipe import PARTS
from shoal.methods.common.combined import FAMILIES, QUESTIONS
from shoal.methods.options import field_docs

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools.sweep import page as sweep_page  # noqa: E402

PROMISE = {"full": "exact", "plan": "lossy, exact to its plan", "none": "lossy", None: "depends on its options"}
COMBINING = """## Combining

Each family answers a question of its own by filling parts of the recipe. Methods that fill different parts combine; two
that fill the same one are refused, and the message names it. So is a part beside a loop that has no place for it, like
guesses beside `jacobi`. Exactness follows from the parts together.

```sh
shoal generate --method d3 --mean 0.9 --with prompt_lookup:length=6 "What is 12 + 30?"
```

```python
import shoal
from shoal.methods import make

both = [shoal.D3(mean=0.9), {"method": "prompt_lookup", "method_args": {"length": 6}}]
engine = shoal.load(dtype="float32")
out = engine.generate("What is 12 + 30?\\n", method=both, max_new_tokens=16)
assert out.tokens == engine.generate("What is 12 + 30?\\n", method=shoal.D3(mean=0.9), max_new_tokens=16).tokens
```

A list may stand wherever a method may: in a request to the server, a line of a batch file, a JSON card
(`{"method": ["d3", "prompt_lookup"]}`). `make(both)` gives the object that transformers' `custom_generate` takes. The
options of `--with` follow its name after colons, and a drafting method in a list verifies the plan of the depth method
beside it, as with `inner`."""
"""What docs/methods.md says of several methods at once."""
FOLDERS = ("<!-- folders:begin -->", "<!-- folders:end -->")
NOTE = "<!-- Written by tools/make_docs.py; change the source and run it again. -->"


def main(words: list[str]) -> int:
    """Write the documents, or with `--check` compare them."""
    stale = [path for path, text in documents().items() if not path.is_file() or path.read_text("utf-8") != text]
    for path in stale:
        print(f"{'out of date' if '--check' in words else 'written'}: {path.relative_to(ROOT)}")
        if "--check" not in words:
            path.write_text(documents()[path], encoding="utf-8")
    return int(bool(stale) and "--check" in words)


def documents() -> dict[Path, str]:
    """Every document that is written here, with its text."""
    docs, lab = ROOT / "docs", ROOT / "lab"
    return {docs / "methods.md": methods_page(), lab / "methods.md": lab_methods_page(),
            **sweep_page.documents(), docs / "architecture.md": architecture_page()}


def question_table(rows: list[dict[str, Any]]) -> str:
    """One row per family: what it asks, the parts that answer, the methods."""
    lines = ["| family | it asks | parts of the recipe | methods |", "|---|---|---|---|"]
    for family, parts in FAMILIES.items():
        if own := [part for part in parts if part in PARTS]:
            names = ", ".join(f"[`{row['name']}`](#{row['name']})" for row in rows if row["family"] == family)
            asked = "; ".join(QUESTIONS[part] for part in own)
            lines.append(f"| {family} | {asked} | {', '.join(f'`{part}`' for part in own)} | {names or 'none'} |")
    return "\n".join(lines)


def summary_table(rows: list[dict[str, Any]]) -> str:
    """One row per method, family by family: name, paper, promise, summary."""
    lines = ["| method | family | paper | output | what it does |", "|---|---|---|---|---|"]
    order = [*FAMILIES, None]
    for row in sorted(rows, key=lambda row: order.index(row["family"])):
        family = row["family"] or "depends on its options"
        lines.append(f"| `{row['name']}` | {family} | {paper(row['paper'])} | {PROMISE[row['exact_to']]} | "
                     f"{row['summary']} |")
    return "\n".join(lines)


def methods_page() -> str:
    """docs/methods.md."""
    rows = [row for row in table(None) if home_of(row["name"]) == "shoal"]
    head = [NOTE, "# Methods", "", "Every method that comes with Shoal, with all its options. Which one to take: "
            "[choosing a method](choosing_a_method.md). What exact and lossy mean: [correctness](correctness.md).", "",
            question_table(rows), "",
            summary_table(rows), "", COMBINING]
    return "\n".join([*head, *(section(row, rows) for row in rows)]) + "\n"


def lab_methods_page() -> str:
    """lab/methods.md."""
    rows = [row for row in table(None) if home_of(row["name"]) == "shoal_lab"]
    head = [NOTE, "# Methods under study", "", "They come with shoal-lab: each needs a part that must be trained, or "
            "loses by our own tables. Those that come with Shoal are in [methods.md](../docs/methods.md).", "",
            summary_table(rows), ""]
    return "\n".join([*head, *(section(row, rows) for row in rows)]) + "\n"


def architecture_page() -> str:
    """docs/architecture.md with the folders of today between its marks."""
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    before, _, rest = page.partition(f"{FOLDERS[0]}\n")
    return f"{before}{FOLDERS[0]}\n{folders()}\n{FOLDERS[1]}{rest.partition(FOLDERS[1])[2]}"


def folders() -> str:
    """How the core's folders import each other, and what is in each folder of both packages."""
    core, lab = ROOT / "src" / "shoal", ROOT / "lab" / "src" / "shoal_lab"
    arrows = [f"    {name} --> {other}" for name, others in import_arrows(core.name).items() for other in others]
    lines = ["```mermaid", "flowchart TD", *arrows, "```", ""]
    for title, root in (("`src/shoal/`", core), ("`lab/src/shoal_lab/`", lab)):
        lines += [f"| {title} | what is in it |", "|---|---|"]
        for path in sorted(root.rglob("__init__.py")):
            if path.parent != root and path.parent.parent.name != "other_fields":  # each is a study
                lines.append(f"| `{path.parent.relative_to(root).as_posix()}/` | {first_sentence(path)} |")
        lines.append("")
    return "\n".join(lines).rstrip()


def import_arrows(package: str) -> dict[str, list[str]]:
    """Folder -> the folders that it imports, without those that one of these imports in turn."""
    graph = grimp.build_graph(package, cache_dir=None, exclude_type_checking_imports=True)
    top = {module.split(".")[1] for module in graph.modules if module.count(".") > 1}
    found: dict[str, set[str]] = {name: set() for name in sorted(top)}
    for module in graph.modules:
        here = module.split(".")[1] if "." in module else ""
        for other in graph.find_modules_directly_imported_by(module):
            there = other.split(".")[1] if "." in other else ""
            if here in top and there in top and here != there:
                found[here].add(there)

    def reached(name: str) -> set[str]:
        seen, ahead = {name}, [name]
        while ahead:
            new = found[ahead.pop()] - seen
            seen |= new
            ahead += new
        return seen

    return {name: sorted(other for other in others if not any(other in reached(via) for via in others - {other}))
            for name, others in found.items()}


def first_sentence(path: Path) -> str:
    """What the docstring of a package begins with."""
    text = " ".join((ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "").split())
    return re.split(r"(?<=\.) ", text)[0]


def home_of(name: str) -> str:
    """The package that a method is from."""
    return methods.get(name).__module__.partition(".")[0]


def section(row: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """One method: its docstring, its promise, its options."""
    name, cls = row["name"], methods.get(row["name"])
    text = inspect.cleandoc(cls.__doc__ or "").split("\nAttributes:")[0].strip()
    home = "shoal" if cls.__name__ in shoal.__all__ else cls.__module__
    facts = [f"- Class: `{home}.{cls.__name__}`",
             f"- Paper: {paper(row['paper'])}",
             f"- Output with its defaults: {PROMISE[row['exact_to']]}",
             f"- Needs: {', '.join(row['needs']) or 'nothing'}",
             f"- Fills: {filled(row)}",
             f"- Combines with: {partners(row, rows) or 'what its options say'}"]
    return "\n".join(["", f"## {name}", "", *text.split("\n"), "", *facts, "", *knob_table(cls, row["options"])])


def knob_table(cls: type, options: dict[str, Any]) -> list[str]:
    """The options of a method with defaults and meaning."""
    if not options:
        return ["It has no options."]
    docs = field_docs(cls)
    rows = [f"| `{name}` | `{value}` | {docs[name]} |" for name, value in options.items()]
    return ["| option | default | meaning |", "|---|---|---|", *rows]


def paper(words: str) -> str:
    """A paper as a link where it has an arXiv number."""
    number = re.fullmatch(r"arXiv (\d{4}\.\d{5})", words)
    return f"[{words}](https://arxiv.org/abs/{number[1]})" if number else words or "none"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
