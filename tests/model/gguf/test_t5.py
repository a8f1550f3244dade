"""T5 in GGUF files, written with the names of llama.cpp's own package: against transformers' modules and tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from encoder_decoders import END, LAYERS, START, VOCAB, likeliest, logits_of, model_of
from shoal.depth.plan import DepthPlan
from shoal.engine.loading.checkpoint import Checkpoint
from shoal.errors import Unsupported
from shoal.model.encoders.encoder import Encoder, encoder_of
from shoal.model.encoders.kernels import Product
from shoal.model.gguf.header import read_header
from shoal.model.gguf.tokenizer import tokenizer_of
from shoal.model.packed import native
from shoal.model.packed.build import build
from shoal.model.packed.runner import PackedRunner
from shoal.model.runner import SequenceChunk

gguf = pytest.importorskip("gguf")
SOURCES = ([5, 6, 7, 8, 9, 9, 30, END], [90, 40, END])
_SIZES = {"d_kv": 16, "relative_attention_max_distance": 128}
_WORDS = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -3.0), ("\u2581a", -2.5), ("b", -3.5), ("ab", -2.0),
          ("\u2581ab", -1.5), ("ba", -2.2), ("c", -4.0), ("\u2581c", -3.8), ("<extra_id_0>", 0.0)]


def write(path: Path, model: Any, kind: str = "F32", words: list[tuple[str, float]] | None = None) -> Any:
    """Write a model, matrices in a type; returns it with the numbers of the file."""
    config, type_ = model.config, gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(str(path), "t5")
    writer.add_context_length(512)
    writer.add_embedding_length(config.d_model)
    writer.add_feed_forward_length(config.d_ff)
    writer.add_block_count(config.num_layers)
    writer.add_uint32("t5.decoder_block_count", config.num_decoder_layers)
    writer.add_head_count(config.num_heads)
    writer.add_key_length(config.d_kv)
    writer.add_value_length(config.d_kv)
    writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
    writer.add_relative_attn_buckets_count(config.relative_attention_num_buckets)
    writer.add_decoder_start_token_id(START)
    if words is not None:
        writer.add_tokenizer_model("t5")
        writer.add_token_list([token for token, _ in words])
        writer.add_token_scores([score for _, score in words])
        writer.add_token_types([3, 3, 2, *[1] * (len(words) - 4), 4])
        writer.add_pad_token_id(0)
        writer.add_eos_token_id(1)
        writer.add_unk_token_id(2)
        writer.add_add_bos_token(False)
        writer.add_add_eos_token(True)
    names, state = gguf.get_tensor_name_map(gguf.MODEL_ARCH.T5, 8), {}
    tied = torch.equal(model.lm_head.weight, model.shared.weight)
    for name, tensor in model.state_dict().items():
        state[name] = tensor
        if "embed_tokens" in name or (name == "lm_head.weight" and tied):
            continue
        quantised = kind != "F32" and tensor.dim() == 2 and "relative" not in name
        data = gguf.quantize(tensor.numpy(), type_) if quantised else tensor.numpy()
        if quantised:
            state[name] = torch.from_numpy(gguf.dequantize(data, type_))
        own = {"raw_dtype": type_} if quantised else {}
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), data, **own)
    for place in ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"):
        state[place] = state["shared.weight"]
    if tied:
        state["lm_head.weight"] = state["shared.weight"]
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model.load_state_dict(state)
    return model


def in_torch(path: Path) -> tuple[PackedRunner, Encoder]:
    """Decoder and encoder of a file without the kernels, which round inputs of matrices in 8 bits or fewer."""
    files = Checkpoint(str(path), None, False)
    source = files.weights()
    assert source is not None
    runner = build(files.config(), source, torch.float32, torch.device("cpu"), kernels=False)
    encoder = encoder_of(files.config(), source, runner, files.place, files.generation_config())
    assert encoder is not None
    return runner, encoder


@pytest.mark.parametrize("file_type", ["F32", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("kind", ["t5", "t5-gated", "umt5"])
def test_answers_are_those_of_transformers(kind: str, file_type: str, tmp_path: Path) -> None:
    """UMT5's states with gates are not scaled before the head, which its class in transformers does in any case."""
    model = write(tmp_path / "t5.gguf", model_of(kind, **_SIZES), file_type)
    engine = shoal.load(tmp_path / "t5.gguf")
    assert engine.encoder is not None and engine.encoder.places is None and engine.runner.max_positions is None
    assert engine.encoder.text is not None and engine.encoder.text.start == START
    if native.available():
        held = {native.as_packed(matrix).kind for matrix in engine.runner.weights.matrices()}  # type: ignore[attr-defined]
        held |= {one.packed.kind for one in engine.encoder.module.modules() if isinstance(one, Product)}
        assert held == {{"F32": "fp32", "Q8_0": "q8_0", "Q4_0": "q4_0"}[file_type]}
    runner, encoder = (engine.runner, engine.encoder) if file_type == "F32" else in_torch(tmp_path / "t5.gguf")
    for source in SOURCES:
        if file_type == "F32":
            found = engine.generate(source, max_new_tokens=12, ignore_eos=True)
            assert list(found.tokens) == likeliest(model, source, 12)
        cache, text = runner.new_cache(1), [START, *range(20, 40)]
        cache.attach(0, encoder.read(source))
        plan = DepthPlan.full(LAYERS)
        logits = runner.forward([SequenceChunk(0, text, [0] * len(text), plan, wanted=len(text))], cache)
        wanted = logits_of(model, source, text) * (model.config.d_model**0.5 if kind == "umt5" else 1.0)
        assert (logits - wanted).abs().max() < 1e-4 * wanted.abs().max()
        states = model.encoder(torch.tensor([source])).last_hidden_state
        assert torch.allclose(encoder.module(torch.tensor([source])).last_hidden_state, states, atol=1e-4)
    for name, one in engine.encoder.module.named_modules():
        if isinstance(one, Product):
            assert torch.equal(one.packed.unpack(), model.encoder.get_submodule(name).weight)


def test_words_are_those_of_transformers(tmp_path: Path) -> None:
    from transformers import T5Tokenizer

    model = model_of("t5", **_SIZES, vocab_size=len(_WORDS), bos_token_id=0, eos_token_id=1, pad_token_id=0,
                     decoder_start_token_id=0)
    write(tmp_path / "t5.gguf", model, words=_WORDS)
    found, wanted = tokenizer_of(read_header(tmp_path / "t5.gguf")), T5Tokenizer(vocab=_WORDS, extra_ids=1)
    for text in ("abba cab", " a  b ", "c", "xyz ab", "ab<extra_id_0> ba", "", "\nab\tc"):
        assert found(text)["input_ids"] == wanted(text)["input_ids"], text
        ids = [token for token in found(text)["input_ids"] if token != 11]  # shown, as llama.cpp does
        assert found.decode(ids, skip_special_tokens=True) == wanted.decode(ids, skip_special_tokens=True)
    assert found("ab")["input_ids"] == [7, 1]


def test_a_file_without_an_encoder_is_refused(tmp_path: Path) -> None:
    model = model_of("t5", **_SIZES)
    del model.encoder.block[0].layer[1].DenseReluDense.wo
    held = model.state_dict()
    model.load_state_dict = lambda state: None
    write(tmp_path / "t5.gguf", model)
    assert "encoder.block.0.layer.1.DenseReluDense.wo.weight" not in held and VOCAB == 270
    with pytest.raises(Unsupported, match="without encoder.block.0.layer.1.DenseReluDense.wo.weight"):
        shoal.load(tmp_path / "t5.gguf")
