"""Tiny encoder-decoders of text with random weights, whose words vary."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    M2M100Config,
    M2M100ForConditionalGeneration,
    MarianConfig,
    MarianMTModel,
    MBartConfig,
    MBartForConditionalGeneration,
    MT5Config,
    MT5ForConditionalGeneration,
    PegasusConfig,
    PegasusForConditionalGeneration,
    PLBartConfig,
    PLBartForConditionalGeneration,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
    T5GemmaConfig,
    T5GemmaForConditionalGeneration,
    UMT5Config,
    UMT5ForConditionalGeneration,
)

VOCAB, START, END, LAYERS = 270, 258, 257, 3
_ENDS = {"bos_token_id": 256, "eos_token_id": END, "pad_token_id": START, "decoder_start_token_id": START}
_BART: dict[str, Any] = {
    "vocab_size": VOCAB, "d_model": 32, "encoder_layers": 2, "decoder_layers": LAYERS, "encoder_attention_heads": 4,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 64, "max_position_embeddings": 96,
    "init_std": 0.3, "forced_eos_token_id": None, **_ENDS}
_T5: dict[str, Any] = {
    "vocab_size": VOCAB, "d_model": 32, "d_kv": 12, "d_ff": 64, "num_layers": 2, "num_decoder_layers": LAYERS,
    "num_heads": 4, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20, **_ENDS}
_APART = {"decoder_vocab_size": 262, "share_encoder_decoder_embeddings": False}
_GEMMA: dict[str, Any] = {
    "vocab_size": VOCAB, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "sliding_window": 10, "query_pre_attn_scalar": 12, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 20.0,
    "max_position_embeddings": 96, "bos_token_id": START, "eos_token_id": END, "pad_token_id": 1}


def _t5gemma(width: int, more: dict[str, Any]) -> T5GemmaConfig:
    """The config of a T5Gemma whose encoder has states of a width of its own; 5.0 would leave out the cap of scores."""
    return T5GemmaConfig(
        encoder={**_GEMMA, "hidden_size": width, "num_hidden_layers": 2},
        decoder={**_GEMMA, "hidden_size": 32, "num_hidden_layers": LAYERS}, vocab_size=VOCAB,
        attn_implementation="eager", **more)


Make = Callable[[dict[str, Any]], Any]
MADE: Mapping[str, Make] = {
    "bart": lambda more: BartForConditionalGeneration(BartConfig(**{**_BART, "scale_embedding": True, **more})),
    "mbart": lambda more: MBartForConditionalGeneration(MBartConfig(**{**_BART, **more})),
    "plbart": lambda more: PLBartForConditionalGeneration(PLBartConfig(**{**_BART, **more})),
    "marian": lambda more: MarianMTModel(MarianConfig(**{**_BART, **more})),
    "marian-apart": lambda more: MarianMTModel(MarianConfig(**{**_BART, **_APART, **more})),
    "pegasus": lambda more: PegasusForConditionalGeneration(PegasusConfig(**{**_BART, **more})),
    "m2m_100": lambda more: M2M100ForConditionalGeneration(M2M100Config(**{**_BART, "pad_token_id": 1, **more})),
    "t5": lambda more: T5ForConditionalGeneration(T5Config(**{**_T5, **more})),
    "t5-gated": lambda more: T5ForConditionalGeneration(T5Config(**{
        **_T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, **more})),
    "mt5": lambda more: MT5ForConditionalGeneration(MT5Config(**{**_T5, **more})),
    "umt5": lambda more: UMT5ForConditionalGeneration(UMT5Config(**{**_T5, **more})),
    "t5gemma": lambda more: T5GemmaForConditionalGeneration(_t5gemma(48, more)),
    "t5gemma-apart": lambda more: T5GemmaForConditionalGeneration(_t5gemma(32, {"tie_word_embeddings": False, **more})),
}
KINDS = tuple(MADE)
_SEEDS = {"bart": 11, "plbart": 11, "mbart": 5, "pegasus": 3, "m2m_100": 11, "t5": 13, "t5-gated": 12, "mt5": 3,
          "umt5": 3, "t5gemma": 4, "t5gemma-apart": 11}
"""Of models whose words vary most."""


def model_of(kind: str, seed: int | None = None, **more: Any) -> Any:
    """A model in float32."""
    torch.manual_seed(_SEEDS.get(kind, 0) if seed is None else seed)
    model = MADE[kind](more).eval()
    for name, parameter in model.named_parameters():
        if "embed_positions" not in name or "bart" in kind:
            small = parameter.dim() == 1 or "embed_tokens" in name or "shared" in name
            parameter.data *= 5 if "embed_positions" in name else 1
            parameter.data += (0.1 if small else 0.5) * torch.randn_like(parameter)
        if name.endswith(("encoder_attn.out_proj.weight", "EncDecAttention.o.weight")):
            parameter.data *= 0.2  # else the source alone says which word it is
    if hasattr(model, "final_logits_bias"):
        model.final_logits_bias.normal_(std=0.1)
    if "t5gemma" in kind:
        for name, parameter in model.model.decoder.named_parameters():
            parameter.data += 3.0 if "post_" in name else 0.0  # else a word that is said says itself again
        if "apart" in kind:
            model.lm_head.out_proj.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.out_proj.weight))
    elif "t5" in kind:
        for stack in (model.encoder, model.decoder):
            for block in stack.block if kind == "umt5" else stack.block[:1]:
                block.layer[0].SelfAttention.relative_attention_bias.weight.data.normal_(std=2.0)
    if kind == "t5-gated":
        model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
        model.config.tie_word_embeddings = False
    model.generation_config.decoder_start_token_id = START
    return model


def tokenizer(**more: Any) -> PreTrainedTokenizerFast:
    """Bytes, and an end after each text."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    core.add_special_tokens([AddedToken(name, special=True) for name in ("<s>", "</s>", "<pad>")])
    core.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", END)])
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", pad_token="<pad>",
                                   clean_up_tokenization_spaces=False, **more)


def write(folder: Path, model: Any) -> Path:
    """A checkpoint with its tokenizer."""
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def likeliest(model: Any, source: list[int], new: int) -> list[int]:
    """The likeliest tokens by transformers' modules, without a cache: that of T5 counts the encoder's layers."""
    ids = torch.tensor([[START]])
    for _ in range(new):
        ids = torch.cat([ids, logits_of(model, source, ids[0].tolist())[-1].argmax()[None, None]], 1)
    return ids[0, 1:].tolist()


@torch.no_grad()
def logits_of(model: Any, source: list[int], ids: list[int]) -> Tensor:
    """Logits [tokens, V] by transformers' modules."""
    found: Tensor = model(input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([ids])).logits[0]
    return found
