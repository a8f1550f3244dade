#!/usr/bin/env python3
"""Check the structure of the source, and print and bound its size.

    python tools/check_structure.py

No two classes of a package share a name; no import goes round in a circle, neither inside functions nor for type
checkers; the core imports nothing of the lab; what a component declares is not looked up by its name. A bound may only
be lowered, or raised with a reason in its line. Exit code 1 where something is not as it should be.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {"shoal": ROOT / "src" / "shoal", "shoal_lab": ROOT / "lab" / "src" / "shoal_lab"}
LOOP = "shoal.decode.batch"
ROWS = ("methods", "gguf", "eval", "train")
"""Folders whose files are rows of one kind: they may hold any number of them."""
COMPONENTS = ("decode/recipe.py", "decode/worker.py", "decode/rules/accept.py", "model/kv/form.py", "model/runner.py",
              "methods/base.py")
"""Files whose classes declare what components have, so that it is read as an attribute, and not by `getattr`."""
LOOKUPS = ("getattr", "hasattr")
VAGUE = ("words",)
"""Names that have stood for five different things: tokens, argv, messages, a vocabulary, a tokenizer."""
CONFIGS = ("vocab_size",)
"""Names that components share with transformers' configs, which are looked up."""

MOST_CORE_LINES = 63_105
"""2,680: recurrent layers; 990: experts; 330: plain steps; 410: prefixes in place; 610: SambaY; 730: latent attention,
channel-wise gates of two matrices and lightning attention, seven model types, their GGUF files and published names;
560: all GGUF types, models in parts, gpt-oss; 40: orders and cards by kind of layer; 530: safetensors in the numbers
of five tools; 70: plain steps under a drafter that rests, old copies of weights removed; 860: Gemma 4, 3n, Llama 4:
sizes by layer, inputs of layers, keys of other layers on modules too, chunks, and GGUF files; 890: twenty-one model
types with LayerNorms, plain MLPs, parallel residuals, learned positions or ALiBi, what is near, their GGUF files; 360:
layers for further tokens that models bring, in three layouts, and imports without torch's compiler; 230: the table of
what people run, sixteen model types, queries scaled by place where they are rotated, tables that move, five
architectures of GGUF files; 140: experts read ahead of a file beyond memory, memory groups;
110: guesses from earlier answers;
80: layers for further tokens in quantised files, and what they take under a limit on memory;
110: a bound on what guesses lose; 64: the same for all of a batch, what a head reads of a prompt;
140: what answers taught, kept on disk and in ADED's table; n-gram files;
680: drafters of EAGLE's family from other tools, what is added beside attention, states of several layers;
365: Gemma 3n: streams of states, a residual beside attention and cut gates, in torch and in C, and its GGUF files;
165: Apertus and mixtures of Cohere, their GGUF files too, BitNet;
1,190: DFlash, Medusa's heads and MLP speculators of other tools, draft models that guess in parallel;
50: drafters tried by what they brought to earlier texts;
80: sequences of ADED's search, merged; sequences of like length together where modules pad;
200: laws of what more training of a drafter brings;
240: several layers for further tokens, each of which reads what the one before it says, in four layouts;
330: Gemma 4's assistant;
240: three kinds of drafters in GGUF files;
120: GGUF files of MiniMax-01 and Phi-3.5-MoE, DBRX; 70: odd configs told in a line;
1,290: models by name: their spellings and table, the Hub's cache and other tools' folders, fetching, removing;
1,660: Anthropic's messages; thoughts; Ollama's routes; vectors and rerankers; gaps; a page of routes;
150: a thread that leaves a forward for other work; 930: help by usual options, a chat's files, models and messages of
several lines, tools of MCP servers; 1,430: several models in one server: names, loads and unloads, a budget of
memory, turns, pulls by request; 950: adapters of low rank: peft's folders and GGUF files, on kernels, packed layers
and modules; 285: what files tell of a model that is not in memory; 230: adapters
of several models, whose sizes files tell; 140: tools of MCP servers on the page;
500: attention to what an encoder made of a source, in torch and in C; 1,100: speech: audio files, windows,
timestamps, subtitles, its command and its routes; 730: pictures in prompts, their encoders and files, from commands
and in batches; 300: pictures fetched by http where an operator allows it, within bounds;
520: encoders of pictures beside GGUF files, by type of projector; 530: sounds in chats, their encoders and features;
760: films in chats: files, which frames are seen and how large, by model type, places in time;
730: encoders of text: norms of sums, biases by ranges of distances, or of a layer, sources from prompts, T5Gemma, T5 in
GGUF files; 180: responses that a server stores;
10: capped scores on the oldest transformers; 240: encoders on the kernels; 250: times of words;
448: windows of speech together, what a smaller model hears as guesses, in any tokens, methods of the audio routes;
209: pictures of Qwen3.5, Gemma 4, Llama 4, PaliGemma and Qwen3-VL's mixtures, turned places on the kernels and on
modules; 38: biases of encoders by distance;
448: windows of speech together, what a smaller model hears as guesses, in any tokens, methods of the audio routes;
1: a layer that guesses beside a decoder with LayerNorms; 20: prompts whose pictures go on with fewer tokens;
837: schedulers in lockstep and the processes of a server that share a model; prompts in two waves between them;
12: alphas for long answers, found by halving; 40: what to write for an option, in words and with an example;
265: positions by slot, tokens read again in full, copies of skipped layers' KV, labels in 4 bits"""
MOST_CORE_FILES = 385  # 20: recurrent; 4: experts; 4: SambaY; 3: latent; 9: GGUF; 6: classics; 20: drafts; 11: hub;
# 9: what clients speak; 1: threads that part; 2: what is told of a model, how it lies in files; 1: whose adapters are;
# 1: options of tools; 7: sources and their encoders; 9: speech; 7: pictures; 6: sounds; 2: films; 3: shared models
MOST_LAB_LINES = 50_950
"""Of the package, benchmarks and tools. 392 more: plan and members; 127: two checkouts; 350: hybrids, prefixes; 620:
training hybrids; 200: files of mixtures; 670: caches of experts,
mixtures of dense files, experts beyond memory; 70: a day of alike requests;
280: what types of files cost in numbers and time; 100: models that memory holds once; 1: groups refused;
20: Medusa of other tools; 160: prompt tokens by measured times, and several of them for each
place; 50: searches that go on from text to text, all exits in turn; 70: a
command that searches for sublayers; 275: training in EAGLE-3's form; 300: training of DFlash's
blocks; 10: files with random weights beyond memory; 100: drafts made beside the target; 85: the first minute of a
clone; 15: the usual options of commands; 130: a soak of several models; 220: prompts of
all kinds, training that goes on from a part, guesses kept by place; 170: speech beside other programs;
120: an encoder with a shallow decoder beside a decoder of equal size; 155: what drafts could bring at most;
128: T5 beside another program; 1,030: generated pictures, a small LLaVA and the gate that drops its pictures' tokens;
160: studies of other fields, listed and run; 70: what live objects take in a soak;
100: speech with drafts, in batches, by the hour; 111: what telling positions costs a step; 74: a layer trained on
transcripts, guesses of it by place; 1,775: solids, two tasks and videos, with what such studies share;
1,550: continuous tokens, a key-value bottleneck, circuits; 300: an encoder before a shallow decoder;
510: D3 on its own benchmarks; 470: engines in environments of their own;
605: healing beside an encoder, batches by two
lengths, what a decoder's layers are worth to a transcript;
240: prompts in two waves between network namespaces; 310: copied KV, a text beyond the context, a request's
runtime and price, ranks by width, votes of chains."""
MOST_IN_FOLDER = 20
MOST_CLASSES = 85  # each kind of part and of cache layer is a class, with its defaults; 4: of adapters; 5: of sources
"""Classes and protocols in the modules that the decoding loop imports, however indirectly."""
MOST_DOC_PAGES, MOST_DOC_WORDS = 15, 30_420
REFERENCE = ("api", "comparison", "generation_config", "methods", "reference_server", "supported_models")
"""Pages of docs that are written by scripts, or walked by tests field by field or cell by cell: they are not read from
end to end."""


def main() -> int:
    """Check and print."""
    imports, at_run_time = graph(type_checking=True), graph(type_checking=False)
    core = sorted(PACKAGES["shoal"].rglob("*.py"))
    lab = [path for path in sorted((ROOT / "lab").rglob("*.py")) if "tests" not in path.parts]
    docs = [path for path in sorted((ROOT / "docs").glob("*.md")) if path.stem not in REFERENCE]
    docs += [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    near_loop = sum(len(list(classes(path_of(module)))) for module in reachable(at_run_time, LOOP))
    wrong = [*twice(), *cycles(imports), *of_the_lab(imports), *crowded(core), *looked_up(core), *vague(core),
             *unmerged([*docs, ROOT / "CHANGELOG.md"])]
    for what, found, most in (
        ("lines of the core", lines(core), MOST_CORE_LINES),
        ("files of the core", len(core), MOST_CORE_FILES),
        ("lines of the lab", lines(lab), MOST_LAB_LINES),
        ("classes within reach of the decoding loop", near_loop, MOST_CLASSES),
        ("pages for users", len(docs), MOST_DOC_PAGES),
        ("words on them", sum(len(path.read_text("utf-8").split()) for path in docs), MOST_DOC_WORDS),
    ):
        print(f"{what}: {found}, at most {most}")
        if found > most:
            wrong.append(f"{what}: {found} is more than {most}")
    print("\n".join(wrong) or "no class name twice, no import cycle")
    return int(bool(wrong))


def graph(type_checking: bool) -> dict[str, set[str]]:
    """What each module imports, inside functions too, and for type checkers where that is wanted."""
    found = grimp.build_graph(*PACKAGES, cache_dir=None, exclude_type_checking_imports=not type_checking)
    return {module: found.find_modules_directly_imported_by(module) for module in found.modules}


def lines(paths: Iterable[Path]) -> int:
    """Lines of some files."""
    return sum(len(path.read_text("utf-8").splitlines()) for path in paths)


def classes(path: Path) -> Iterator[str]:
    """Names of a file's classes, nested ones left out."""
    return (node.name for node in ast.parse(path.read_text("utf-8")).body if isinstance(node, ast.ClassDef))


def twice() -> Iterator[str]:
    """Class names that several files of a package define."""
    for source in PACKAGES.values():
        homes: dict[str, list[str]] = defaultdict(list)
        for path in sorted(source.rglob("*.py")):
            for name in classes(path):
                homes[name].append(str(path.relative_to(ROOT)))
        yield from (f"class {name} is defined in {' and '.join(found)}" for name, found in homes.items()
                    if len(found) > 1)


def cycles(imports: dict[str, set[str]]) -> Iterator[str]:
    """A cycle of imports, if there is one."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        yield "import cycle: " + " -> ".join(error.args[1])


def of_the_lab(imports: dict[str, set[str]]) -> Iterator[str]:
    """Imports of the lab by the core."""
    for module, found in sorted(imports.items()):
        if re.match(r"shoal(\.|$)", module):
            yield from (f"{module} imports {other}" for other in sorted(found) if other.startswith("shoal_lab"))


def crowded(paths: Iterable[Path]) -> Iterator[str]:
    """Folders with more files at one level than one can see through."""
    for folder, number in Counter(path.parent for path in paths).items():
        if number > MOST_IN_FOLDER and folder.name not in ROWS:
            yield f"{folder.relative_to(ROOT)} has {number} files at one level, more than {MOST_IN_FOLDER}"


def looked_up(paths: Iterable[Path]) -> Iterator[str]:
    """Lookups by name of what components declare."""
    trees = {path: ast.parse(path.read_text("utf-8")) for path in paths}
    names = {name for file in COMPONENTS for name in declared(trees[PACKAGES["shoal"] / file])} - {*CONFIGS}
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in LOOKUPS:
                found = node.args[1]
                if isinstance(found, ast.Constant) and found.value in names:
                    yield f"{path.relative_to(ROOT)}:{node.lineno} looks up {found.value!r}, which components declare"


def vague(paths: Iterable[Path]) -> Iterator[str]:
    """Identifiers that say too little."""
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names = (getattr(node, field, None) for field in ("id", "arg", "attr", "name"))
            yield from (f"{path.relative_to(ROOT)}:{node.lineno} is named {name}" for name in names if name in VAGUE)


def unmerged(paths: Iterable[Path]) -> Iterator[str]:
    """Marks of a merge that was not finished; in code they are no syntax."""
    for path in paths:
        if any(line.startswith(("<<<<<<< ", ">>>>>>> ")) for line in path.read_text("utf-8").splitlines()):
            yield f"{path.relative_to(ROOT)} has marks of an unfinished merge"


def declared(tree: ast.Module) -> Iterator[str]:
    """Public attributes, properties and methods of a module's classes."""
    for one in (item for node in tree.body if isinstance(node, ast.ClassDef) for item in node.body):
        name = one.target.id if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name) else (
            one.name if isinstance(one, ast.FunctionDef) else "_")
        if not name.startswith("_"):
            yield name


def reachable(imports: dict[str, set[str]], start: str) -> set[str]:
    """Modules that `start` imports, and those that these import; `start` itself too."""
    seen, ahead = {start}, [start]
    while ahead:
        new = imports[ahead.pop()] - seen
        seen |= new
        ahead += new
    return seen


def path_of(module: str) -> Path:
    """A module's file."""
    package, *rest = module.split(".")
    place = PACKAGES[package].joinpath(*rest)
    return place / "__init__.py" if place.is_dir() else place.with_suffix(".py")


if __name__ == "__main__":
    sys.exit(main())
