"""How models of the table are drawn from where their files do not say."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import constants

import shoal
from gguf_words import spoken
from hub_server import Hub
from shoal.engine.loading.generation_config import FALLBACK, filled
from shoal.hub.names import entry_of, table

ROW = table()["lfm2:8b-a1b"]


def held(folder: Path, file: str, **said: float) -> None:
    """A tiny model in the cache, in place of that of a row."""
    snapshot = Path(constants.HF_HUB_CACHE) / f"models--{ROW.repository.replace('/', '--')}" / "snapshots" / "0a"
    snapshot.mkdir(parents=True)
    spoken(folder, **{f"general.sampling.{key}": value for key, value in said.items()}).rename(snapshot / file)


@pytest.mark.quick(5)
@pytest.mark.parametrize(("said", "drawn", "where"), [
    ({}, ROW.sampling, ROW.sampling_source),
    ({"temp": 0.5}, {"temperature": 0.5}, "files"),
    ({"penalty_repeat": 1.5}, {**ROW.sampling, "repetition_penalty": 1.5}, ROW.sampling_source),
])
def test_files_come_first_then_the_table(said: dict[str, float], drawn: dict[str, float], where: str, at_hub: Hub,
                                         tmp_path: Path) -> None:
    held(tmp_path, ROW.file, **said)
    engine = shoal.load(ROW.name, dtype="float32")
    assert (engine.sampling, engine.sampling_from) == (drawn, where)
    assert filled({}, engine.sampling)["temperature"] == drawn["temperature"] != FALLBACK["temperature"]


def test_another_quantisation_is_the_same_model(at_hub: Hub, tmp_path: Path) -> None:
    held(tmp_path, "LFM2-Q8_0.gguf")
    assert shoal.load(f"{ROW.repository}:Q8_0", dtype="float32").sampling == ROW.sampling
    assert entry_of("org/other") is None and entry_of("granite4") is None and entry_of("./path") is None
