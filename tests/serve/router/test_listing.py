"""The names of models: of paths, of folders, aliases, and names that mean two."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.serve.router.listing import Listed, listed, match, name_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for path in ("a.gguf", "mmproj-a.gguf", "notes.txt", "one/One-Q4_K_M.gguf", "one/mmproj-F16.gguf",
                 "two/x-Q4_0.gguf", "two/x-Q8_0.gguf", "parts/p-00001-of-00002.gguf", "parts/p-00002-of-00002.gguf",
                 "hf/config.json", "hf/model.safetensors", "empty/readme.md", ".git/config.json"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_bytes(b"x")
    return tmp_path


def test_a_folder_holds_files_folders_of_files_and_folders_of_models(folder: Path) -> None:
    found = {one.name: Path(str(one.source)).relative_to(folder).as_posix() for one in listed([], str(folder))}
    assert found == {"a": "a.gguf", "hf": "hf", "one": "one/One-Q4_K_M.gguf", "parts": "parts/p-00001-of-00002.gguf",
                     "two/x-Q4_0": "two/x-Q4_0.gguf", "two/x-Q8_0": "two/x-Q8_0.gguf"}


def test_names_are_those_of_paths_or_what_was_typed(folder: Path) -> None:
    assert name_of(str(folder / "a.gguf")) == "a" and name_of(f"{folder}/hf/") == "hf"
    assert name_of("qwen3:4b") == "qwen3:4b" and name_of("org/name:Q4_K_M") == "org/name:Q4_K_M"
    assert name_of(None) == "default"


def test_aliases_are_further_names_or_further_models() -> None:
    found = listed(["qwen3:4b", "gemma3:4b"], aliases=[("fast", "qwen3:4b"), ("other", "org/other"), ("quick", "fast")])
    assert found == [Listed("qwen3:4b", "qwen3:4b", ("fast",)), Listed("gemma3:4b", "gemma3:4b"),
                     Listed("other", "org/other"), Listed("quick", "fast")]


def test_methods_belong_to_models_of_the_list() -> None:
    found = listed(["a", "b"], aliases=[("c", "b")], methods={"c": "full"})
    assert [one.method for one in found] == [None, "full"]
    with pytest.raises(ValueError, match="--method-for d: there is no such model; there are a, b"):
        listed(["a", "b"], methods={"d": "full"})


def test_a_name_of_two_models_is_refused_with_both(folder: Path) -> None:
    (folder / "more").mkdir()
    (folder / "more" / "a.gguf").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"the name 'a' would stand for both .*a\.gguf and .*more/a\.gguf; give one"):
        listed([str(folder / "a.gguf"), str(folder / "more" / "a.gguf")])
    with pytest.raises(ValueError, match="the name 'x' would stand for both one and two"):
        listed(["one", "two"], aliases=[("x", "one"), ("x", "two")])
    with pytest.raises(ValueError, match="the name 'two' would stand for both one and two"):
        listed(["one", "two"], aliases=[("two", "one")])
    assert len(listed(["one", "one"])) == 1  # named twice is one model


def test_folders_that_hold_nothing_are_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="it holds no model"):
        listed([], str(folder / "empty"))
    with pytest.raises(ValueError, match="it is no folder"):
        listed([], str(folder / "notes.txt"))


def test_what_requests_may_call_a_model() -> None:
    found = [Listed("qwen3:4b", "1"), Listed("qwen3:8b", "2"), Listed("gemma3:4b", "3", ("fast",)), Listed("a", "4"),
             Listed("a.gguf", "5"), Listed("m:latest", "6")]

    def sources(asked: str) -> list[str | None]:
        meant = match(asked, found)
        return [one.source for one in (meant if isinstance(meant, list) else [meant])]

    assert sources("qwen3:4b") == ["1"] and sources("fast") == sources("gemma3:4b") == sources("fast:latest") == ["3"]
    assert sources("gemma3") == ["3"]  # the only one
    assert sources("qwen3") == ["1", "2"]
    assert sources("a") == ["4"] and sources("a.gguf") == ["5"]  # the exact name first
    assert sources("m") == sources("m:latest") == ["6"]
    assert sources("qwen") == sources("") == []
