"""A model's answers with their hidden states, in a folder, so that training needs no forward of the model.

The folder holds `corpus.json` (how it was made), `prompts.json`, and shards of a fixed number of answers each:
`states-00000.safetensors` and so on. A shard is written whole or not at all, and missing shards are added later. A
state is an input of the LM head: the last layer's output after the final norm. What enters other layers lies beside,
in `taps-2-8-13-00000.safetensors` and so on for layers 2, 8 and 13.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from shoal.depth.plan import DepthPlan
from shoal.engine.engine import Engine
from shoal.engine.scheduling.request_handle import RequestHandle
from shoal.engine.scheduling.scheduler import Scheduler
from shoal.model.layers.cross_attention import Encoded
from shoal.model.runner import ModelRunner, SequenceChunk
from shoal.types import Result
from shoal_lab.train import files
from shoal_lab.train.buckets import two_dimensional
from shoal_lab.train.sources import Sources

SHARD, SOURCED = 64, 16
"""Answers per shard, and beside an encoder, where they are made one after another."""
_TOGETHER = 32
"""Answers decoded at once."""
_VALIDATION = 16
"""One answer in this many is held out from training."""
_LONGEST = 384
"""Most tokens of a prompt; longer ones are left out."""
Tell = Callable[[str], None]


@dataclass(frozen=True)
class CorpusWish:
    """The wanted corpus; corpora that differ in any attribute are different.

    Attributes:
        tokens: no shard is begun after this many answer tokens.
        max_new_tokens: the longest answer.
        temperature: of the answers; 0 for greedy ones.
        seed: of draws.
        gigabytes: no shard is begun beyond this size.
    """

    tokens: int = 500_000
    max_new_tokens: int = 192
    temperature: float = 0.0
    seed: int = 0
    gigabytes: float = 10.0


@dataclass(frozen=True)
class AnsweredText:
    """A prompt and the model's answer, with the states of both.

    Attributes:
        tokens: int64 [n]; the first `prompt` of them are the prompt.
        states: [n, D] in bfloat16; `states[t]` predicts token t + 1.
        prompt: number of prompt tokens.
        tapped: [n, k D] in bfloat16, what enters k layers, one after the other; None where it was not asked for.
        source: float32 [places, hidden], the last states of the encoder, of models that have one.
    """

    tokens: Tensor
    states: Tensor
    prompt: int
    tapped: Tensor | None = None
    source: Tensor | None = None


class Corpus:
    """The shards of a folder.

    Args:
        folder: their folder.
        whole: whether the corpus is complete.
        taps: layers whose inputs are read as well, which `tap` has written.

    Attributes:
        facts: content of `corpus.json`.

    Raises:
        ValueError: there are no shards, or the folder cannot be read.
    """

    def __init__(self, folder: Path, whole: bool = True, taps: Sequence[int] = ()) -> None:
        self.whole, self.taps, self._folder = whole, (*taps,), folder
        self.facts: dict[str, Any] = files.read_json(folder / "corpus.json")
        self.shards = _shards(folder)
        if not self.shards:
            raise ValueError(f"{folder} holds no answers yet; make some first, or give it more time")

    def answers(self, shard: int, *, validation: bool) -> list[AnsweredText]:
        """Training answers of one shard, or its held-out ones."""
        held = _read(self.shards[shard])
        lengths, prompts = held["lengths"].tolist(), held["prompts"].tolist()
        pairs = zip(held["tokens"].long().split(lengths), held["states"].split(lengths), prompts, strict=True)
        whole = [AnsweredText(*one) for one in pairs]
        if self.taps:
            tapped = _read(_tapped(self._folder, self.taps, shard))["tapped"].split(lengths)
            whole = [replace(one, tapped=own) for one, own in zip(whole, tapped, strict=True)]
        if "sources" in held:
            sources = held["sources"].split(held["places"].tolist())
            whole = [replace(one, source=own) for one, own in zip(whole, sources, strict=True)]
        return [one for place, one in enumerate(whole) if (place % _VALIDATION == 0) == validation]

    def validation(self, most: int = 128) -> list[AnsweredText]:
        """Held-out answers, spread over the shards."""
        per = max(1, most // len(self.shards))
        return [one for shard in range(len(self.shards)) for one in self.answers(shard, validation=True)[:per]]

    def frequent(self, count: int) -> list[int]:
        """The most frequent tokens of training answers, by id, ascending; tokens that do not occur are left out."""
        counts: Tensor | None = None
        for shard in range(len(self.shards)):
            said = torch.cat([one.tokens[one.prompt :] for one in self.answers(shard, validation=False)])
            found = torch.bincount(said, minlength=self.facts["vocab_size"])
            counts = found if counts is None else counts + found
        assert counts is not None
        order = counts.argsort(descending=True, stable=True)[:count]
        return sorted(order[counts[order] > 0].tolist())

    @property
    def digest(self) -> str:
        """A hash of the tokens; cards say with it what was trained on."""
        digest = hashlib.sha256()
        for path in self.shards:
            held = _read(path)
            for name in ("lengths", "tokens"):
                digest.update(str(held[name].tolist()).encode())
        return digest.hexdigest()[:16]


def make(
    folder: Path, engine: Engine, prompts: Callable[[], Sequence[Sequence[int]]], wish: CorpusWish,
    tell: Tell = lambda message: None, until: Callable[[], bool] = lambda: False, sources: Sources | None = None,
) -> Corpus:
    """Make a corpus, or the missing part of it.

    Args:
        folder: its folder; created if absent.
        engine: the model that answers.
        prompts: returns their token ids; called if none are stored yet.
        wish: the wanted corpus.
        tell: receives progress messages.
        until: whether to stop; asked before each shard.
        sources: reads prompts with the model's encoder, where it has one.

    Raises:
        ValueError: the folder holds another corpus.
    """
    folder.mkdir(parents=True, exist_ok=True)
    facts = {"fingerprint": engine.fingerprint, "vocab_size": engine.runner.vocab_size, **_told(wish),
             **({} if sources is None else {**sources.facts, "shard": SOURCED})}
    _claim(folder / "corpus.json", facts)
    asked = _asked(folder / "prompts.json", prompts if sources is None else lambda: sources.ordered(prompts(), SOURCED))
    made, whole, size = sum(_size(path) for path in _shards(folder)), True, SHARD if sources is None else SOURCED
    for number in range(len(_shards(folder)), -(-len(asked) // size)):
        room = wish.gigabytes * 1e9 - sum(path.stat().st_size for path in _shards(folder))
        if made >= wish.tokens or room <= 0:
            break
        if until():
            whole = False
            break
        path = folder / f"states-{number:05d}.safetensors"
        part = asked[number * size : (number + 1) * size]
        made += (_make_shard(path, engine, part, wish, number) if sources is None
                 else _make_sourced(path, engine, sources, part, wish))
        tell(f"{made} of {wish.tokens} tokens answered, {number + 1} shards")
    return Corpus(folder, whole)


def read(
    folder: Path, engine: Engine, texts: Sequence[Sequence[int]], tell: Tell = lambda message: None,
    until: Callable[[], bool] = lambda: False,
) -> Corpus:
    """Make a corpus of given texts, or the missing part of it; all tokens except the first count as the model's answer.

    Args:
        folder: its folder; created if absent.
        engine: the model whose states are kept.
        texts: token ids.
        tell: receives progress messages.
        until: whether to stop; asked before each shard.

    Raises:
        ValueError: the folder holds another corpus, or no text has two tokens.
    """
    whole = [list(text) for text in texts if len(text) > 1]
    if not whole:
        raise ValueError("there is no text of two tokens or more to train on; give a longer one")
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256(repr(whole).encode()).hexdigest()[:16]
    _claim(folder / "corpus.json", {"fingerprint": engine.fingerprint, "vocab_size": engine.runner.vocab_size,
                                    "text": digest})
    count = -(-len(whole) // SHARD)
    for number in range(len(_shards(folder)), count):
        if until():
            return Corpus(folder, False)
        part = whole[number * SHARD : (number + 1) * SHARD]
        _write_shard(folder / f"states-{number:05d}.safetensors", engine, [(text[:1], text) for text in part])
        tell(f"{number + 1} of {count} shards read")
    return Corpus(folder)


def tap(
    corpus: Corpus, folder: Path, engine: Engine, taps: Sequence[int], tell: Tell = lambda message: None,
    until: Callable[[], bool] = lambda: False,
) -> Corpus:
    """The corpus of a folder with what enters further layers, or the missing part of that.

    Args:
        corpus: the complete one.
        folder: its folder.
        engine: the model that answered.
        taps: the layers, ascending.
        tell: receives progress messages.
        until: whether to stop; asked before each shard.
    """
    for shard, path in enumerate(corpus.shards):
        place = _tapped(folder, taps, shard)
        if place.is_file():
            continue
        if until():
            return Corpus(folder, False)
        held = _read(path)
        texts = held["tokens"].split(held["lengths"].tolist())
        found = torch.cat([inputs(engine.runner, text.tolist(), taps) for text in texts])
        files.write(place, partial(save_file, {"tapped": found}))
        tell(f"{shard + 1} of {len(corpus.shards)} shards read at layers {', '.join(map(str, taps))}")
    return Corpus(folder, taps=taps)


def _tapped(folder: Path, taps: Sequence[int], shard: int) -> Path:
    return folder / f"taps-{'-'.join(map(str, taps))}-{shard:05d}.safetensors"


def _told(wish: CorpusWish) -> dict[str, Any]:
    """The attributes of a wish that make it another corpus; its size does not."""
    return {"max_new_tokens": wish.max_new_tokens, "temperature": wish.temperature, "seed": wish.seed}


def _claim(path: Path, facts: Mapping[str, Any]) -> None:
    if not path.exists():
        files.write_json(path, facts)
        return
    found = files.read_json(path)
    for name in facts:
        if found.get(name) != facts[name]:
            raise ValueError(f"{path.parent} holds answers of another kind: {name} was {found.get(name)!r} and now is "
                             f"{facts[name]!r}. Give another folder, or remove this one to start anew")


def _asked(path: Path, prompts: Callable[[], Sequence[Sequence[int]]]) -> list[list[int]]:
    if not path.exists():
        files.write_json(path, [list(one) for one in prompts() if len(one) <= _LONGEST])
    found: list[list[int]] = files.read_json(path)
    if not found:
        raise ValueError("there is no prompt to answer; give --prompts or --data, or more --questions")
    return found


def _make_shard(
    path: Path, engine: Engine, asked: Sequence[Sequence[int]], wish: CorpusWish, number: int
) -> int:
    """Answer, read again, write; returns the number of answer tokens."""
    said = list(answered(engine, asked, together=_TOGETHER, seed=wish.seed + number * SHARD,
                         max_new_tokens=wish.max_new_tokens, temperature=wish.temperature))
    texts = [(list(prompt), [*prompt, *answer.tokens]) for prompt, answer in zip(asked, said, strict=True)]
    return _write_shard(path, engine, [(prompt, text) for prompt, text in texts if len(text) > len(prompt) + 1])


def _make_sourced(
    path: Path, engine: Engine, sources: Sources, asked: Sequence[Sequence[int]], wish: CorpusWish
) -> int:
    """The same beside an encoder, one after another: what layers read of a source is large."""
    texts, found, places = list[tuple[list[int], list[int]]](), dict[str, list[Tensor]](states=[], sources=[]), []
    for one in asked:
        read = sources.read(one)
        answer = engine.generate(read.prompt, source=read.encoded, logits_processor=read.rules, seed=wish.seed,
                                 max_new_tokens=wish.max_new_tokens, temperature=wish.temperature)
        text = [*read.prompt, *answer.tokens]
        if len(answer.tokens) > 1:
            texts.append((read.prompt, text))
            found["states"].append(states(engine.runner, text, read.encoded))
            found["sources"] += [read.states] * sources.kept
            places += [len(read.states)] * sources.kept
    if not texts:
        raise ValueError("the model answers none of the sources with two tokens or more; give others")
    beside = {name: torch.cat(some) for name, some in found.items() if some}
    return _save(path, texts, beside | ({"places": torch.tensor(places, dtype=torch.int32)} if sources.kept else {}))


def _write_shard(path: Path, engine: Engine, texts: Sequence[tuple[list[int], list[int]]]) -> int:
    """Write prompts and whole texts with their states; returns the number of answer tokens."""
    return _save(path, texts, {"states": torch.cat([states(engine.runner, text) for _, text in texts])})


def _save(path: Path, texts: Sequence[tuple[list[int], list[int]]], beside: Mapping[str, Tensor]) -> int:
    tensors = {
        "tokens": torch.tensor([token for _, text in texts for token in text], dtype=torch.int32),
        "lengths": torch.tensor([len(text) for _, text in texts], dtype=torch.int32),
        "prompts": torch.tensor([len(prompt) for prompt, _ in texts], dtype=torch.int32), **beside,
    }
    files.write(path, lambda part: save_file(tensors, part))
    return _spoken(tensors)


def states(runner: ModelRunner, tokens: Sequence[int], source: Encoded | None = None) -> Tensor:
    """The LM head's inputs at every token of a text, about a source if there is one; [n, D] in bfloat16."""
    return _entered(runner, tokens, (runner.num_layers,), runner.normed, source)


def inputs(runner: ModelRunner, tokens: Sequence[int], layers: Sequence[int]) -> Tensor:
    """What enters layers at every token of a text, side by side, [n, k D] in bfloat16."""
    return _entered(runner, tokens, layers, lambda hidden: hidden)


@torch.no_grad()
def _entered(
    runner: ModelRunner, tokens: Sequence[int], layers: Sequence[int], change: Callable[[Tensor], Tensor],
    source: Encoded | None = None,
) -> Tensor:
    cache, plan = runner.new_cache(1), DepthPlan.full(runner.num_layers)
    if source is not None:
        cache.attach(0, source)
    found: dict[int, list[Tensor]] = {layer: [] for layer in layers}

    def hook(layer: int, hidden: Tensor) -> None:
        if layer in found:
            found[layer].append(change(hidden[0]).to("cpu", torch.bfloat16, copy=True))

    for first in range(0, len(tokens), runner.prefill_chunk):
        piece = tokens[first : first + runner.prefill_chunk]
        runner.forward([SequenceChunk(0, piece, [0] * len(piece), plan, wanted=0)], cache, hook)
        cache.commit(0, range(len(piece)))
    return torch.cat([torch.cat(pieces) for pieces in found.values()], 1)


def _shards(folder: Path) -> list[Path]:
    """Shards up to the first gap."""
    found: list[Path] = []
    while (path := folder / f"states-{len(found):05d}.safetensors").is_file():
        found.append(path)
    return found


def _read(path: Path) -> dict[str, Tensor]:
    try:
        held: dict[str, Tensor] = load_file(path)
        return held
    except Exception as error:  # safetensors raises a type of its own for every error
        raise ValueError(f"{path} cannot be read ({error}); remove it and those after it, to make them anew") from None


def _size(path: Path) -> int:
    return _spoken(_read(path))


def _spoken(held: Mapping[str, Tensor]) -> int:
    return int(held["lengths"].sum() - held["prompts"].sum())


def batches(answers: Sequence[AnsweredText], tokens: int) -> Iterator[list[AnsweredText]]:
    """Batches of answers, and sources, of similar lengths; of at most `tokens` places of both with padding."""
    sizes = [(0 if one.source is None else len(one.source), len(one.tokens)) for one in answers]
    for batch in two_dimensional(sizes, tokens):
        yield [answers[place] for place in batch]


def answered(
    engine: Engine, prompts: Sequence[Sequence[int]], *, together: int = 16, seed: int = 0, **options: Any
) -> Iterator[Result]:
    """The full model's answers; prompt i draws with `seed` + i.

    Args:
        engine: the model.
        prompts: token ids.
        together: rows decoded at once.
        seed: of the draws, if the options sample.
        **options: as for `shoal.engine.request.Request`.
    """
    with Scheduler(engine, max_seqs=together, max_waiting=4 * together, prefix_bytes=0) as scheduler:
        under_way: deque[RequestHandle] = deque()
        for number, prompt in enumerate(prompts):
            if len(under_way) >= 3 * together:
                yield _ended(under_way.popleft())
            under_way.append(scheduler.submit(list(prompt), method="full", seed=seed + number, **options))
        while under_way:
            yield _ended(under_way.popleft())


def _ended(handle: RequestHandle) -> Result:
    for _ in handle:
        pass
    return handle.results[0]
