"""Headers and configs of files that other tools made, changed at random: read, or refused in one line."""

from __future__ import annotations

import copy
import json
import random
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

import shoal
from families import RECURRENT
from gguf_fixtures import CLASSICS, HYBRIDS
from gguf_models import fuzzed
from shoal.model.gguf.config import config_of
from shoal.model.gguf.file import GgufFile
from shoal.model.gguf.source import GgufSource
from shoal.model.packed.build import build
from shoal.model.packed.shape import shape_of

FOLDER = Path(__file__).parents[1] / "fixtures" / "quantised"
FORMS = sorted(path.name for path in FOLDER.iterdir() if path.is_dir())
ODD: list[Any] = [None, -1, 0, 1, 3, 7, 1 << 40, 2.5, float("nan"), True, "x", "", [], [1], [0, 9], {}, {"a": 1}]
TYPES = ["I32", "U8", "F16", "F8_E4M3", "BF16", "F64"]
GONE = object()
STRICT = hasattr(LlamaConfig, "validate_architecture")
"""Whether transformers checks the types of entries."""


def places(entries: Any) -> Iterator[tuple[Any, Any]]:
    """Each container inside of some JSON, and a key of it."""
    pairs = entries.items() if isinstance(entries, dict) else enumerate(entries)
    for key, inside in list(pairs):
        yield entries, key
        if isinstance(inside, dict | list):
            yield from places(inside)


def altered(entries: Any, drawn: random.Random, odd: list[Any]) -> None:
    """Give some entries other values, or take them out."""
    for _ in range(drawn.randint(1, 3)):
        if found := list(places(entries)):
            container, key = drawn.choice(found)
            value = drawn.choice(odd)
            if value is GONE:
                del container[key]
            else:
                container[key] = copy.deepcopy(value)


def another_header(weights: bytes, drawn: random.Random) -> bytes:
    """A file of safetensors with a header that says something else of its tensors."""
    size = struct.unpack("<Q", weights[:8])[0]
    header = json.loads(weights[8 : 8 + size])
    altered(header, drawn, [*ODD, *TYPES, GONE])
    said = json.dumps(header).encode()
    return struct.pack("<Q", len(said)) + said + weights[8 + size :]


def another_config(config: bytes, drawn: random.Random) -> bytes:
    """A config that says something else, mostly of how weights are stored."""
    entries = json.loads(config)
    altered(entries["quantization_config"] if drawn.random() < 0.6 else entries, drawn, [*ODD, GONE])
    return json.dumps(entries).encode()


def damaged(weights: bytes, config: bytes, drawn: random.Random) -> tuple[bytes, bytes]:
    """Weights and config of which one has other bytes or says something else."""
    way = drawn.randrange(6)
    if way == 0:
        return fuzzed(weights, drawn, 8 + struct.unpack("<Q", weights[:8])[0]), config
    if way == 1:
        return weights, fuzzed(config, drawn, len(config))
    return (another_header(weights, drawn), config) if way == 2 else (weights, another_config(config, drawn))


@pytest.mark.skipif(not STRICT, reason="this transformers lets entries of any type through")
@pytest.mark.parametrize("count", [100, pytest.param(10_000, marks=pytest.mark.slow)])
def test_changed_headers_and_configs_end_in_a_line_or_a_model(count: int, tmp_path: Path) -> None:
    drawn, refused = random.Random(count), 0
    whole = {form: [(FOLDER / form / name).read_bytes() for name in ("model.safetensors", "config.json")]
             for form in FORMS}
    for number in range(count):
        form = drawn.choice(FORMS)
        weights, config = damaged(*whole[form], drawn)
        (tmp_path / "model.safetensors").write_bytes(weights)
        (tmp_path / "config.json").write_bytes(config)
        try:
            shoal.load(str(tmp_path), dtype="float32", backend="packed")
        except (OSError, ValueError) as error:
            assert str(error) and "\n" not in str(error), (number, form)
            refused += 1
        except Exception as error:
            raise AssertionError((number, form)) from error
    assert count / 3 < refused < count


@pytest.mark.parametrize(("entry", "value", "why"), [
    ("head_dim", -1, "the config says head_dim -1; it must be from 1 to 65536"),
    ("num_hidden_layers", 1 << 40, "the config says num_hidden_layers 1099511627776; it must be from 1 to 65536"),
    ("intermediate_size", -1, "the config says intermediate_size -1; it must be from 0 to 2147483648"),
    ("num_attention_heads", 3, r"contradicts itself: The hidden size \(64\) is not|asks for \[112, 64\]"),
    ("rope_parameters", {"rope_type": 7, "rope_theta": 1e4}, "rope_type.: 7, .*make no rotary embedding"),
    ("rope_parameters", {"rope_type": "default", "rope_theta": None}, "make no rotary embedding"),
    ("rope_parameters", {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1e9},
     "the config says partial_rotary_factor 1000000000.0; it must be from 0 to 1"),
    ("id2label", "x", "contradicts itself: AttributeError|id2label should be a dictionary"),
    ("model_type", {"llama": 1}, "the config says model_type {'llama': 1}; it must be a name"),
    ("mlp_bias", 2.5, "contradicts itself: .*mlp_bias|without .*mlp.down_proj.bias"),
])
def test_odd_entries_of_a_config(entry: str, value: Any, why: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes((FOLDER / "gptq-4" / "model.safetensors").read_bytes())
    config = json.loads((FOLDER / "gptq-4" / "config.json").read_text("utf-8")) | {entry: value}
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    with pytest.raises(ValueError, match=why) as found:
        shoal.load(str(tmp_path), backend="packed")
    assert "\n" not in str(found.value)


WHOLE, REAL, FLAG, TEXT, LIST = (4, 5), 6, 7, 8, 9
"""Types of metadata in GGUF files."""
NUMBERS = [0, 1, 2, 3, 5, 7, 9, 64, 1 << 20, (1 << 31) - 1, (1 << 32) - 1]


def place_of(name: str, raw: bytes) -> int:
    """Where the name of an entry or of a tensor ends."""
    held = struct.pack("<Q", len(name)) + name.encode()
    return raw.index(held) + len(held)


def another_entry(raw: bytearray, place: int, drawn: random.Random) -> None:
    """Give an entry of a GGUF file another value of its type, or a list another number."""
    kind, place = struct.unpack_from("<I", raw, place)[0], place + 4
    if kind == LIST:
        kind, count = struct.unpack_from("<IQ", raw, place)
        place += 12 + 4 * drawn.randrange(count)
    if kind in WHOLE:
        struct.pack_into("<I", raw, place, drawn.choice(NUMBERS))
    elif kind == REAL:
        struct.pack_into("<f", raw, place, drawn.choice([0.0, -1.0, 0.5, 1e30, 1e-30, float("nan"), float("inf")]))
    elif kind == FLAG:
        raw[place] ^= 1
    elif kind == TEXT:
        raw[place + 8] = drawn.randrange(256)


def another_tensor(raw: bytearray, place: int, drawn: random.Random) -> None:
    """Give a tensor of a GGUF file another name, size or type."""
    sizes = place + 4
    count = struct.unpack_from("<I", raw, sizes - 4)[0]
    way = drawn.randrange(3)
    if way == 0:
        raw[place - 1 - drawn.randrange(8)] ^= 1
    elif way == 1:
        raw[sizes + 8 * drawn.randrange(count)] ^= drawn.choice([1, 2, 4, 32])
    else:
        struct.pack_into("<I", raw, sizes + 8 * count, drawn.choice([0, 1, 2, 8, 12, 39]))


@pytest.mark.skipif(not RECURRENT, reason="this transformers has other modules")
@pytest.mark.parametrize("count", [150, pytest.param(10_000, marks=pytest.mark.slow)])
def test_changed_entries_of_any_architecture_end_in_a_line_or_a_model(count: int, tmp_path: Path) -> None:
    drawn, refused, path = random.Random(count), 0, tmp_path / "model.gguf"
    headers = {made.path: GgufFile(made.path).header for made in (*HYBRIDS, *CLASSICS)}
    own = {whole: [key for key in header.metadata if not key.startswith(("general.", "tokenizer."))]
           for whole, header in headers.items()}
    for number in range(count):
        whole = drawn.choice(list(headers))
        raw = bytearray(whole.read_bytes())
        for _ in range(drawn.randint(1, 2)):
            inside = drawn.random() < 0.75
            name = drawn.choice(own[whole] if inside else [*headers[whole].tensors])
            change = another_entry if inside else another_tensor
            change(raw, place_of(name, whole.read_bytes()), drawn)
        path.write_bytes(raw)
        try:
            file = GgufFile(path)
            config = config_of(file)
            shape_of(config)
            if number % 5 == 0:
                build(config, GgufSource(file, config), torch.float32, torch.device("cpu"))
        except ValueError as error:
            assert "\n" not in str(error), (number, whole.name)
            refused += 1
        except Exception as error:
            raise AssertionError((number, whole.name)) from error
    assert count / 3 < refused < count
