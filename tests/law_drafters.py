"""Drafters with random weights for the model of five tokens whose law is known: of every kind that reads its states."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from assistants import write_assistant
from dflash_drafters import BLOCK_FORMS
from dflash_drafters import write as write_block
from drafts import noisy
from eagle_drafters import FORMS, write
from eagle_part import write_eagle_for
from families import HIDDEN, tiny
from folders import lasting
from mtp_layer import with_layer
from sampled_law import VOCABULARY, target
from shoal.engine.engine import Engine
from shoal.engine.loading.load import engine_for
from state_head_drafters import write_for


@functools.cache
def layer() -> str:
    """A random layer for the target, which guesses all of its tokens but one."""
    return str(write_eagle_for(target(), lasting("law"), (0, 1, 3, 4)))


@functools.cache
def another() -> str:
    """A drafter of another tool for the target, which guesses some of its tokens."""
    form = replace(
        FORMS["eagle3"], config={"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}, vocabulary=VOCABULARY,
        kept=(0, 1, 3, 4), more={"norm.weight": (HIDDEN,), "lm_head.weight": (4, HIDDEN)})
    return str(write(lasting("law"), form))


@functools.cache
def block() -> str:
    """A drafter of DFlash for the target, which guesses some of its tokens."""
    form = replace(
        BLOCK_FORMS["dflash, speculators"], vocabulary=VOCABULARY, kept=(0, 1, 3, 4), taps=(0, 1), mask=2,
        config={**BLOCK_FORMS["dflash, speculators"].config, "aux_hidden_state_layer_ids": [0, 1],
                "mask_token_id": 2}, more={"lm_head.weight": (4, HIDDEN)})
    return str(write_block(lasting("law"), form))


@functools.cache
def heads(name: str) -> str:
    """Heads of an MLP speculator for the target."""
    return str(write_for(lasting("law"), name, VOCABULARY))


@functools.cache
def brings(count: int) -> Engine:
    """The target, whose files hold so many layers for further tokens."""
    return with_layer(engine_for(target().model), "llama", count)


@functools.cache
def with_assistant() -> tuple[Engine, str]:
    """A model of Gemma 4's kind, and an assistant for it."""
    sizes = {"vocab_size": VOCABULARY, "vocab_size_per_layer_input": VOCABULARY}
    folder = write_assistant(lasting("law"), "gemma4_small", vocab_size=VOCABULARY)
    return engine_for(tiny("gemma4_small", **sizes)), str(folder)


@functools.cache
def in_parallel() -> Any:
    """A draft model that guesses in parallel."""
    model = noisy(target().model, 0.15, seed=3)
    model.config.pard_token = 2
    return model
