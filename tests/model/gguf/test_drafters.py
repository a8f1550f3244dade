"""Drafters in GGUF files, as llama.cpp's converter makes them, are what the folders are that it made them of."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from assistants import HAS
from families import tiny
from gguf_drafters import FILES, TARGET, write_folder
from gguf_file import write_gguf
from shoal.engine.loading.load import engine_for
from shoal.errors import Unsupported
from shoal.methods.auto import Auto
from shoal.methods.dflash import DFlash
from shoal.methods.eagle import Eagle
from shoal.methods.mtp import Mtp
from shoal.speculative.drafter_files import DrafterFiles, check_kind, is_drafter, kind_of

KINDS = [kind for kind in FILES if HAS or kind != "mtp"]
CONSTANT = ("t2d",)
"""Names of tensors that the converter leaves out."""


@pytest.mark.parametrize("kind", KINDS)
def test_files_hold_what_folders_do(kind: str, tmp_path: Path) -> None:
    file, folder = DrafterFiles(FILES[kind][1]), DrafterFiles(write_folder(kind, tmp_path))
    for name in folder.below(""):
        if name not in CONSTANT:
            size = folder.size(name)
            assert torch.equal(file.take(name, *size).double(), folder.take(name, *size).double()), name
    file.check_taken()  # and nothing else
    assert is_drafter(FILES[kind][1]) and kind_of(FILES[kind][1]) == kind == kind_of(tmp_path)


METHODS: dict[str, Any] = {"eagle": Eagle, "dflash": DFlash}


@pytest.mark.parametrize("kind", METHODS)
def test_they_guess_as_the_folders_do_and_change_no_token(kind: str, tmp_path: Path) -> None:
    engine, make, folder = engine_for(tiny("llama")), METHODS[kind], write_folder(kind, tmp_path)
    ids, options = [[3, 14, 15, 9, 2, 6, 5]], {"max_new_tokens": 24, "ignore_eos": True}
    plain, by_folder, by_file, auto = (engine.generate(ids, method=one, **options)[0] for one in (
        "full", make(part=str(folder)), make(part=str(FILES[kind][1])), Auto(part=str(FILES[kind][1]))))
    assert by_file.tokens == by_folder.tokens == plain.tokens == auto.tokens
    found, wanted = by_file.stats, by_folder.stats
    assert (found.drafted, found.accepted) == (wanted.drafted, wanted.accepted) and found.drafted > 0


@pytest.mark.skipif(not HAS, reason="early transformers 5")
def test_an_assistant_beside_the_model_is_found(tmp_path: Path) -> None:
    model = Path(shutil.copy(TARGET, tmp_path))
    with pytest.raises(Unsupported, match="no layer for further tokens"):
        shoal.load(str(model), dtype="float32").generate([5, 6, 7, 8], method="mtp", max_new_tokens=4)
    shutil.copy(FILES["mtp"][1], tmp_path)
    engine = shoal.load(str(tmp_path), dtype="float32")  # by the folder, as by any name
    plain, found, named = (engine.generate([5, 6, 7, 8], max_new_tokens=16, method=one) for one in (
        "full", Mtp(stop=0.0), Mtp(part=str(FILES["mtp"][1]), stop=0.0)))
    assert found.tokens == named.tokens == plain.tokens
    assert found.stats.drafted == named.stats.drafted > 0


def test_others_are_refused_in_a_line(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    write_gguf(tiny("llama"), model)
    with pytest.raises(Unsupported, match="a GGUF file of architecture 'llama': Shoal reads eagle3, dflash, gemma4-as"):
        kind_of(model)
    with pytest.raises(Unsupported, match="with method dflash: it is of kind 'eagle'. Use method eagle, or auto"):
        check_kind(str(FILES["eagle"][1]), "dflash")
    engine = engine_for(tiny("llama", layers=8))
    whole = FILES["eagle"][1].read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in (10, 3000, len(whole) - 2000):
        cut.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="cut.gguf"):
            engine.generate([1, 2], method=Eagle(part=str(cut)), max_new_tokens=4)
