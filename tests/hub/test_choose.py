"""Which files of a repository make a model."""

from __future__ import annotations

import pytest

from shoal.hub.choose import Chosen, choose, complete, models_of, quant_of
from shoal.hub.names import Wanted

MANY = ["README.md", "X-Q8_0.gguf", "X-Q4_K_M.gguf", "X-UD-Q4_K_XL.gguf", "X-BF16.gguf", "imatrix_unsloth.gguf",
        "mmproj-F16.gguf", "X-Q2_K.gguf"]


def chosen(choice: str, paths: list[str]) -> Chosen:
    name = f"org/x:{choice}" if choice else "org/x"
    return choose(Wanted(name, "org/x", choice), paths)


@pytest.mark.quick(20)
@pytest.mark.parametrize(("path", "quant"), [
    ("Qwen3.5-4B-Q4_K_M.gguf", "Q4_K_M"), ("Qwen3-4B.Q4_K_M.gguf", "Q4_K_M"), ("a-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"),
    ("gemma-4-E2B_q4_0-it.gguf", "Q4_0"), ("gpt-oss-20b-mxfp4.gguf", "MXFP4"), ("a-iq3_xxs.gguf", "IQ3_XXS"),
    ("Q4_K_M/Big-Q4_K_M-00001-of-00003.gguf", "Q4_K_M"), ("a-BF16.gguf", "BF16"), ("a-f16.gguf", "F16"),
    ("Q8_0/model.gguf", ""), ("qwen2.gguf", ""), ("model.gguf", ""), ("FQ4_0X.gguf", ""),
])
def test_quantisations_by_names(path: str, quant: str) -> None:
    assert quant_of(path) == quant


@pytest.mark.quick(20)
@pytest.mark.parametrize(("choice", "first"), [
    ("", "X-Q4_K_M.gguf"), ("Q8_0", "X-Q8_0.gguf"), ("q8_0", "X-Q8_0.gguf"), ("UD-Q4_K_XL", "X-UD-Q4_K_XL.gguf"),
    ("Q4_K_XL", "X-UD-Q4_K_XL.gguf"), ("x-q2_k.gguf", "X-Q2_K.gguf"),
])
def test_a_quantisation_or_a_file(choice: str, first: str) -> None:
    found = chosen(choice, MANY)
    assert (found.first, found.paths, found.sees) == (first, (first, "mmproj-F16.gguf"), "mmproj-F16.gguf")


def test_what_reads_pictures_comes_too() -> None:
    """Of several files the most precise of usual size; of the model's folder alone; and none where none is wanted."""
    for there, taken in ((["BF16", "F32", "Q8_0", "F16"], "F16"), (["F32", "Q8_0", "BF16"], "BF16"),
                         (["F32", "Q8_0"], "Q8_0"), (["F32", "Q4_0"], "F32")):
        paths = ["X-Q8_0.gguf", *(f"mmproj-X-{quant}.gguf" for quant in there)]
        assert chosen("", paths).paths == ("X-Q8_0.gguf", f"mmproj-X-{taken}.gguf")
        without = choose(Wanted("org/x", "org/x", ""), paths, sees=False)
        assert (without.paths, without.sees, without.left) == (("X-Q8_0.gguf",), "", f"mmproj-X-{taken}.gguf")
    assert chosen("", ["a/X-Q8_0.gguf", "mmproj-F16.gguf"]).paths == ("a/X-Q8_0.gguf",)


@pytest.mark.quick(12)
@pytest.mark.parametrize(("quants", "usual"), [
    (["Q8_0", "Q2_K", "F16"], "Q8_0"), (["Q5_K_M", "Q6_K", "Q3_K_M"], "Q5_K_M"), (["F16", "Q2_K"], "Q2_K"),
    (["Q4_0", "Q4_K_S"], "Q4_K_S"), (["UD-Q4_K_M", "Q4_K_M"], "Q4_K_M"), (["F32", "BF16"], "BF16"),
])
def test_without_one_the_nearest_to_the_usual(quants: list[str], usual: str) -> None:
    assert chosen("", [f"X-{quant}.gguf" for quant in quants]).quant == usual


def test_parts_come_together() -> None:
    parts = [f"Q8_0/B-Q8_0-0000{part}-of-00003.gguf" for part in (1, 2, 3)]
    found = chosen("Q8_0", [*parts, "B-Q4_0.gguf"])
    assert (found.first, list(found.paths)) == (parts[0], parts)
    assert complete(found, parts) and not complete(found, parts[:2])
    assert models_of([*parts, "B-Q4_0.gguf", "mmproj-B.gguf"]) == ["B-Q4_0.gguf", parts[0]]


def test_what_predicts_further_tokens_comes_too() -> None:
    """Of several files the one with the model's quantisation, or the nearest to the usual one; of its folder alone."""
    beside = ["mtp-X-Q8_0.gguf", "mtp-X-Q4_K_M.gguf", "sub/mtp-X-F16.gguf"]
    assert chosen("Q8_0", [*MANY, *beside]).paths == ("X-Q8_0.gguf", "mtp-X-Q8_0.gguf", "mmproj-F16.gguf")
    assert chosen("Q2_K", [*MANY, *beside]).paths == ("X-Q2_K.gguf", "mtp-X-Q4_K_M.gguf", "mmproj-F16.gguf")


def test_folders() -> None:
    folder = ["config.json", "generation_config.json", "merges.txt", "model-00001-of-00002.safetensors",
              "model-00002-of-00002.safetensors", "model.safetensors.index.json", "tokenizer.model"]
    aside = ["README.md", "a.png", "consolidated.safetensors", "onnx/model.onnx", "original/params.json",
             "pytorch_model.bin", "x-Q4_0.gguf"]
    found = chosen("", [*folder, *aside])
    assert found.first == "" and sorted(found.paths) == folder
    assert chosen("Q4_0", [*folder, *aside]).first == "x-Q4_0.gguf"
    assert "pytorch_model.bin" in chosen("", ["config.json", "pytorch_model.bin"]).paths


@pytest.mark.quick(12)
@pytest.mark.parametrize(("choice", "paths", "message"), [
    ("Q5_0", ["a-Q4_0.gguf", "a-Q8_0.gguf"], r"org/x has no 'Q5_0'. Did you mean Q\w_0\? It has Q4_0, Q8_0$"),
    ("b.gguf", ["a.gguf"], "org/x has no 'b.gguf'. Did you mean a.gguf[?] It has a.gguf$"),
    ("Q4_0", ["config.json", "model.safetensors"], "It has no .gguf file; leave out what follows the colon"),
    ("Q4_0", ["a-Q4_0.gguf", "b-Q4_0.gguf"], "'org/x:Q4_0' may be a-Q4_0.gguf, b-Q4_0.gguf: give one of them, as in "
                                             "org/x:a-Q4_0.gguf$"),
    ("", ["a.gguf", "b.gguf"], "'org/x' may be a.gguf, b.gguf: give one of them"),
    ("", ["adapter_config.json", "adapter_model.safetensors"], "org/x holds an adapter and no model"),
    ("", ["README.md"], "org/x holds no model that Shoal reads"),
])
def test_what_is_not_there_is_one_line(choice: str, paths: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        chosen(choice, paths)
    assert "\n" not in str(refused.value)
