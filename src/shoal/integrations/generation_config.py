"""How Shoal treats every field of transformers' GenerationConfig: honoured, refused or meaningless.

docs/generation_config.md says who honours a field, and why another one cannot affect the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shoal.errors import Unsupported


@dataclass(frozen=True)
class Refusal:
    """A field that Shoal cannot honour: why, what to do instead, and values besides None that ask for nothing."""

    why: str
    remedy: str
    neutral: tuple[Any, ...] = ()


_BEAMS = "Use model.generate without custom_generate for beam search"
_DRAFT = "Use a method of Shoal that drafts, or model.generate without custom_generate"
_MOVED = "it selects another decoding algorithm"
_PLAIN = "Use model.generate without custom_generate"
_OWN_KV = "Shoal keeps keys and values in a cache of its own, with a length per layer"

HONOURED = frozenset((
    "max_length", "max_new_tokens", "min_length", "min_new_tokens", "max_time", "stop_strings", "do_sample",
    "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff",
    "repetition_penalty", "encoder_repetition_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size",
    "bad_words_ids", "renormalize_logits", "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values",
    "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens", "sequence_bias",
    "watermarking_config", "num_return_sequences", "output_scores", "output_logits", "return_dict_in_generate",
    "pad_token_id", "bos_token_id", "eos_token_id", "prefill_chunk_size",
    "_bos_token_tensor", "_eos_token_tensor", "_pad_token_tensor",
))  # fmt: skip
"""Fields that work as in `model.generate`."""
MEANINGLESS = frozenset((
    "early_stopping", "use_cache", "cache_config", "max_cache_len", "length_penalty", "decoder_start_token_id",
    "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold",
    "max_matching_ngram_size", "assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight",
    "compile_config", "disable_compile", "continuous_batching_config", "low_memory", "diversity_penalty",
    "transformers_version", "_from_model_config", "_commit_hash", "_original_object_hash", "_mask_length",
    "_decoder_start_token_tensor", "extra_output_flags",
))  # fmt: skip
"""Fields that cannot affect the tokens, whatever their value: many are read with a refused one only."""
REFUSED: dict[str, Refusal] = {
    "num_beams": Refusal("it asks for beam search; a row of Shoal's is one sequence", _BEAMS, (1,)),
    "use_mtp": Refusal("it asks for the model's own multi-token prediction", _DRAFT, (False,)),
    "cache_implementation": Refusal(_OWN_KV, "Leave cache_implementation out", ("dynamic", "dynamic_full")),
    "token_healing": Refusal("transformers hands no tokenizer to a callable",
                             "Call model.heal_tokens(input_ids, tokenizer) yourself and give its result", (False,)),
    "guidance_scale": Refusal("classifier-free guidance runs the whole model a second time for every token",
                              "Leave guidance_scale out", (1,)),
    "output_attentions": Refusal("rows run different layers, and no attention weights are kept", _PLAIN, (False,)),
    "output_hidden_states": Refusal("tokens run different layers, and no hidden states are kept", _PLAIN, (False,)),
    "is_assistant": Refusal("this call would be an assistant's turn", _PLAIN, (False,)),
    "prompt_lookup_num_tokens": Refusal("it asks for prompt lookup decoding", _DRAFT),
    "assistant_early_exit": Refusal("it asks for drafts by an early exit", _DRAFT),
    "speculation_type": Refusal("it asks for another kind of speculation", _DRAFT),
    "penalty_alpha": Refusal(f"{_MOVED}, contrastive search", _PLAIN, (0, 0.0)),
    "dola_layers": Refusal(f"{_MOVED}, DoLa", _PLAIN),
    "num_beam_groups": Refusal("it asks for group beam search", _BEAMS, (1,)),
    "constraints": Refusal("it asks for constrained beam search", _BEAMS),
    "force_words_ids": Refusal("it asks for constrained beam search", _BEAMS),
}
"""Fields that raise `Unsupported`, unless the value asks for nothing."""


def check(config: Any) -> None:
    """Refuse what Shoal cannot honour.

    Custom entries, which transformers does not define, are left alone.

    Raises:
        Unsupported: a refused field asks for something, or a field unknown here differs from its default.
    """
    for name, value in vars(config).items():
        field = REFUSED.get(name)
        if field is None and name not in HONOURED | MEANINGLESS:
            _check_unlisted(name, value)
        elif field is not None and not _is_neutral(value, (None, *field.neutral)):
            raise Unsupported(f"{name}={value!r}", field.why, field.remedy)


def _check_unlisted(name: str, value: Any) -> None:
    from transformers import GenerationConfig

    defaults = vars(GenerationConfig())
    if name in defaults and not _is_neutral(value, (None, False, defaults[name])):
        why = "this field is newer than this version of Shoal"
        raise Unsupported(f"{name}={value!r}", why, f"Leave {name} out, or update Shoal")


def _is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    return any(value is one or (type(value) is not bool and value == one) for one in neutral)
