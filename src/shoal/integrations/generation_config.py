"""How Shoal treats every field of transformers' GenerationConfig: honoured, refused or meaningless.

`python -m shoal.integrations.generation_config` prints the table as Markdown.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from shoal.errors import Unsupported

Verdict = Literal["honoured", "refused", "meaningless"]


@dataclass(frozen=True)
class Field:
    """One row of the table.

    Attributes:
        verdict: `honoured` works as in `model.generate`; `refused` raises `Unsupported` unless the value is neutral;
            `meaningless` cannot affect the tokens, whatever its value.
        why: who honours it, or why it is not honoured.
        remedy: what to do instead of using a refused field.
        neutral: values of a refused field that ask for nothing.
    """

    verdict: Verdict
    why: str
    remedy: str = ""
    neutral: tuple[Any, ...] = (None,)


def _processor(what: str) -> Field:
    return Field("honoured", f"transformers prepares {what}, which Shoal calls for each row")


def _criterion(what: str) -> Field:
    return Field("honoured", f"transformers prepares {what}, which ends each row of its own")


def _refused(why: str, remedy: str, *neutral: Any) -> Field:
    return Field("refused", why, remedy, (None, *neutral))


def _meaningless(why: str) -> Field:
    return Field("meaningless", why)


_BEAMS = "Use model.generate without custom_generate for beam search"
_BEAM_ONLY = "read by beam search only, which is refused"
_DRAFT = "Use a method of Shoal that drafts, or model.generate without custom_generate"
_MOVED = "it selects another decoding algorithm"
_PLAIN = "Use model.generate without custom_generate"
_OWN_KV = "Shoal keeps keys and values in a cache of its own, with a length per layer"

TABLE: dict[str, Field] = {
    "max_length": _criterion("MaxLengthCriteria"),
    "max_new_tokens": Field("honoured", "transformers turns it into max_length; also the horizon of a depth schedule"),
    "min_length": _processor("MinLengthLogitsProcessor"),
    "min_new_tokens": _processor("MinNewTokensLengthLogitsProcessor"),
    "early_stopping": _meaningless(_BEAM_ONLY),
    "max_time": _criterion("MaxTimeCriteria"),
    "stop_strings": Field("honoured", "transformers refuses it for callables, which get no tokenizer; bind both: "
                          "`method.bind(tokenizer=t, stop_strings=[...])`. The repository form takes it as `generate` "
                          "does"),
    "do_sample": Field("honoured", "by Shoal: greedy, or draws from the processed scores, keyed by one number from "
                       "torch's generator"),
    "num_beams": _refused("it asks for beam search; a row of Shoal's is one sequence", _BEAMS, 1),
    "use_mtp": _refused("it asks for the model's own multi-token prediction", _DRAFT, False),
    "use_cache": _meaningless("Shoal always keeps keys and values; the output is the same without"),
    "cache_implementation": _refused(_OWN_KV, "Leave cache_implementation out", "dynamic", "dynamic_full"),
    "cache_config": _meaningless("read with a quantised cache only, which is refused (see cache_implementation)"),
    "max_cache_len": _meaningless("read with a static cache only, which is refused (see cache_implementation)"),
    **dict.fromkeys(
        ("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"),
        _processor("the logits warper (with do_sample)"),
    ),
    "repetition_penalty": _processor("RepetitionPenaltyLogitsProcessor"),
    "encoder_repetition_penalty": _processor("EncoderRepetitionPenaltyLogitsProcessor (over the prompt)"),
    "length_penalty": _meaningless(_BEAM_ONLY),
    "no_repeat_ngram_size": _processor("NoRepeatNGramLogitsProcessor"),
    "encoder_no_repeat_ngram_size": _processor("EncoderNoRepeatNGramLogitsProcessor (over the prompt)"),
    "bad_words_ids": _processor("NoBadWordsLogitsProcessor"),
    "renormalize_logits": _processor("LogitNormalization"),
    "forced_bos_token_id": _processor("ForcedBOSTokenLogitsProcessor"),
    "forced_eos_token_id": _processor("ForcedEOSTokenLogitsProcessor"),
    "remove_invalid_values": _processor("InfNanRemoveLogitsProcessor"),
    "exponential_decay_length_penalty": _processor("ExponentialDecayLengthPenalty"),
    "suppress_tokens": _processor("SuppressTokensLogitsProcessor"),
    "begin_suppress_tokens": _processor("SuppressTokensAtBeginLogitsProcessor"),
    "sequence_bias": _processor("SequenceBiasLogitsProcessor"),
    "watermarking_config": Field("honoured", "transformers prepares the watermark, which Shoal calls for each row; "
                                 "SynthID is refused if the method drafts"),
    "token_healing": _refused("transformers hands no tokenizer to a callable",
                              "Call model.heal_tokens(input_ids, tokenizer) yourself and give its result", False),
    "guidance_scale": _refused("classifier-free guidance runs the whole model a second time for every token",
                               "Leave guidance_scale out", 1),
    "num_return_sequences": Field("honoured", "transformers repeats the prompts; each row draws numbers of its own"),
    "output_attentions": _refused("rows run different layers, and no attention weights are kept", _PLAIN, False),
    "output_hidden_states": _refused("tokens run different layers, and no hidden states are kept", _PLAIN, False),
    "output_scores": Field("honoured", "by Shoal, with return_dict_in_generate; zeros for rows that have ended"),
    "output_logits": Field("honoured", "by Shoal, with return_dict_in_generate; zeros for rows that have ended"),
    "return_dict_in_generate": Field("honoured", "by Shoal; the output holds no cache, since an uneven one fits no "
                                     "transformers model"),
    "pad_token_id": Field("honoured", "by transformers (mask) and by Shoal: fills the rows that have ended"),
    "bos_token_id": Field("honoured", "by transformers, where there is no prompt"),
    "eos_token_id": _criterion("EosTokenCriteria"),
    "decoder_start_token_id": _meaningless("read by encoder-decoder models only, which are refused"),
    "is_assistant": _refused("this call would be an assistant's turn", _PLAIN, False),
    **dict.fromkeys(
        ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold",
         "max_matching_ngram_size", "assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight"),
        _meaningless("read only with an assistant model or prompt lookup; transformers hands no assistant to a "
                     "callable"),
    ),
    "prompt_lookup_num_tokens": _refused("it asks for prompt lookup decoding", _DRAFT),
    "assistant_early_exit": _refused("it asks for drafts by an early exit", _DRAFT),
    "speculation_type": _refused("it asks for another kind of speculation", _DRAFT),
    **dict.fromkeys(
        ("compile_config", "disable_compile"),
        _meaningless("Shoal runs the layers one by one and compiles no forward of the model"),
    ),
    "continuous_batching_config": _meaningless("read by generate_batch only"),
    "low_memory": _meaningless("read by contrastive search only, which is refused (see penalty_alpha)"),
    "penalty_alpha": _refused(f"{_MOVED}, contrastive search", _PLAIN, 0, 0.0),
    "dola_layers": _refused(f"{_MOVED}, DoLa", _PLAIN),
    "diversity_penalty": _meaningless("read by group beam search only, which is refused (see num_beam_groups)"),
    "num_beam_groups": _refused("it asks for group beam search", _BEAMS, 1),
    "constraints": _refused("it asks for constrained beam search", _BEAMS),
    "force_words_ids": _refused("it asks for constrained beam search", _BEAMS),
    "prefill_chunk_size": Field("honoured", "by Shoal: the most prompt tokens per row and forward"),
    **dict.fromkeys(
        ("transformers_version", "_from_model_config", "_commit_hash", "_original_object_hash"),
        _meaningless("a record of where the configuration comes from"),
    ),
    "_mask_length": _meaningless("where transformers' own prefill resumes a cache; a cache of the caller's is refused"),
    **dict.fromkeys(
        ("_bos_token_tensor", "_eos_token_tensor", "_pad_token_tensor"),
        Field("honoured", "transformers derives it from the token id, and Shoal and processors read it"),
    ),
    "_decoder_start_token_tensor": _meaningless("read by encoder-decoder models only, which are refused"),
    "extra_output_flags": _meaningless("a list of names in the class, no setting"),
}


def check(config: Any) -> None:
    """Refuse what Shoal cannot honour.

    Custom entries, which transformers does not define, are left alone.

    Args:
        config: a GenerationConfig, as given or as prepared by `generate`.

    Raises:
        Unsupported: a refused field asks for something, or a field unknown to the table differs from its default.
    """
    for name, value in vars(config).items():
        field = TABLE.get(name)
        if field is None:
            _check_unlisted(name, value)
        elif field.verdict == "refused" and not _is_neutral(value, field.neutral):
            raise Unsupported(f"{name}={value!r}", field.why, field.remedy)


def _check_unlisted(name: str, value: Any) -> None:
    from transformers import GenerationConfig

    defaults = vars(GenerationConfig())
    if name in defaults and not _is_neutral(value, (None, False, defaults[name])):
        why = "this field is newer than this version of Shoal"
        raise Unsupported(f"{name}={value!r}", why, f"Leave {name} out, or update Shoal")


def _is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    return any(value is one or (type(value) is not bool and value == one) for one in neutral)


_INTRODUCTION = (
    "Made by `python -m shoal.integrations.generation_config`; a test walks the fields of the installed transformers.",
    "",
    "`model.generate(..., custom_generate=shoal.D3())` prepares logits processors, stopping criteria and lengths as",
    "always; Shoal then decodes. *Refused* fields raise `shoal.Unsupported` unless they are unset or have a value that",
    "stands under *allowed*. *Meaningless* fields cannot change a token. Fields that transformers gains later are",
    "refused until they stand here; entries of your own are left alone.",
)


_ARGUMENTS = {
    "`attention_mask`": "padding on the left is taken off each row; padding elsewhere and holes are refused",
    "`cache`, `past_key_values`": "a cache of your own is refused; sessions (`shoal.load(...).session()`) keep theirs",
    "`position_ids`": "checked to be the usual ones",
    "`input_ids`": "[rows, tokens]; of one prompt without a row, transformers' preparation ends in an IndexError",
    "other model inputs": "refused",
    "`logits_processor`, `prefix_allowed_tokens_fn`": (
        "called after those of the configuration, with one row at a time ([1, T] and [1, V]), its padding included; "
        "one that counts its calls is shared by the rows and sees drafted tokens too"
    ),
    "`stopping_criteria`": "called with one row at a time; a row that has ended is filled with `pad_token_id`",
    "`streamer`, `tokenizer`": (
        "dropped by transformers for every callable, except that the streamer gets the prompt; bind them: "
        "`method.bind(streamer=s, tokenizer=t)`. The repository form takes them as `generate` does"
    ),
    "`assistant_model`, `synced_gpus`": (
        "dropped by transformers for every callable, unseen by Shoal; the repository form refuses them"
    ),
    "`torch.manual_seed`": "makes samples repeatable; they are not those that transformers draws from the same seed",
}


def markdown() -> str:
    """The table as a page."""
    return "\n".join(_page()) + "\n"


def _page() -> Iterator[str]:
    yield "# GenerationConfig under `custom_generate`"
    yield ""
    yield from _INTRODUCTION
    for verdict in ("honoured", "refused", "meaningless"):
        yield ""
        yield f"## {verdict.capitalize()}"
        yield ""
        yield "| field | why |" if verdict != "refused" else "| field | allowed | why | instead |"
        yield "|---|---|" if verdict != "refused" else "|---|---|---|---|"
        for name, field in TABLE.items():
            if field.verdict == verdict and not name.startswith("_"):
                yield _line(name, field)
    yield from ("", "## Beside the configuration", "", "| argument of `generate` | what becomes of it |", "|---|---|")
    for name, fate in _ARGUMENTS.items():
        yield f"| {name} | {fate} |"


def _line(name: str, field: Field) -> str:
    if field.verdict != "refused":
        return f"| `{name}` | {field.why} |"
    allowed = ", ".join(f"`{value!r}`" for value in field.neutral)
    return f"| `{name}` | {allowed} | {field.why} | {field.remedy} |"


if __name__ == "__main__":
    print(markdown(), end="")
