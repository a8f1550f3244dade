"""List the models on this machine: what to give as --model, their size, whether they fit, and their cards.

It looks for files and folders in $SHOAL_MODELS (by default ~/.cache/shoal-models), in the package of the default
model, in the Hub's cache, in LM Studio's folder and in Ollama's store. For known models that are absent it says how to
get them, and it lists the short names that `shoal pull` takes, with their sizes by parameters and quantisation. With
`--supported` it prints what runs the hundred model types that people run most, from a table made of the sweep over
every type of transformers.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from shoal import catalog
from shoal.cli.options import bring, common
from shoal.cli.options.parser import Parser
from shoal.hub.choose import choose, complete, models_of, quant_of
from shoal.hub.fetch import PART
from shoal.hub.names import Entry, Wanted, table
from shoal.hub.places import here, hub_cache, in_lm_studio, in_ollama, paths_in

EXAMPLES = """examples:
  shoal models
  shoal models --json
  shoal models --supported
"""
SUPPORTED = "supported.json"
"""Beside this file: rows with model_type, runs ("kernels", "modules" or "refused"), why, oracles."""
_BITS = {"4": 4.9, "8": 8.5}
"""Bits per weight of a whole file, by the width that its quantisation names."""
_WEIGHTS = (".safetensors", ".bin")
_ANSWER: dict[Any, str] = {True: "yes", False: "no", None: ""}


def add_arguments(parser: Parser) -> None:
    """Declare the options."""
    parser.add_argument("--supported", action="store_true", help="print the model types that people run most, what "
                        "runs them, and what that was compared with")
    common.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the list."""
    if args.supported:
        rows = supported()
        return common.show(args, {"types": rows}, _table(rows))
    import torch

    from shoal.engine.memory import amounts as memory

    found = held()
    room = memory.free(torch.device("cpu"))
    absent = {name: catalog.remedy(name) for name in catalog.KNOWN if name not in {model.name for model in found}}
    rows = [{**asdict(model), "fits": fits(model.nbytes, room)} for model in found]
    known = [{**asdict(entry), "about_bytes": about(entry), "fits": fits(about(entry), room)}
             for entry in table().values() if here(Wanted(entry.name, entry.repository, entry.file)) is None]
    begun = unfinished()
    value = {"models": rows, "free_bytes": room, "absent": absent, "known": known, "unfinished": begun}
    return common.show(args, value, "\n".join([_text(found, room, absent), *_further(known, begun)]))


def supported() -> list[dict[str, Any]]:
    """The rows of `SUPPORTED`, the types that most people run first."""
    rows: list[dict[str, Any]] = json.loads((files("shoal.cli") / SUPPORTED).read_text("utf-8"))
    return rows


def _table(rows: list[dict[str, Any]]) -> str:
    counts = Counter(row["runs"] for row in rows)
    head = (f"{len(rows)} model types that people run most: {counts['kernels']} run on the kernels, "
            f"{counts['modules']} on transformers' modules, {counts['refused']} are refused")
    cells = [("type", "runs on", "compared with", "but"),
             *((row["model_type"], row["runs"], ", ".join(row["oracles"]), row["why"]) for row in rows)]
    return "\n".join([head, *_aligned(cells)])


def _aligned(cells: Sequence[tuple[str, ...]]) -> list[str]:
    """Rows as lines, columns below one another."""
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def fits(nbytes: int | None, room: int | None) -> bool | None:
    """Whether a model of that size should fit into the free memory; None if one of the two is not known."""
    return None if room is None or nbytes is None else nbytes * bring.NEEDS < room


def about(entry: Entry) -> int | None:
    """Bytes of a model that is not here, by its parameters and its quantisation; None where these are not known."""
    found = _BITS.get(next(filter(str.isdigit, quant_of(entry.file)), ""))
    if quant_of(entry.file) == "MXFP4":
        found = _BITS["4"]
    return int(entry.billions * 1e9 * found / 8) if found and entry.billions else None


def unfinished() -> dict[str, int]:
    """Repositories of which a pull was interrupted, and the bytes of it that are here."""
    found: Counter[str] = Counter()
    for part in hub_cache().glob(f"models--*/blobs/*{PART}"):
        found["/".join(part.parts[-3].split("--")[1:])] += part.stat().st_size
    return dict(found)


def _further(known: list[dict[str, Any]], unfinished: dict[str, int]) -> list[str]:
    """Lines on what may be fetched."""
    lines = [f"unfinished: {name}, {size / 1e9:.2f} GB of it are here; shoal pull goes on" for name, size in
             unfinished.items()]
    if not known:
        return lines
    cells = [("shoal pull", "about GB", "fits", "licence", "for"), *(
        (row["name"], _gigabytes(row["about_bytes"]), _ANSWER[row["fits"]], row["licence"], row["purpose"])
        for row in known)]
    return [*lines, "", *_aligned(cells)]


def _gigabytes(nbytes: int | None) -> str:
    return "" if nbytes is None else f"{nbytes / 1e9:.2f}"


def _text(held: list[HeldModel], room: int | None, absent: dict[str, str]) -> str:
    free = "" if room is None else f"; {room / 1e9:.1f} GB of memory are free"
    lines = [f"{len(held)} models{free}"] if held else ["no model is on this machine"]
    cells = [("--model", "weights", "GB", "fits", "card"), *(_cells(model, room) for model in held)]
    lines += _aligned(cells) if held else []
    lines += [f"{model.name} cannot be loaded: {model.problem}" for model in held if model.problem]
    lines += [f"not here: {name}. {how}" for name, how in absent.items()]
    return "\n".join(lines)


def _cells(model: HeldModel, room: int | None) -> tuple[str, ...]:
    kind = f"{model.architecture}, {model.form}" if model.architecture else model.form
    return (model.name, kind, _gigabytes(model.nbytes), _ANSWER[fits(model.nbytes, room)], " or ".join(model.cards))


@dataclass(frozen=True)
class HeldModel:
    """A model on this machine.

    Attributes:
        name: what `--model` takes.
        title: what it is called elsewhere; the name where nothing else is known.
        form: the form of its weights, such as "GGUF, Q4_1 and F32".
        architecture: by its file or config.
        nbytes: bytes of its weights on disk.
        cards: names of the cards whose model has the same sizes.
        problem: why it cannot be loaded; empty where it can.
    """

    name: str
    title: str
    form: str = ""
    architecture: str = ""
    nbytes: int = 0
    cards: tuple[str, ...] = ()
    problem: str = ""


def held() -> list[HeldModel]:
    """All models that are found, known names first."""
    named = {name: path.resolve() for name in catalog.KNOWN if (path := catalog.place(name)) is not None}
    from shoal.model.gguf.splits import models_among

    others = [path for path in models_among(catalog.folder().glob("*.gguf")) if path.resolve() not in named.values()]
    folders = {path.parent for ending in _WEIGHTS for path in catalog.folder().glob(f"*/*{ending}")}
    return [*(_file(name, path, catalog.KNOWN[name].title) for name, path in named.items()),
            *(_file(path.stem, path, path.stem) for path in others),
            *(model for path in sorted(folders) if (model := _folder(path.name, path)) is not None), *_in_hub_cache(),
            *(model for name, folder in in_lm_studio() for model in _in_repository(name, folder, "LM Studio")),
            *(_file(name, path, f"{name}, in Ollama's store") for name, path in in_ollama())]


def _file(name: str, path: Path, title: str) -> HeldModel:
    """A GGUF file, by its header."""
    from shoal.model.gguf.header import Strings
    from shoal.model.gguf.splits import read_whole

    size = path.stat().st_size
    try:
        header, paths = read_whole(path)
        size = sum(part.stat().st_size for part in paths)
    except ValueError as error:
        return HeldModel(name, title, "GGUF", nbytes=size, problem=str(error))
    kind = str(header.metadata.get("general.architecture", ""))
    counts = Counter(tensor.type.name for tensor in header.tensors.values() if len(tensor.shape) > 1)
    form = "GGUF, " + " and ".join(name for name, _ in counts.most_common(2))
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    sizes = {"layers": header.metadata.get(f"{kind}.block_count"),
             "vocab": len(tokens) if isinstance(tokens, Strings) else None,
             "hidden": header.metadata.get(f"{kind}.embedding_length")}
    return HeldModel(name, title, form, kind, size, _cards(sizes))


def _in_hub_cache() -> Iterator[HeldModel]:
    from huggingface_hub import CacheNotFound, scan_cache_dir

    with suppress(CacheNotFound):
        for repo in sorted(scan_cache_dir(hub_cache()).repos, key=lambda repo: repo.repo_id):
            if repo.repo_type == "model" and repo.revisions:
                newest = max(repo.revisions, key=lambda revision: revision.last_modified)
                yield from _in_repository(repo.repo_id, newest.snapshot_path, "the Hub's cache")


def _in_repository(name: str, folder: Path, where: str) -> Iterator[HeldModel]:
    """The models of a repository that are here: its folder, and each of its GGUF files."""
    paths = paths_in(folder)
    if (whole := _folder(name, folder)) is not None:
        yield whole
    models = models_of(paths)
    quants = Counter(map(quant_of, models))
    short = {entry.file: entry.name for entry in table().values() if entry.repository == name}
    for path in models:
        quant = quant_of(path)
        typed = short.get(path) or f"{name}:{quant if quant and quants[quant] == 1 else path}"
        if complete(choose(Wanted(typed, name, path), paths), paths):
            yield _file(typed, folder / path, f"{path} of {name}, in {where}")
        else:
            yield HeldModel(typed, f"{path} of {name}", "GGUF", problem="parts are missing; shoal pull brings them")


def _folder(name: str, folder: Path) -> HeldModel | None:
    """A checkpoint in the Hugging Face format; None where a folder holds no such weights."""
    weights = [path for path in folder.rglob("*") if path.suffix in _WEIGHTS]
    if not weights:
        return None
    size = sum(path.stat().st_size for path in weights)
    endings = " and ".join(sorted({path.suffix[1:] for path in weights}))
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except OSError:
        return HeldModel(name, name, endings, nbytes=size, problem="it has no config.json")
    except ValueError:
        return HeldModel(name, name, endings, nbytes=size, problem="its config.json is no JSON")
    sizes = {"layers": config.get("num_hidden_layers"), "vocab": config.get("vocab_size"),
             "hidden": config.get("hidden_size")}
    dtype = config.get("dtype") or config.get("torch_dtype")
    form = f"{endings}, {dtype}" if dtype else endings
    return HeldModel(name, name, form, str(config.get("model_type", "")), size, _cards(sizes))


def _cards(sizes: Mapping[str, Any]) -> tuple[str, ...]:
    from shoal.engine.cards import card as cards

    return tuple(str(data["model"]["name"]) for _, data in cards.every() if data["model"].get("sizes") == sizes)
