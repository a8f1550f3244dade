"""What names of models mean, and the table of short names."""

from __future__ import annotations

import re

import pytest

from shoal.hub.choose import quant_of
from shoal.hub.names import Wanted, parse, table
from shoal.types import Sampling


@pytest.mark.quick(20)
@pytest.mark.parametrize(("name", "repository", "choice", "revision"), [
    ("org/name", "org/name", "", None),
    ("unsloth/Qwen3.5-4B-GGUF:Q4_K_M", "unsloth/Qwen3.5-4B-GGUF", "Q4_K_M", None),
    ("org/name:some file.gguf", "org/name", "some file.gguf", None),
    ("org/name:folder/file.gguf", "org/name", "folder/file.gguf", None),
    ("hf.co/org/name:Q8_0", "org/name", "Q8_0", None),
    ("https://huggingface.co/org/name", "org/name", "", None),
    ("https://huggingface.co/org/name/", "org/name", "", None),
    ("https://huggingface.co/org/name/blob/main/a/b.gguf", "org/name", "a/b.gguf", None),
    ("https://huggingface.co/org/name/resolve/v2/b.gguf?download=true", "org/name", "b.gguf", "v2"),
    ("qwen3:4b", "unsloth/Qwen3-4B-GGUF", "Qwen3-4B-Q4_K_M.gguf", None),
    ("Qwen3:4B", "unsloth/Qwen3-4B-GGUF", "Qwen3-4B-Q4_K_M.gguf", None),
    ("qwen3:4b-q8_0", "unsloth/Qwen3-4B-GGUF", "Q8_0", None),
    ("gpt-oss", "ggml-org/gpt-oss-20b-GGUF", "gpt-oss-20b-mxfp4.gguf", None),
    ("gpt2", "gpt2", "", None),
])
def test_spellings(name: str, repository: str, choice: str, revision: str | None) -> None:
    assert parse(name) == Wanted(name, repository, choice, revision)


@pytest.mark.quick(12)
@pytest.mark.parametrize("name", ["", ".", "./model", "../a/b", "/models/a", "~/a", "a/b/c", "a b", "C:\\m\\a.gguf",
                                  "models/missing.gguf", "missing.gguf", "org/name:"])
def test_paths_are_no_names(name: str) -> None:
    assert parse(name) is None


def test_only_spelled_names_are_shoals_own() -> None:
    assert [parse(name).spelled for name in ("org/name", "gpt2", "org/name:Q8_0", "qwen3:4b", "hf.co/org/name")] == [
        False, False, True, True, True]


def test_a_short_name_with_several_matches_lists_them() -> None:
    with pytest.raises(ValueError, match=r"^'granite4' may be granite4:micro, granite4:tiny-h: give one of them$"):
        parse("granite4")


def test_a_short_name_of_nothing_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"^unknown model 'qwen3:5b'. Did you mean 'qwen3:\w+'\? Known: deepseek"):
        parse("qwen3:5b")


def test_the_table() -> None:
    """As committed: every entry names its source, a file with a quantisation, and numbers that its names bear out."""
    rows = table().values()
    assert 10 <= len(rows) <= 40
    for row in rows:
        assert re.fullmatch(r"[a-z0-9.-]+:[a-z0-9.-]+", row.name) and row.repository.count("/") == 1
        assert row.file.endswith(".gguf") and quant_of(row.file) and row.source.startswith("https://")
        assert row.licence and row.purpose and row.billions >= 0
        assert row.sampling_source.startswith("https://") if row.sampling else not row.sampling_source
        Sampling(**row.sampling)
    assert len({(row.repository, row.file) for row in rows}) == len(rows)
