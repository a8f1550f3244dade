"""The tokenizer in a GGUF file: the same ids as llama.cpp and as the tokenizer that it was made from."""

from __future__ import annotations

import contextlib
import gc
import os
import unicodedata
from pathlib import Path
from typing import Any

import pytest

from gguf_models import gguf_bytes, metadata_of, tiny_model
from gguf_words import CONTROL, TEMPLATE, TEXT, byte_level, sentencepiece
from llama_cpp_oracle import Oracle
from shared_models import data_path
from shoal.errors import Unsupported
from shoal.model.gguf import tokenizer
from shoal.model.gguf.header import read_header
from shoal.model.gguf.metadata import vocabulary_of
from shoal.model.gguf.tokenizer import PRE_TOKENIZERS, implied_merges, merges_of, tokenizer_of

REAL = {"SmolLM2-135M-Instruct.Q4_1.gguf": [2, 0], "gemma-3-270m-q4_k_m.gguf": [1, 106],
        "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf": [151645, 151643]}
ODD = ["", "a", " ", "  two  spaces ", "\n", "\n\n\n x", "\t\ttabs", "1234567 1,234.56 ½ ² ١٢٣",
       "😀👩‍👩‍👧‍👦 🇫🇷", "I'LL don't WE'RE",
       "日本語の、漢字", "नमस्ते दुनिया", "\r\nfoo\r\n", "x" * 50, "a\u00a0b\u2003c", "def f(x):\n    return x**2  # да\n",
       "HTTPServer fooBar", "hello!!!???...", "a/b\\c", "'tis 'S"]


def file_with(folder: Path, words: dict[str, Any], architecture: str = "llama", **extra: Any) -> Path:
    path = folder / "words.gguf"
    count = len(words["tokenizer.ggml.tokens"])
    metadata = {**metadata_of(architecture, tiny_model(architecture).config), f"{architecture}.vocab_size": count}
    path.write_bytes(gguf_bytes({**metadata, **words, **extra}, {}))
    return path


def ids(tokenizer: Any, text: str) -> list[int]:
    found: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return found


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_every_pre_tokenizer_cuts_as_in_llama_cpp(pre: str, tmp_path: Path) -> None:
    _, words = byte_level(r"\s+|\S+")
    path = file_with(tmp_path, words, **{"tokenizer.ggml.pre": pre})
    tokenizer, oracle = tokenizer_of(read_header(path)), Oracle(path, words_only=True)
    for text in [*TEXT[:4], *ODD]:
        assert ids(tokenizer, text) == oracle.ids(text), text
        assert tokenizer.decode(ids(tokenizer, text)) == text
    oracle.close()


def gemma4(folder: Path) -> tuple[Path, dict[str, Any]]:
    """A file of Gemma 4's kind, with the merges that SentencePiece's files leave out, and the words of one of those."""
    words = sentencepiece(False)
    tokens, kinds = words["tokenizer.ggml.tokens"], words["tokenizer.ggml.token_type"]
    pairs = implied_merges(tokens, kinds, [-score for score in words["tokenizer.ggml.scores"]])
    merges = [f"{tokens[first]} {tokens[second]}" for first, second in pairs]
    return file_with(folder, words | {"tokenizer.ggml.model": "gemma4", "tokenizer.ggml.merges": merges}), words


def test_gemma4s_tokenizer_is_sentencepieces_with_its_merges(tmp_path: Path) -> None:
    path, words = gemma4(tmp_path)
    found = tokenizer_of(read_header(path))
    (tmp_path / "other").mkdir()
    twin = tokenizer_of(read_header(file_with(tmp_path / "other", words)))
    for text in [*TEXT[:4], *ODD]:
        assert found.decode(ids(found, text)) == text
        if "\n" not in text:
            assert ids(found, text) == ids(twin, text), text
    assert found("a b")["input_ids"][0] == found.bos_token_id


def test_gemma4s_tokenizer_gives_the_ids_of_llama_cpp(tmp_path: Path) -> None:
    path, _ = gemma4(tmp_path)
    found, oracle = tokenizer_of(read_header(path)), Oracle(path, words_only=True)
    for text in [*TEXT[:4], *ODD]:
        assert ids(found, text) == oracle.ids(text), text
    oracle.close()


@pytest.mark.parametrize("pre", ["qwen2", "llama-bpe", "gpt-2", "smollm"])
def test_the_ids_of_the_tokenizer_that_it_was_made_from(pre: str, tmp_path: Path) -> None:
    rules = PRE_TOKENIZERS[pre]
    backend, words = byte_level(rules.cuts[-1])
    if len(rules.cuts) > 1:
        pytest.importorskip("tokenizers")
        from tokenizers import pre_tokenizers

        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)])
    tokenizer = tokenizer_of(read_header(file_with(tmp_path, words, **{"tokenizer.ggml.pre": pre})))
    for text in [*TEXT[:4], "<|im_start|>user\nHi<|im_end|>"]:
        assert ids(tokenizer, text) == backend.encode(text).ids


def test_special_tokens_and_the_chat_template(tmp_path: Path) -> None:
    _, words = byte_level(r"\s+|\S+")
    header = read_header(file_with(tmp_path, words, **{"tokenizer.ggml.pre": "qwen2"}))
    tokenizer, found = tokenizer_of(header), vocabulary_of(header)
    assert found is not None and found.ends == [2, 0]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 0)
    assert tokenizer.chat_template == TEMPLATE
    messages = [{"role": "user", "content": "Hi"}]
    chat = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert ids(tokenizer, chat).count(1) == 2 and ids(tokenizer, chat).count(2) == 1
    assert tokenizer.decode(ids(tokenizer, chat)) == chat
    assert tokenizer.decode([1, *ids(tokenizer, "Hi"), 2], skip_special_tokens=True) == "Hi"
    assert all(token in tokenizer.all_special_tokens or tokenizer.convert_tokens_to_ids(token) < 3 for token in CONTROL)


@pytest.mark.parametrize(("bos", "eos", "expected"), [(True, False, [1]), (True, True, [1, 2]), (False, True, [2])])
def test_bos_and_eos(tmp_path: Path, bos: bool, eos: bool, expected: list[int]) -> None:
    _, words = byte_level(r"\s+|\S+")
    flags = {"tokenizer.ggml.add_bos_token": bos, "tokenizer.ggml.add_eos_token": eos, "tokenizer.ggml.pre": "gpt-2"}
    tokenizer = tokenizer_of(read_header(file_with(tmp_path, {**words, **flags})))
    assert [token for token in tokenizer("dog")["input_ids"] if token in (1, 2)] == expected


@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize("text", ["the quick", "and  the", "é the\n", "<table>the", "</s>the", "  a", "日 the 😀"])
def test_sentencepiece(tmp_path: Path, text: str, prefix: bool) -> None:
    path = file_with(tmp_path, sentencepiece(prefix))
    tokenizer, oracle = tokenizer_of(read_header(path)), Oracle(path, words_only=True)
    assert ids(tokenizer, text) == oracle.ids(text)
    oracle.close()
    if "<" not in text:
        assert tokenizer.decode(ids(tokenizer, text)) == text
    assert tokenizer(text)["input_ids"][0] == 1


MERGED = (["a", "b", "ab", "ba", "aba", "<s>"], [1, 1, 1, 1, 1, 3], [0.0, 0.0, 2.0, 1.0, 3.0, -9.0])


def test_merges_follow_from_scores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert implied_merges(*MERGED) == [(1, 0), (0, 1), (0, 3), (2, 0)]
    assert merges_of(*MERGED) == [("b", "a"), ("a", "b"), ("a", "ba"), ("ab", "a")]


def test_merges_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    expected = merges_of(*MERGED)
    (kept,) = (tmp_path / "shoal" / "merges").iterdir()
    whole = kept.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(tokenizer, "implied_merges", lambda *_: pytest.fail("they were to be read"))
        assert merges_of(*MERGED) == expected
    for damaged in (b"", whole[:-3], whole[:-4] + b"\x7f\0\0\0", whole.replace(b"<i4", b"<f4")):
        kept.write_bytes(damaged)
        assert merges_of(*MERGED) == expected and kept.read_bytes() == whole
    assert merges_of(MERGED[0], MERGED[1], [0.0, 0.0, 1.0, 2.0, 3.0, -9.0])[0] == ("a", "b")
    merges_of(["a", "b", "abc"], [1, 1, 1], [0.0, 0.0, 1.0])
    assert merges_of(["a", "b", "abc"], [1, 1, 1], [0.0, 0.0, 1.0]) == []


def test_merges_without_room_to_keep_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert len(merges_of(*MERGED)) == 4


def test_the_garbage_collector_runs_on(tmp_path: Path) -> None:
    _, words = byte_level(r"\s+|\S+")
    for pre in ("qwen2", "newest"):
        header = read_header(file_with(tmp_path, words, **{"tokenizer.ggml.pre": pre}))
        with contextlib.suppress(Unsupported):
            tokenizer_of(header)
        assert gc.isenabled()
    gc.disable()
    try:
        tokenizer_of(read_header(file_with(tmp_path, words, **{"tokenizer.ggml.pre": "qwen2"})))
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"tokenizer.ggml.pre": "newest"}, "pre-tokenizer 'newest'.*known are default"),
     ({"tokenizer.ggml.model": "bert"}, "model 'bert'"),
     ({"tokenizer.ggml.merges": ["ab"]}, "merge 'ab'; it must be two tokens"),
     ({"tokenizer.ggml.merges": ["nothing here"]}, "merges do not fit its tokens"),
     ({"tokenizer.ggml.token_type": [1, 1]}, "token_type must be"),
     ({"tokenizer.ggml.eos_token_id": 9999}, "token id, 0 to"),
     ({"tokenizer.ggml.tokens": "twice"}, "the token 'a' twice"), ({"tokenizer.ggml.model": "llama"}, "has no scores")],
)
def test_what_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    _, words = byte_level(r"\s+|\S+")
    if changes.get("tokenizer.ggml.tokens") == "twice":
        changes = {"tokenizer.ggml.tokens": ["a"] * len(words["tokenizer.ggml.tokens"])}
    path = file_with(tmp_path, {**words, "tokenizer.ggml.pre": "gpt-2", **changes})
    with pytest.raises(ValueError, match=message) as caught:
        tokenizer_of(read_header(path))
    assert isinstance(caught.value, Unsupported) == message.startswith(("pre-", "model 'b"))


def test_a_file_that_does_not_name_its_pre_tokenizer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is cut by the default one, as by llama.cpp, and a warning says so."""
    _, words = byte_level(r"\s+|\S+")
    words.pop("tokenizer.ggml.pre", None)
    found = [tokenizer_of(read_header(file_with(tmp_path, words))),
             tokenizer_of(read_header(file_with(tmp_path, {**words, "tokenizer.ggml.pre": "default"})))]
    assert caplog.text.count("does not name its pre-tokenizer") == 1
    oracle = Oracle(file_with(tmp_path, words), words_only=True)
    for text in [*TEXT, *ODD]:
        assert ids(found[0], text) == ids(found[1], text) == oracle.ids(text)
    oracle.close()


def test_no_tokenizer(tmp_path: Path) -> None:
    path = tmp_path / "file.gguf"
    path.write_bytes(gguf_bytes(metadata_of("llama", tiny_model("llama").config), {}))
    assert tokenizer_of(read_header(path)) is None


def real_texts() -> list[str]:
    files = sorted(data_path("flores200", "dev").glob("*.dev"))
    found = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()[:40]]
    return [*found, data_path("wikitext2", "valid.txt").read_text(encoding="utf-8")[:20000]]


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL)
def test_real_vocabularies(name: str) -> None:
    """Ids of real texts, both ways. Qwen's own tokenizer composes characters first, which llama.cpp does not."""
    path = model_file(name)
    header = read_header(path)
    tokenizer, oracle, words = tokenizer_of(header), Oracle(path, words_only=True), vocabulary_of(header)
    assert words is not None and words.ends == REAL[name] and set(words.ends) <= oracle.ends()
    marked = "".join(words.tokens[token] for token in words.of_kind(3)[:20])
    for text in [*real_texts(), *ODD, f"a{marked}b"]:
        composed = unicodedata.normalize("NFC", text)
        assert ids(tokenizer, composed) == oracle.ids(composed), text[:80]
        assert tokenizer.decode(ids(tokenizer, composed)) == composed
    oracle.close()


def model_file(name: str) -> Path:
    folder = Path(os.environ.get("SHOAL_MODELS") or Path.home() / ".cache" / "shoal-models")
    if not (folder / name).is_file():
        pytest.skip(f"{folder / name} is absent; put the GGUF files there, or point SHOAL_MODELS at their folder")
    return folder / name
