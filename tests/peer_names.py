"""Names of the fields that other servers' chats and completions take, beside OpenAI's: what a table must not lack."""

from __future__ import annotations

NAMES: dict[str, str] = {
    "vLLM": """
        thinking_token_budget include_reasoning use_beam_search top_k min_p repetition_penalty watermarking
        length_penalty stop_token_ids include_stop_str_in_output ignore_eos min_tokens skip_special_tokens
        spaces_between_special_tokens truncate_prompt_tokens truncation_side prompt_logprobs logprob_token_ids
        allowed_token_ids bad_words echo add_special_tokens documents chat_template chat_template_kwargs media_io_kwargs
        mm_processor_kwargs structured_outputs priority request_id session_id return_tokens_as_token_ids
        return_token_ids routed_experts_prompt_start return_token_offsets return_prompt_text return_mm_kwargs cache_salt
        kv_transfer_params ec_transfer_params vllm_xargs repetition_detection stream_interval prompt_embeds
        response_format guided_json guided_regex guided_choice guided_grammar guided_decoding_backend
        guided_whitespace_pattern structural_tag logits_processors
    """,
    "SGLang": """
        json_schema regex ebnf stop_regex no_stop_trim lora_path session_params custom_params custom_logit_processor
        images_config bootstrap_host bootstrap_port bootstrap_room routed_dp_rank disagg_prefill_dp_rank
        data_parallel_rank rid extra_key ngram_corpus_id custom_labels return_hidden_states return_routed_experts
        routed_experts_start_len return_cached_tokens_details return_prompt_token_ids return_meta_info task
        separate_reasoning stream_reasoning max_dynamic_patch min_dynamic_patch use_audio_in_video input_ids reasoning
    """,
    "llama.cpp": """
        verbose timings_per_token cache_prompt return_tokens return_progress sse_ping_interval n_predict n_indent n_keep
        n_discard n_cmpl n_cache_reuse t_max_predict_ms response_fields top_n_sigma xtc_probability xtc_threshold
        typical_p dynatemp_range dynatemp_exponent repeat_last_n repeat_penalty dry_multiplier dry_base
        dry_allowed_length dry_penalty_last_n dry_sequence_breakers mirostat mirostat_tau mirostat_eta adaptive_target
        adaptive_decay n_probs min_keep backend_sampling post_sampling_probs lora grammar grammar_lazy grammar_triggers
        grammar_type preserved_tokens reasoning_format reasoning_in_content reasoning_control reasoning_budget_tokens
        generation_prompt parse_tool_calls thinking_forced_open samplers id_slot
    """,
    "Ollama": """
        options format keep_alive think system template context raw images num_predict num_ctx num_keep num_batch
        num_gpu main_gpu num_thread use_mmap numa penalize_newline tfs_z _debug_render_only reasoning
    """,
}
BINDING = """
    structured_outputs json_schema grammar regex ebnf format guided_json guided_regex guided_choice guided_grammar
    structural_tag grammar_lazy guided_whitespace_pattern typical_p repeat_penalty repeat_last_n min_tokens bad_words
    allowed_token_ids include_stop_str_in_output no_stop_trim top_n_sigma top_a tfs_z xtc_probability dynatemp_range
    mirostat adaptive_target dry_multiplier min_keep samplers penalize_newline use_beam_search do_sample watermarking
    repetition_detection stop_regex thinking_token_budget reasoning_budget_tokens custom_logit_processor vllm_xargs
    n_predict num_predict max_new_tokens n_cmpl n_indent t_max_predict_ms truncate_prompt_tokens input_ids prompt_embeds
    chat_template documents think generation_prompt task system template context raw images lora lora_path
    session_params skip_special_tokens options top_k min_p repetition_penalty stop_token_ids ignore_eos
"""
"""Those that change what an answer is: never to be ignored."""
