"""The tests' own files of encoders are those of llama.cpp's converter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import mmproj_files

MADE = json.loads((Path(__file__).parents[2] / "fixtures" / "mmproj.json").read_text("utf-8"))
_OWN = ("window_size", "image_min_pixels", "image_max_pixels", "preproc_max_tiles")
"""What tests set, so that little models take little pictures, where the converter leaves llama.cpp's own numbers."""


@pytest.mark.parametrize("kind", MADE)
def test_files_are_those_of_llama_cpp(kind: str, tmp_path: Path) -> None:
    model, _ = mmproj_files.filled(kind)
    mmproj_files.write_mmproj(tmp_path / "mmproj.gguf", model, kind)
    found, made = mmproj_files.facts_of(tmp_path / "mmproj.gguf"), MADE[kind]
    assert found["tensors"] == made["tensors"]
    said = {key: one for key, one in found["metadata"].items() if not key.endswith(_OWN)}
    assert said == {key: one for key, one in made["metadata"].items()}
