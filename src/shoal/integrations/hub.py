"""`generate` for the repository form of `custom_generate`.

The function of a repository replaces `generate` as a whole and gets every argument of the caller, streamer and
tokenizer included. This one passes them to transformers' own preparation, with the method as the callable.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from shoal.errors import Unsupported
from shoal.integrations._sequences import check_shape
from shoal.integrations.transformers import KEY, BoundMethod, method_from, named
from shoal.methods import make

_LOADING = ("cache_dir", "code_revision", "force_download", "local_files_only", "proxies", "repo_type", "revision",
            "token")
"""Arguments that transformers used to load the repository, and passes on all the same."""


def generate(
    model: Any, inputs: Any = None, generation_config: Any = None, *, method: Any = None,
    method_args: Mapping[str, Any] | None = None, streamer: Any = None, tokenizer: Any = None, stop_strings: Any = None,
    assistant_model: Any = None, assistant_tokenizer: Any = None, synced_gpus: bool | None = None, **arguments: Any,
) -> Any:
    """Generate as `model.generate` does, decoding with a method of Shoal.

    Args:
        model: the model; not changed.
        inputs: prompt ids [B, T], or in `arguments` as `input_ids`.
        generation_config: as for `model.generate`; may carry a method (`shoal.integrations.transformers.attach`).
        method: a method, its name or its dict. By default the one in the generation configuration of the call or of
            the model; else D3 with its defaults.
        method_args: the options of a method given by name.
        streamer: gets the prompt, every token, and `end()`, even after an error.
        tokenizer: needed for `stop_strings`.
        stop_strings: as for `model.generate`.
        **arguments: all other arguments of `model.generate`.

    Returns:
        What `model.generate` returns.

    Raises:
        Unsupported: Shoal cannot honour an argument.
        ValueError: the ids are not [B, T].
    """
    if assistant_model is not None or assistant_tokenizer is not None:
        raise Unsupported("an assistant model", "Shoal's methods bring their own drafts", "Leave it out")
    if synced_gpus:
        raise Unsupported("synced_gpus=True", "rows end apart, and no process waits for another", "Leave it out")
    ids = arguments.get("input_ids") if inputs is None else inputs
    if ids is not None:
        check_shape(ids)
    configs = [config for config in (generation_config, model.generation_config) if config is not None]
    chosen = named(method, method_args) or _carried(configs)
    strings, config = _take_stop_strings(stop_strings, configs, generation_config)
    if model.generation_config.stop_strings is not None:
        arguments["stop_strings"] = None
    callable_ = BoundMethod(chosen, streamer=streamer, tokenizer=tokenizer, stop_strings=strings or ())
    arguments = {name: value for name, value in arguments.items() if name not in _LOADING}
    return model.generate(inputs, generation_config=config, custom_generate=callable_, **arguments)


def _carried(configs: list[Any]) -> Any:
    carrier = next((config for config in configs if getattr(config, KEY, None) is not None), None)
    return make("d3") if carrier is None else method_from(carrier)


def _take_stop_strings(given: Any, configs: list[Any], config: Any) -> tuple[Any, Any]:
    """The stop strings of a call, and its configuration without them, because `generate` refuses them for callables."""
    found = [one.stop_strings for one in configs if one.stop_strings is not None]
    strings = given if given is not None else next(iter(found), None)
    if config is not None and config.stop_strings is not None:
        config = copy.deepcopy(config)
        config.stop_strings = None
    return strings, config
