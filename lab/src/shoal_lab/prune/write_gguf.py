"""Writes a GGUF file again without some layers, or without some neurons of its MLPs, with the `gguf` package.

Bytes are copied if whole rows stay: all of a layer that is not cut, gate and up of one that is. The columns of down do
not stay block by block, so down is quantised again.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from shoal.engine.loading.checkpoint import NOTE
from shoal.errors import Unsupported, needs
from shoal.model.config import widths_of, with_widths
from shoal.model.gguf.config import config_of
from shoal.model.gguf.file import GgufFile
from shoal.model.gguf.header import GgmlType, is_gguf
from shoal.model.gguf.metadata import Metadata
from shoal.model.gguf.source import GgufSource
from shoal.model.transform import DropLayers, NarrowMLPs

_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
_ROWS = re.compile(r"ffn_(gate|up)\.(weight|bias)")
_OF_FIVE_BITS = ("Q5_0", "Q5_1", "Q5_K", "Q6_K")
_FINER = {kind.name: "Q8_0" if kind.name in _OF_FIVE_BITS else "Q5_1" for kind in GgmlType
          if not kind.is_plain and kind is not GgmlType.Q8_0}
"""New type of down: one step finer than before, so that little is lost; others keep their type."""
_PLAIN = "F16"
"""New type of down if the kept neurons do not fill whole blocks."""
_UNEVEN = {"llama": "deci", "deci": "deci"}
"""Architecture -> llama.cpp's name for it with MLPs of different widths; it loads no other such architecture."""
_SLIDING = "sliding_attention"
_FOLDER = "or write a folder, which Shoal loads: --out DIR"


@dataclass(frozen=True)
class _Part:
    """A tensor of the new file: its name, type and shape, its old tensor, and the rows or columns that stay.

    `old` is a tensor of the `gguf` package; `rows` and `columns` are None if all stay.
    """

    name: str
    type: Any
    shape: tuple[int, ...]
    old: Any
    rows: Sequence[int] | None = None
    columns: Sequence[int] | None = None


def check(source: str, target: Path, uneven: bool = False) -> None:
    """Refuse what cannot be written, before work begins.

    Args:
        source, target: files.
        uneven: whether layers will have MLPs of different widths.

    Raises:
        ValueError: the target exists, or its folder does not.
        Unsupported: the source is not a GGUF file, or not of a supported kind, or the `gguf` package is missing.
    """
    if target.exists():
        raise ValueError(f"{str(target)!r} is there already; name another file, or remove that one")
    if not target.resolve().parent.is_dir():
        raise ValueError(f"there is no folder {str(target.resolve().parent)!r} to write {target.name!r} to")
    if not is_gguf(Path(source)):
        raise Unsupported(f"pruning {source!r} to a GGUF file", "it is none itself", "Convert it first, with "
                          f"convert_hf_to_gguf.py of llama.cpp, {_FOLDER}")
    with needs("prune", "writing a GGUF file", "shoal-lab"):
        import gguf  # noqa: F401
    with GgufFile(source) as file:
        _named(Metadata(file.header).architecture, uneven)


def write(source: Path, change: DropLayers | NarrowMLPs, target: Path, note: Mapping[str, Any],
          down: str | None = None) -> dict[str, int]:
    """Write the file; on failure, a part of it stays.

    Args:
        source: a GGUF file that Shoal reads.
        change: what is left out of it.
        target: the new file.
        note: what was done, for the metadata.
        down: type of matrices that are quantised again, one that the `gguf` package writes; None for `_FINER`.

    Returns:
        Types of the matrices that were quantised again, with their numbers.

    Raises:
        Unsupported: files of this architecture cannot describe the result.
        ValueError: the change does not fit the model, or `down` does not fit the number of neurons.
        OSError: the file cannot be written.
    """
    gguf, writer, parts, after = _planned(source, change, note, down)
    _fill(gguf, writer, parts, target)
    _check_same(after, target)
    return dict(Counter(part.type.name for part in parts if part.columns is not None))


def size(source: Path, change: DropLayers | NarrowMLPs, note: Mapping[str, Any], down: str | None = None) -> int:
    """Size in bytes of the file that `write` would write; arguments as there."""
    gguf, writer, parts, _ = _planned(source, change, note, down)
    with TemporaryDirectory() as folder:
        head = Path(folder) / "head.gguf"
        _begin(gguf, writer, parts, head)
        writer.close()
        sizes = [head.stat().st_size, *(_nbytes(gguf, part) for part in parts)]
    whole: int = writer.data_alignment
    return sum(-(-one // whole) * whole for one in sizes)


def _planned(
    source: Path, change: DropLayers | NarrowMLPs, note: Mapping[str, Any], down: str | None
) -> tuple[Any, Any, list[_Part], Any]:
    """The package, the writer, the new tensors, and the config of the result."""
    import gguf

    file = GgufFile(source)
    before = config_of(file)
    after, _ = change(before, GgufSource(file, before))
    after = with_widths(after, widths_of(after))
    widths, gone = widths_of(before), change.layers if isinstance(change, DropLayers) else ()
    layers = [layer for layer in range(len(widths)) if layer not in gone]
    kept = change.kept if isinstance(change, NarrowMLPs) else [range(width) for width in widths]
    if _SLIDING in _kinds(before) and _SLIDING not in _kinds(after):
        raise Unsupported(f"a GGUF file of {before.model_type!r} with no layer left whose window slides",
                          "llama.cpp loads none", f"Keep one of them, {_FOLDER}")
    reader = gguf.GGUFReader(source)
    parts = list(_parts(gguf, reader, layers, widths, kept, down))
    return gguf, _writer(gguf, reader, after, layers, note), parts, after


def _parts(gguf: Any, reader: Any, layers: Sequence[int], widths: Sequence[int], kept: Sequence[Sequence[int]],
           down: str | None) -> Iterator[_Part]:
    """The new file's tensors, in the order of the old one's."""
    for tensor in reader.tensors:
        shape, found = tuple(map(int, tensor.shape[::-1])), _LAYER.fullmatch(tensor.name)
        if found is None:
            yield _Part(tensor.name, tensor.tensor_type, shape, tensor)
        elif int(found[1]) in layers:
            layer = int(found[1])
            part = _Part(f"blk.{layers.index(layer)}.{found[2]}", tensor.tensor_type, shape, tensor)
            whole = len(kept[layer]) == widths[layer]
            yield part if whole else _cut(gguf, part, found[2], widths[layer], kept[layer], down)


def _cut(gguf: Any, part: _Part, place: str, width: int, kept: Sequence[int], down: str | None) -> _Part:
    """What the kept neurons leave of a tensor of their layer. Gate may lie above up, in one matrix."""
    if _ROWS.fullmatch(place):
        rows = [first + one for first in range(0, part.shape[0], width) for one in kept]
        return replace(part, shape=(len(rows), *part.shape[1:]), rows=rows)
    if place != "ffn_down.weight":
        return part
    kind = gguf.GGMLQuantizationType[down or _FINER.get(part.type.name, part.type.name)]
    if len(kept) % gguf.GGML_QUANT_SIZES[kind][0]:
        if down is not None:
            raise ValueError(f"{part.name} as {down} has {len(kept)} neurons in a row; it must be a multiple of "
                             f"{gguf.GGML_QUANT_SIZES[kind][0]}. Keep such multiples, or take {_PLAIN}")
        kind = gguf.GGMLQuantizationType[_PLAIN]
    return replace(part, type=kind, shape=(part.shape[0], len(kept)), columns=kept)


def _writer(gguf: Any, reader: Any, after: Any, layers: Sequence[int], note: Mapping[str, Any]) -> Any:
    """A writer with the old file's metadata, per kept layer, and the changes."""
    kinds, old = gguf.GGUFValueType, reader.fields["general.architecture"].contents()
    count, widths = int(reader.fields[f"{old}.block_count"].contents()), widths_of(after)
    uneven = len(set(widths)) > 1
    name = _named(old, uneven)
    width = (list(widths), kinds.ARRAY, kinds.UINT32) if uneven else (widths[0], kinds.UINT32)
    new: dict[str, tuple[Any, ...]] = {
        NOTE: (json.dumps(note), kinds.STRING), f"{name}.block_count": (len(layers), kinds.UINT32),
        f"{name}.feed_forward_length": width}
    sliding = [kind == _SLIDING for kind in _kinds(after)]
    if len(layers) < count and any(sliding):
        new[f"{name}.attention.sliding_window_pattern"] = (sliding, kinds.ARRAY, kinds.BOOL)
    writer = gguf.GGUFWriter(None, name)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        value = field.contents()
        if field.types[0] == kinds.ARRAY and field.name.startswith(f"{old}.") and len(value) == count:
            value = [value[layer] for layer in layers]
        if value != []:  # the package writes no empty arrays
            writer.add_key_value(re.sub(rf"^{old}\.", f"{name}.", field.name), value, field.types[0], field.types[-1])
    for key, told in new.items():
        writer.kv_data[0].pop(key, None)
        writer.add_key_value(key, *told)
    writer.data_alignment = int(reader.alignment)
    return writer


def _named(architecture: str, uneven: bool) -> str:
    """The architecture of the new file."""
    name = _UNEVEN.get(architecture) if uneven else architecture
    if name is None:
        raise Unsupported(f"a GGUF file of architecture {architecture!r} with MLPs of different widths",
                          f"llama.cpp loads that of {', '.join(_UNEVEN)} alone", f"Add --uniform, {_FOLDER}")
    return name


def _kinds(config: Any) -> Sequence[str]:
    return getattr(config, "layer_types", None) or ()


def _nbytes(gguf: Any, part: _Part) -> int:
    return math.prod(gguf.quant_shape_to_byte_shape(part.shape, part.type))


def _begin(gguf: Any, writer: Any, parts: Sequence[_Part], target: Path) -> None:
    """Write everything before the tensors' values."""
    for part in parts:
        writer.add_tensor_info(part.name, part.shape, np.dtype(np.float32), _nbytes(gguf, part), raw_dtype=part.type)
    writer.write_header_to_file(target)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()


def _fill(gguf: Any, writer: Any, parts: Sequence[_Part], target: Path) -> None:
    """Write tensor by tensor."""
    try:
        _begin(gguf, writer, parts, target)
        for part in parts:
            data = part.old.data if part.rows is None else part.old.data[part.rows]
            if part.columns is not None:
                values = gguf.quants.dequantize(data, part.old.tensor_type)[:, part.columns]
                data = gguf.quants.quantize(values, part.type)
            writer.write_tensor_data(np.ascontiguousarray(data))
    finally:
        writer.close()


def _check_same(after: Any, target: Path) -> None:
    """Refuse a file that is read back as another model, for architectures in which a layer's index has a meaning."""
    with GgufFile(target) as file:
        wanted, found = after.to_dict(), config_of(file).to_dict()
    wrong = sorted(key for key in wanted.keys() | found.keys() if wanted.get(key) != found.get(key))
    if wrong:
        raise Unsupported(f"a GGUF file of model type {after.model_type!r} without these layers",
                          f"its metadata cannot say what becomes of {', '.join(wrong)}", f"Drop others, {_FOLDER}")
