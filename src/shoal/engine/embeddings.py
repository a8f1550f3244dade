"""Vectors of texts, and the likelihood of an answer's first token: one pass of the model over each text.

A vector is the final norm of a text's last token, or the mean over all of its tokens. That is right for decoders, whose
tokens see those before them; models that were trained with attention in both directions are refused when they load.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from shoal.depth.plan import DepthPlan
from shoal.engine.loaded import LoadedModel
from shoal.errors import Unsupported
from shoal.model.runner import OfLayers, SequenceChunk

Pooling = Literal["last", "mean"]
GoOn = Callable[[], object]
_REMEDY = "Take a decoder that pools the last token, or the mean, and adds nothing to it"


def pooling_beside(name: str) -> Pooling | None:
    """How a model's files say that vectors are pooled; None where they say nothing.

    Args:
        name: the folder, as of sentence-transformers, or the GGUF file of the model.

    Raises:
        Unsupported: in another way than those of `Pooling`, or with layers after it.
    """
    path = Path(name)
    if path.is_file():
        return _of_gguf(path)
    modules, pooling = path / "modules.json", path / "1_Pooling" / "config.json"
    kinds = [str(one.get("type")).rpartition(".")[2] for one in _json(modules, [])]
    if "Dense" in kinds:
        raise Unsupported(f"vectors of {name!r}", "modules.json adds dense layers after the pooling", _REMEDY)
    asked = {key for key, value in _json(pooling, {}).items() if key.startswith("pooling_mode_") and value is True}
    if not asked:
        return None
    if asked == {"pooling_mode_lasttoken"}:
        return "last"
    if asked == {"pooling_mode_mean_tokens"}:
        return "mean"
    raise Unsupported(f"vectors of {name!r}", f"its files ask for {', '.join(sorted(asked))}", _REMEDY)


def _json(path: Path, empty: Any) -> Any:
    return json.loads(path.read_text("utf-8")) if path.is_file() else empty


def _of_gguf(path: Path) -> Pooling | None:
    from shoal.model.gguf.header import read_header  # models from folders need no reader of these

    entries = read_header(path).metadata
    kind = entries.get(f"{entries.get('general.architecture')}.pooling_type")
    if kind in (None, 0):
        return None
    if kind not in (1, 3):
        raise Unsupported(f"vectors of {str(path)!r}", f"its file asks for pooling of type {kind!r}", _REMEDY)
    return "mean" if kind == 1 else "last"


@torch.no_grad()
def embeddings(engine: LoadedModel, texts: Sequence[Sequence[int]], pooling: Pooling, go_on: GoOn = bool) -> Tensor:
    """A vector per text, float32 [texts, D] on the CPU, not normalised.

    Args:
        texts: token ids, at least one of each.
        pooling: of the states after the final norm.
        go_on: called before each forward, which it may prevent by an error.
    """
    runner, seen, found = engine.runner, list[Tensor](), list[Tensor]()
    hook = OfLayers({runner.num_layers}, lambda _, hidden: seen.append(hidden.clone()))
    for group in _groups(texts, runner.prefill_chunk):
        sums = [torch.zeros(()) for _ in group]
        for parts, _ in _forwards(engine, group, go_on, hook):
            for place, (part, hidden) in enumerate(zip(parts, seen.pop(), strict=True)):
                states = hidden[: len(part)]
                if pooling == "last":
                    sums[place] = runner.normed(states[-1:])[0].float().cpu()
                else:
                    sums[place] = sums[place] + runner.normed(states).float().sum(0).cpu() / len(group[place])
        found += sums
    return torch.stack(found)


@torch.no_grad()
def next_logits(
    engine: LoadedModel, texts: Sequence[Sequence[int]], tokens: Sequence[int], go_on: GoOn = bool
) -> Tensor:
    """The logits of some tokens after each text, float32 [texts, tokens] on the CPU; arguments as of `embeddings`."""
    found = list[Tensor]()
    for group in _groups(texts, engine.runner.prefill_chunk):
        for _, logits in _forwards(engine, group, go_on):
            last = logits[:, list(tokens)].float().cpu()
        found.append(last)
    return torch.cat(found)


def _groups(texts: Sequence[Sequence[int]], most: int) -> Iterator[list[Sequence[int]]]:
    """Texts that follow one another, together as long as one forward; a longer one alone."""
    group, size = list[Sequence[int]](), 0
    for text in texts:
        if group and size + len(text) > most:
            yield group
            group, size = [], 0
        group.append(text)
        size += len(text)
    if group:
        yield group


def _forwards(
    engine: LoadedModel, group: Sequence[Sequence[int]], go_on: GoOn, hook: OfLayers | None = None
) -> Iterator[tuple[list[Sequence[int]], Tensor]]:
    """Run texts in turns with the scheduler: the tokens of each in a forward, and the logits of the last of them."""
    runner = engine.runner
    cache, plan = runner.new_cache(len(group)), DepthPlan.full(runner.num_layers)
    for first in range(0, max(map(len, group)), runner.prefill_chunk):
        parts = [text[first : first + runner.prefill_chunk] for text in group]
        chunks = [SequenceChunk(seq, part, [0] * len(part), plan) for seq, part in enumerate(parts)]
        go_on()
        with engine.turn():
            logits = runner.forward(chunks, cache, hook)
            for seq, part in enumerate(parts):
                cache.commit(seq, range(len(part)))
        yield parts, logits
