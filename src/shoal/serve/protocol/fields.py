"""Fields of a request that the server does not read, and what becomes of each: it is refused, or has no effect.

What it reads are the fields of `bodies`. A field that would change an answer is read, or refused with a remedy, but
never ignored; neutral values pass. docs/reference_server.md has all fields.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from shoal.serve.errors import ApiError, refused


@dataclass(frozen=True)
class Unread:
    """A field that is not read: what to do instead or why, and values besides null that ask for nothing."""

    note: str
    neutral: tuple[Any, ...] = ()


class Refused(Unread):
    """A field that is answered 400, unless its value is neutral."""


class Ignored(Unread):
    """A field without effect; a response header names it, and a strict server refuses it."""


_SAMPLERS = "there is no such step of sampling; leave it out, or use `min_p`, `top_p`, `top_k`, `typical_p`"
_ADAPTERS = "an adapter is a model of its own here: name one in `model`, see `/v1/models`"
_MEDIA = "the model's files settle it"
_SPREAD = "one process reads prompts and answers them"
_ROUTED = "there is one engine, and requests are taken in the order in which they come"
_HIDDEN = "the model's internals are not reported"
_TAGS = "an answer is bound from its first token to its last; give a schema, a pattern or a grammar"

OF_PEERS: dict[str, Unread] = {
    # constraints
    "guided_decoding_backend": Ignored("there is one", ("auto", "guidance", "llguidance")),
    "guided_whitespace_pattern": Refused("white space is that of docs/constraints.md; use `guided_grammar`"),
    "structural_tag": Refused(_TAGS),
    "grammar_lazy": Refused(_TAGS, (False,)),
    "grammar_triggers": Refused(_TAGS, ([],)),
    "grammar_type": Refused(_TAGS, ("",)),
    "preserved_tokens": Ignored("special tokens are never split", ([],)),
    # sampling
    "top_n_sigma": Refused(_SAMPLERS, (0, -1)),
    "tfs_z": Refused(_SAMPLERS, (1,)),
    "adaptive_target": Refused(_SAMPLERS, (-1,)),
    **dict.fromkeys(
        ("top_a", "xtc_probability", "dynatemp_range", "mirostat", "dry_multiplier"), Refused(_SAMPLERS, (0,))),
    **dict.fromkeys(
        ("xtc_threshold", "dynatemp_exponent", "mirostat_tau", "mirostat_eta", "adaptive_decay", "dry_base",
         "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers"),
        Ignored("belongs to a step of sampling that is refused")),
    "min_keep": Refused("every step keeps one token at least; leave it out", (0, 1)),
    "samplers": Refused("temperature, top-k, top-p, min-p and typical-p come in this order; leave it out", ([], "")),
    "penalize_newline": Refused("line breaks count as all tokens do; leave it out", (True,)),
    "penalty_prompt": Refused("`repetition_penalty` counts the prompt; leave it out", ("",)),
    "length_penalty": Ignored("there are no beams", (1,)),
    "use_beam_search": Refused("there are no beams; use `best_of`", (False,)),
    "do_sample": Refused("use `temperature`; 0 takes the most likely token"),
    "watermarking": Refused("answers have no watermark", (False,)),
    "repetition_detection": Refused("use `repetition_penalty`, or `stop`"),
    "stop_regex": Refused("use `stop`, or bind the answer by `guided_regex`", ([], "")),
    **dict.fromkeys(("custom_logit_processor", "logits_processors"), Refused("a request brings no code", ([], ""))),
    "custom_params": Ignored("read by a request's own code, which is refused", ({},)),
    "vllm_xargs": Refused("there are no extensions; see `method_args`", ({},)),
    "backend_sampling": Ignored("tokens are drawn in one place", (False,)),
    # lengths
    "n_indent": Refused("there is no such rule; use `guided_regex`", (0,)),
    "t_max_predict_ms": Refused("answers end by tokens, not by time; use `max_tokens`", (0, -1)),
    **dict.fromkeys(("n_keep", "num_keep", "n_discard"), Ignored("a text that fills the context ends", (0,))),
    "truncate_prompt_tokens": Refused("a prompt is read as it is; shorten it", (-1,)),
    "truncation_side": Ignored("prompts are not shortened"),
    "truncate": Refused("a prompt is read as it is; shorten it"),
    # prompts
    "input_ids": Refused("give token ids as the `prompt` of a completion"),
    "prompt_embeds": Refused("prompts are text or token ids"),
    "chat_template": Refused("the model's own template is used; give a completion for another form"),
    "documents": Refused("put them into a message, or into `chat_template_kwargs` of a template that has them", ([],)),
    **dict.fromkeys(("think", "thinking"), Refused('use `chat_template_kwargs`, as {"enable_thinking": false}')),
    "thinking_forced_open": Refused("use `chat_template_kwargs`", (False,)),
    "generation_prompt": Refused("the template says how an answer begins"),
    "task": Refused("put what is asked into a message"),
    "system": Refused("give a message of role system"),
    "template": Refused("the model's own template is used"),
    "context": Refused("send the whole conversation", ([],)),
    "raw": Refused("a completion goes through no template, a chat through the model's", (False,)),
    "images": Refused("pictures are parts of messages", ([],)),
    **dict.fromkeys(
        ("mm_processor_kwargs", "media_io_kwargs", "images_config", "max_dynamic_patch", "min_dynamic_patch"),
        Ignored(_MEDIA)),
    "use_audio_in_video": Ignored(_MEDIA, (False,)),
    "lora": Refused(_ADAPTERS, ([],)),
    "lora_path": Refused(_ADAPTERS, ("",)),
    "session_params": Refused("nothing is stored: send the whole conversation", ({},)),
    # what an answer shows
    "skip_special_tokens": Refused("special tokens have no text; `steps` names them", (True,)),
    "spaces_between_special_tokens": Ignored("special tokens have no text", (True,)),
    "n_probs": Refused("use `logprobs` and, in a chat, `top_logprobs`", (0,)),
    "post_sampling_probs": Refused("log-probabilities are those before temperature and truncation", (False,)),
    "prompt_logprobs": Refused("use a completion with `echo`, `logprobs` and `max_tokens` 0"),
    "logprob_token_ids": Refused("use `logprobs`, which names the most likely ones"),
    **dict.fromkeys(
        ("return_token_ids", "return_tokens"),
        Refused("`steps` names the id of every token, `logprobs` with `return_tokens_as_token_ids` too", (False,))),
    "return_prompt_token_ids": Refused("ask `/tokenize`", (False,)),
    "return_prompt_text": Refused("ask `/tokenize`, and `/detokenize` for its text", (False,)),
    "return_token_offsets": Ignored("`logprobs` of a completion have them", (False,)),
    "return_meta_info": Refused("use `metrics`", (False,)),
    "return_full_text": Refused("use `echo` in a completion", (False,)),
    **dict.fromkeys(("return_hidden_states", "return_routed_experts"), Refused(_HIDDEN, (False,))),
    **dict.fromkeys(("routed_experts_prompt_start", "routed_experts_start_len"), Ignored(_HIDDEN, (0,))),
    "return_cached_tokens_details": Ignored("`usage` has the number of cached tokens of the prompt", (False,)),
    "return_mm_kwargs": Ignored(_MEDIA, (True,)),
    "response_fields": Refused("an answer comes whole", ([],)),
    "timings_per_token": Ignored("`metrics` has times", (False,)),
    "return_progress": Ignored("the first token shows that the prompt is read", (False,)),
    "sse_ping_interval": Ignored("a stream is silent between tokens"),
    "stream_interval": Ignored("tokens come as they are made", (1,)),
    "verbose": Ignored("`metrics` and `steps` have more", (False,)),
    "stream_reasoning": Ignored("thoughts come as they are made", (True,)),
    "reasoning_control": Refused("use `reasoning_budget_tokens`", (False,)),
    "parse_tool_calls": Refused("calls are read where `tools` are given", (True,)),
    "_debug_render_only": Refused("ask `/tokenize`", (False,)),
    # how a request is carried
    "cache_prompt": Ignored("prompts are cached by their beginnings, and answers are the same", (True,)),
    "n_cache_reuse": Ignored("the cache matches prompts by their beginnings only", (0,)),
    "keep_alive": Ignored("the one model stays in memory; with several it is honoured"),
    "priority": Ignored(_ROUTED, (0,)),
    "id_slot": Ignored(_ROUTED, (-1,)),
    **dict.fromkeys(("request_id", "rid"), Ignored("the header `x-request-id` is taken and returned")),
    **dict.fromkeys(("session_id", "extra_key"), Ignored("nothing is stored")),
    "custom_labels": Ignored("metrics have no labels of requests"),
    "ngram_corpus_id": Ignored("drafts change no answer"),
    **dict.fromkeys(("routed_dp_rank", "data_parallel_rank", "disagg_prefill_dp_rank"), Ignored(_ROUTED)),
    **dict.fromkeys(("kv_transfer_params", "ec_transfer_params"), Refused(_SPREAD, ({},))),
    **dict.fromkeys(("bootstrap_host", "bootstrap_port", "bootstrap_room"), Refused(_SPREAD)),
    **dict.fromkeys(
        ("num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "use_mmap", "use_mlock", "numa", "low_vram",
         "f16_kv", "vocab_only", "speculative.n_max", "speculative.n_min", "speculative.p_min"),
        Ignored("the operator says how the model is loaded and run")),
}
"""Fields that clients of vLLM, SGLang, llama.cpp's server and Ollama send."""
_OLD_TOOLS, _ASK_CHATS = "give `tools`", "ask `/v1/chat/completions`"
_ACCOUNTS: dict[str, Unread] = {
    "moderation": Refused("the server moderates nothing"),
    "safety_identifier": Ignored("the server keeps no account of users; `user` goes to its log"),
    "service_tier": Ignored("there is one tier", ("auto", "default")),
    **dict.fromkeys(("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
                    Ignored("the cache matches prompts by their beginnings only")),
}
CHAT: dict[str, Unread] = {
    **OF_PEERS,
    **_ACCOUNTS,
    "metadata": Ignored("chats are not stored", ({},)),
    "store": Ignored("chats are not stored; `/v1/responses` stores", (False,)),
    "best_of": Refused("ask `/v1/completions`, or name the method `best_of`", (1,)),
    "echo": Refused("an answer holds what the model says; use a completion", (False,)),
    "add_special_tokens": Refused("the chat template says which there are", (False,)),
    "audio": Refused("the model makes text only"),
    "modalities": Refused("the model makes text only", (["text"],)),
    "function_call": Refused(_OLD_TOOLS, ("none",)),
    "functions": Refused(_OLD_TOOLS, ([],)),
    "web_search_options": Refused("the server searches nothing"),
    "prediction": Ignored("methods that draft need no prediction from the client"),
    "verbosity": Ignored("the server has no such option"),
}
"""Of `/v1/chat/completions`."""
COMPLETION: dict[str, Unread] = {
    **OF_PEERS,
    "add_special_tokens": Refused("text is read as the tokenizer reads it; give token ids for another way", (True,)),
    "tools": Refused(_ASK_CHATS, ([],)),
    "tool_choice": Refused(_ASK_CHATS, ("none", "auto")),
    "top_logprobs": Refused("use `logprobs`, a number in completions", (0,)),
    **dict.fromkeys(
        ("reasoning_effort", "reasoning", "enable_thinking"), Ignored("completions go through no chat template")),
}
"""Of `/v1/completions`."""
INFILL: dict[str, Unread] = {**COMPLETION, "t_max_prompt_ms": Ignored("a prompt is read whole")}
"""Of `/infill`."""
RESPONSES: dict[str, Unread] = {
    **OF_PEERS,
    **_ACCOUNTS,
    "include": Ignored("there is nothing more to include", ([],)),
    "truncation": Ignored("a prompt that is too long is answered 400", ("disabled",)),
    "stream_options": Ignored("events are as they are"),
    "max_tool_calls": Ignored("the server calls no tools itself"),
    "access_programs": Ignored("the server knows none"),
    "top_logprobs": Refused(_ASK_CHATS, (0,)),
    **dict.fromkeys(("background", "background_options"), Refused("a response is made as its request waits", (False,))),
    "conversation": Refused("conversations have no names: give the last response as `previous_response_id`"),
    "prompt": Refused("prompts are not stored: send the text"),
    "context_management": Refused("send what the model is to see"),
    "image": Refused("the model makes text only"),
}
"""Of `/v1/responses`."""
OLLAMA: dict[str, Unread] = {
    **{name: field for name, field in OF_PEERS.items() if name not in ("system", "think", "raw", "images")},
    "truncate": Refused("a prompt is read as it is; shorten it", (False,)),
    "shift": Ignored("a text that fills the context ends", (False,)),
    **dict.fromkeys(("logprobs", "top_logprobs"), Refused(_ASK_CHATS, (False, 0))),
    **dict.fromkeys(("width", "height"), Refused("the model makes text only", (0,))),
}
"""Of `/api/chat` and `/api/generate`."""
_KEPT_WHOLE: tuple[Any, ...] = ({}, {"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]})
MESSAGES: dict[str, Unread] = {
    **{name: field for name, field in OF_PEERS.items() if name not in ("system", "thinking")},
    "metadata": Ignored("nothing is stored", ({},)),
    "service_tier": Ignored("there is one tier", ("auto", "standard_only")),
    "cache_control": Ignored("the cache matches prompts by their beginnings only"),
    "speed": Ignored("there is one speed", ("standard",)),
    **dict.fromkeys(("billing_policy", "fallback_credit_token", "inference_geo", "user_profile_id", "workspace_id"),
                    Ignored("the server has no accounts")),
    "betas": Ignored("the server has no features on trial", ([],)),
    "diagnostics": Ignored("nothing is stored"),
    "fallbacks": Refused("there is no other model", ([],)),
    "container": Refused("the server runs no code"),
    "mcp_servers": Refused("the server calls tools for its page alone", ([],)),
    "context_management": Refused("send what the model is to see", _KEPT_WHOLE),
    "compaction": Refused("send what the model is to see"),
    "thread": Refused("nothing is stored: send the whole conversation"),
}
"""Of `/v1/messages`."""
IGNORED = "x-shoal-ignored"
"""The response header with the names of the request's fields that had no effect."""
_MOST_NAMED = 64
_UNKNOWN = Ignored("unknown; see docs/serving.md for those that there are")


def sorted_out(
    given: Mapping[str, Any], read: Collection[str], unread: Mapping[str, Unread], strict: bool
) -> tuple[dict[str, Any], list[str]]:
    """The fields of a request that are read, and the names of those without effect.

    Raises:
        ApiError: 400 for a refused field that is not neutral, and in a strict server for one without effect.
    """
    kept, ignored = dict[str, Any](), list[str]()
    for name, value in flattened(given).items():
        field = unread.get(name, _UNKNOWN)
        if name in read:
            kept[name] = value
        elif field is not _UNKNOWN and (value is None or _is_one_of(value, field.neutral)):
            continue
        elif isinstance(field, Ignored) and not strict:
            ignored.append(name)
        else:
            raise ApiError(400, f"{name} is not supported: {field.note}", param=name, code="unsupported_parameter")
    return kept, ignored


def named(ignored: Sequence[str]) -> dict[str, str]:
    """The header with the names of fields without effect; no header if there are none."""
    names = (quote(name[:64], safe="") or '""' for name in ignored[:_MOST_NAMED])  # a header may not end in a space
    return {IGNORED: ", ".join(names)} if ignored else {}


def flattened(given: Mapping[str, Any]) -> dict[str, Any]:
    """A request's fields, those in Ollama's `options` too; ApiError 400 if that is no object, or contradicts others."""
    inner = given.get("options")
    outer = {name: value for name, value in given.items() if name != "options"}
    if inner is None:
        return outer
    if not isinstance(inner, Mapping) or "options" in inner:
        raise refused("options", "options must be an object, whose entries count as fields of the request")
    twice = sorted(name for name in inner if outer.get(name) not in (None, inner[name]))
    if twice:
        raise refused("options", f"options.{twice[0]} differs from {twice[0]}; give one")
    return {**outer, **inner}


def _is_one_of(value: Any, neutral: tuple[Any, ...]) -> bool:
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral)
