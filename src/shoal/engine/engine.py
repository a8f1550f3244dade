"""The engine: one loaded model that generates, streams and chats.

An engine may be used from several threads: forwards take turns, and every call has its own cache, so calls interleave
step by step without touching each other.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NoReturn, overload

from typing_extensions import Unpack

from shoal.decode.prefixes import places_of_states
from shoal.decode.recipe import Recipe
from shoal.decode.running_sequence import RunningSequence
from shoal.decode.text.stop import StopState
from shoal.depth.plan import NEVER
from shoal.engine.cards import card as cards
from shoal.engine.cards import fingerprint
from shoal.engine.cards.card import Card
from shoal.engine.chats import read_chat
from shoal.engine.constraints.constraint import Compiler
from shoal.engine.loading.adapters import AdapterWish, name_of
from shoal.engine.loading.companions import DraftModels, OpenModel, TrainedTensors
from shoal.engine.loading.form import FileForm
from shoal.engine.loading.generation_config import processors
from shoal.engine.loading.ranks import ALONE
from shoal.engine.memory.amounts import shown
from shoal.engine.memory.footprint import weight_bytes
from shoal.engine.memory.memory_limit import MemoryLimit
from shoal.engine.request import Options, Prompt, Request, is_batch, prompt_ids
from shoal.engine.scheduling.stream import Stream
from shoal.engine.scheduling.turns import FairTurns
from shoal.engine.session import Session
from shoal.errors import OutOfMemory, Unsupported, stays_here
from shoal.methods import make
from shoal.methods.base import check_distances, check_order, lost_kind
from shoal.model.encoders.encoder import Encoder
from shoal.model.hearing import Hearing
from shoal.model.kv.cache import KVCache
from shoal.model.layers.cross_attention import Encoded
from shoal.model.layers.pictures import Pictures, keys_of
from shoal.model.lora.adapter import FittedAdapter
from shoal.model.mtp import MtpLayer
from shoal.model.packed.source import Source
from shoal.model.runner import ModelRunner
from shoal.model.vision import Vision
from shoal.speculative.cost.policy import Meter
from shoal.speculative.drafter_files import stamp
from shoal.speculative.layer_head import MtpHead
from shoal.types import MaskedModel, ModelInfo, Result

log = logging.getLogger(__name__)

_RESERVE = 1024
"""Most generated positions for which KV memory is reserved at once; it grows for longer answers."""
_DRAFT = 32
"""Positions reserved for guesses beside the answer, so that a wide tree at its end does not move the cache."""


class Engine:
    """A loaded model that generates, streams and chats; made by `shoal.load`.

    Args:
        runner: runs the model's layers.
        tokenizer: a transformers tokenizer, or None: then prompts are token ids and results carry no text.
        model_name: for reports.
        eos_token_ids: ids that end a sequence.
        card: calibration of the model's layers.
        model: the transformers model behind the runner, where there is one.
        open_model: makes the engine of a model that is to draft; None where no second model can be had.
        generation_rules: what the model's generation config forces and forbids; see
            `shoal.engine.loading.generation_config`.

    Attributes:
        ranks: the processes that share the model.
        misses_card: whether the one warning about a method that could use a card and finds none is still to come.
        changed: the weights by name where a transform made them, else None.
        changes: what was done to another model to make this one, in words. Exact means exact to this one.
        masked: what a masked-diffusion model says of itself, else None.
        parallel: the token by which the model, as a draft model, guesses in parallel, or None.
        mtp: finds the layer for further tokens in the model's files; it returns None where they have none.
        family: the type of the model's config, such as "llama".
        form: says how the weights lie in the model's files.
        files_beside: finds files beside the model's own that may be drafters for it.
        limit: the memory that the process may take; what cannot fit is refused before it starts. None for any.
        sampling: what the model's makers recommend for `Sampling`, where they say so. Commands and servers draw by it;
            see `shoal.engine.loading.generation_config`.
        adapters: what runs beside the model for requests that name it, by name; see `add_adapter`.
        adapter: the one of them for requests that name none; "" for none.
        sampling_from: where that stands: "files", the address that the table of short names gives, or "" for nowhere.
        encoder: reads a source, for models that have one; None for others. What it returns is a request's `source`. One
            of text reads prompts of requests without a source, which are then answered from the decoder's first token.
        vision: reads pictures of chats; None for models that do not see, or that Shoal runs as text models.
        hearing: hears sounds of chats; None likewise.
        blind: why a file beside the model does not read pictures for it; empty where none is there.
        unpacked: why transformers' modules run, where Shoal's packed layers were wanted and do not fit; "" otherwise.
    """

    def __init__(
        self, runner: ModelRunner, tokenizer: Any = None, *, model_name: str = "",
        eos_token_ids: frozenset[int] = frozenset(), card: Card | None = None, model: Any = None,
        open_model: OpenModel | None = None, generation_rules: Mapping[str, Any] | None = None,
    ) -> None:
        self.runner, self.tokenizer, self.model, self.model_name = runner, tokenizer, model, model_name
        self.eos_token_ids = eos_token_ids
        self._card, self._looked = card or Card(), False
        self.misses_card, self.ranks = True, ALONE
        self.changed: Source | None = None
        self.changes = ""
        self.masked: MaskedModel | None = None
        self.parallel: int | None = None
        self.mtp: Callable[[], MtpLayer | None] = lambda: None
        self.limit: MemoryLimit | None = None
        self._generation_processors = partial(processors, generation_rules or {}, device=runner.device)
        self.sampling: Mapping[str, float] = {}
        self.sampling_from = self.unpacked = self.family = ""
        self.form: Callable[[], FileForm] = FileForm
        self.files_beside: Callable[[], Sequence[Path]] = tuple
        self.adapters: dict[str, FittedAdapter] = {}
        self.adapter = ""
        self.encoder: Encoder | None = None
        self.vision: Vision | None = None
        self.hearing: Hearing | None = None
        self.blind = ""
        self._turn: AbstractContextManager[bool] = threading.RLock()
        self._draft_models = None if open_model is None else DraftModels(self, open_model)
        self._tensors = TrainedTensors(runner.device)
        self._memory: dict[Any, Any] = {}
        self._meters: dict[str, Meter] = {}
        self._said: set[str] = set()

    def __reduce__(self) -> NoReturn:
        raise stays_here("an engine")

    def info(self, max_new_tokens: int = 256) -> ModelInfo:
        """What methods may know about the model and a request of that length."""
        return ModelInfo(
            num_layers=self.runner.num_layers, max_new_tokens=max_new_tokens, head_layers=self.runner.head_layers,
            scores=self.card.layer_scores, order=self.card.order, bears=self.card.bears, skips=self.card.skips,
            can_split=self.runner.can_split, windows=self.runner.windows, kv_sizes=self.runner.kv_sizes,
            sources=self.runner.sources, by_distance=self.runner.by_distance,
            turns_keys=self.runner.turns_keys, context=self.runner.max_positions,
            shows_queries=self.runner.shows_queries, keeps_threads=self.runner.keeps_threads, tokenizer=self.tokenizer,
            draft_engine=self._draft_models, tensors=self._tensors, fingerprint=lambda: self.fingerprint,
            memory=self._memory, changes=self.changes, masked=self.masked, free=self.ranks.size == 1,
            mtp=self._beside, beside=self.files_beside, drafter=self._drafter,
        )

    def _beside(self) -> MtpHead | None:
        """The layer for further tokens that the model brings, made once; None where its files have none.

        Raises:
            Unsupported: Shoal does not run it, or the memory does not hold it too.
        """
        if MtpHead not in self._memory:
            layer = self.mtp()
            if layer is not None and self.limit is not None:  # as one of the model's own, whose 4 bits may become 8
                own = 2 * weight_bytes(self) // self.runner.num_layers * (1 + len(layer.further))
                self.limit.check_weights("the model's layer for further tokens", own)
            self._memory[MtpHead] = None if layer is None else MtpHead(self.runner, layer)
        found: MtpHead | None = self._memory[MtpHead]
        return found

    def _drafter(self, folder: str) -> Any:
        """The drafter of another tool in a folder, made once for files as they are.

        Raises:
            ValueError: its files cannot be read.
            Unsupported: it does not fit the model, Shoal does not run it, or the memory does not hold it too.
        """
        from shoal.speculative.drafters import heads  # readers of all tools' files, which few starts need

        found = self._memory.get((stamp, folder))
        if found is None or found[0] != stamp(folder):
            make = heads.read(folder)
            if self.limit is not None:
                self.limit.check_weights(f"the drafter {folder!r}", sum(size for _, _, size in stamp(folder)[1:]))
            found = self._memory[(stamp, folder)] = stamp(folder), make(self.runner)
        return found[1]

    @property
    def card(self) -> Card:
        """What is known about the layers: from beside the model, else from the cards of known models.

        Known models are searched when it is first read. Setting it puts another card in its place.
        """
        if self._card.empty and not self._looked:
            self._looked = True
            self._card = cards.find(self)
        return self._card

    @card.setter
    def card(self, card: Card) -> None:
        self._card, self._looked = card, True

    @cached_property
    def fingerprint(self) -> str:
        """Tells this model from others, whatever the precision it was loaded in."""
        if self.changed is not None:
            return fingerprint.of_source(self.changed)
        return fingerprint.of_model(self.model, self.model_name)

    def add_adapter(self, path: str, name: str | None = None, scale: float = 1.0) -> str:
        """Load an adapter of low rank for requests that name it; the weights stay as they are.

        Args:
            path: peft's folder, or a GGUF file of llama.cpp.
            name: its name; None for that of the folder or file.
            scale: its strength, a factor beside its own.

        Returns:
            The name.

        Raises:
            ValueError: the files are missing or odd, those of another model, or the name is taken; nothing is added.
            Unsupported: the adapter is more than products of low rank, or changes what Shoal adds nothing to.
        """
        wish = AdapterWish(path, name_of(path) if name is None else name, scale)
        if wish.name in self.adapters:
            raise ValueError(f"there are two adapters named {wish.name!r}; write NAME=PATH with another name for one")
        if self.ranks.size > 1:
            raise Unsupported("an adapter with tensor parallelism", "each process holds a slice of every matrix",
                              "Use one process")
        adapter = wish.load()
        if self.limit is not None:
            self.limit.check_weights(f"the adapter {wish.name!r}", adapter.nbytes)
        with self._turn:
            self.adapters[wish.name] = self.runner.fit(adapter)
        return wish.name

    def fitted_adapter(self, name: str | None) -> FittedAdapter | None:
        """The adapter of a name; None for "", and where None names none; ValueError where there is none so named."""
        name = self.adapter if name is None else name
        if name and name not in self.adapters:
            raise ValueError(f"there is no adapter {name!r}; the model has {', '.join(self.adapters) or 'none'}")
        return self.adapters[name] if name else None

    @overload
    def generate(
        self, prompt: list[str] | list[list[int]] | list[list[dict[str, str]]], **options: Unpack[Options]
    ) -> list[Result]: ...

    @overload
    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Result: ...

    def generate(self, prompt: Any, **options: Any) -> Result | list[Result]:
        """Generate to the end.

        Args:
            prompt: text, token ids, or chat messages such as {"role": "user", "content": "Hello"}, which go through the
                model's chat template; or a list of such prompts.
            **options: see `Request`.

        Returns:
            A result, or a list of results in the order of the prompts.

        Raises:
            ValueError: an unknown or impossible option, or a prompt that is empty or too long.
        """
        request, ids, size = self._asked(prompt, options)
        seqs, results = self.seqs(ids, request), list[Result]()
        for first in range(0, len(seqs), size):
            group = seqs[first : first + size]
            for seq_id, seq in enumerate(group):
                seq.seq_id = seq_id
            stream = Stream(self, group, self.cache_for(group, request.max_new_tokens))
            for _ in stream:
                pass
            results += stream.results
        return results if is_batch(prompt) else results[0]

    def stream(self, prompt: Any, **options: Any) -> Stream:
        """Generate step by step: iterate over the steps of all sequences, then read `.result` or `.results`.

        Takes what `generate` takes. Leaving the loop early, or `close`, ends the generation and frees its memory.
        """
        request, ids, size = self._asked(prompt, options)
        if self.limit is not None and size < len(ids):
            raise OutOfMemory(f"a stream of {len(ids)} prompts at once", f"{size} fit into the memory of "
                              f"{shown(int(self.limit.memory))}", "Stream fewer prompts, or use engine.generate")
        seqs = self.seqs(ids, request)
        return Stream(self, seqs, self.cache_for(seqs, request.max_new_tokens))

    def _asked(self, prompt: Any, options: Mapping[str, Any]) -> tuple[Request, list[list[int]], int]:
        """Options, as they fit into the memory, and prompts, checked, and how many of these fit at a time."""
        request, ids = self.read(prompt if is_batch(prompt) else [prompt], Request.from_options(options))
        if self.limit is None:
            return request, ids, len(ids)
        plan = self.limit.plan(self, ids, request)
        if plan.changed:
            self._say_once(f"to stay within {shown(int(self.limit.memory))}: {plan.changed}")
        return replace(request, method=plan.method), ids, plan.seqs

    def read(self, prompts: Sequence[Any], request: Request) -> tuple[Request, list[list[int]]]:
        """Prompts as token ids, and the request with their sources: texts for an encoder, or what chats show.

        Raises:
            ValueError: a prompt is empty or too long, or a picture or sound is refused.
        """
        encoder = self.encoder
        if encoder is not None and encoder.text is not None and request.source is None:
            texts = [prompt_ids(one, self.tokenizer, encoder.text.vocabulary, None) for one in prompts]
            with self.turn():
                sources = tuple(map(encoder.read, texts))
            return _with_sources(request, sources), [[encoder.text.start] for _ in texts]
        pairs = [self._read(one) for one in prompts]
        ids = [prompt_ids(told, self.tokenizer, self.runner.vocab_size, self.runner.max_positions) for told, _ in pairs]
        pictures = tuple(seen for _, seen in pairs)
        return _with_sources(request, pictures) if any(pictures) else request, ids

    def _read(self, prompt: Any) -> tuple[Any, Pictures | None]:
        """A prompt; of a chat with pictures or sounds its ids, and these."""
        chat = isinstance(prompt, Sequence) and prompt and all(isinstance(one, Mapping) for one in prompt)
        return read_chat(self, prompt) if chat else (prompt, None)

    def plan(self, method: Any = "full", *, max_new_tokens: int = 256) -> list[tuple[int, ...]]:
        """The layers that each step runs; entry 0 is the token that comes from the prefill: all layers."""
        return list(map(self.recipe(method, max_new_tokens).plan.layers, range(max_new_tokens)))

    def session(self, *, system: str | None = None, **options: Unpack[Options]) -> Session:
        """A chat that keeps its KV between turns; `options` are the defaults of every turn."""
        return Session(self, system=system, **options)

    def recipe(self, method: Any, max_new_tokens: int) -> Recipe:
        """What a method makes of this model and a request of that length."""
        chosen, info = make(method), self.info(max_new_tokens)
        recipe = chosen.recipe(info)
        check_order(chosen.name, recipe, info)
        check_distances(chosen.name, recipe, info)
        if (lost := lost_kind(chosen.name, recipe, info)) is not None:
            self._say_once(lost)
        if (notice := chosen.notice(info)) is not None:
            self._say_once(notice)
        elif chosen.wants_card and self.card.empty and self.misses_card:
            self.misses_card = False
            log.warning(
                "%s leaves layers out by their position, since nothing is known about the layers of %s: that may cost "
                "several times the quality of a measured order.%s", chosen.name, self.model_name or "this model",
                " Measure them with shoal.quick_card(engine), a minute once, or with `shoal calibrate`" if
                self.encoder is None else "",
            )
        metered = recipe.scratch and not recipe.self_metered  # a warning is due where guessing loses time
        meter = self._meters.setdefault(chosen.name, Meter(chosen.name, self._say_once)) if metered else None
        return replace(recipe, horizon=recipe.horizon or max_new_tokens, meter=meter)

    def _say_once(self, message: str) -> None:
        """Log a warning that this engine has not given yet."""
        if message not in self._said:
            self._said.add(message)
            log.warning(message)

    def seqs(
        self, ids: Sequence[list[int]], request: Request, recipe: Recipe | None = None, *, patient: bool = True
    ) -> list[RunningSequence]:
        """A sequence per prompt, ready for the loop.

        Args:
            recipe: in place of what the request's method makes.
            patient: whether a sequence's masks wait for answers of monitors; see `shoal.decode.sampling.NotYet`.
        """
        recipe = recipe or self.recipe(request.method, request.max_new_tokens)
        self.ranks.check(recipe)
        seed, adapter = self.ranks.agree(request.seed), self.fitted_adapter(request.adapter)
        endless = recipe.keep is not None and recipe.keep.turns
        rules = request.rules(self.eos_token_ids, None if endless else self.runner.max_positions)
        stops = [StopState(rules, self.tokenizer, tokens) for tokens in ids]
        beside = self.vision is not None or self.hearing is not None
        sources = request.sources(ids, self.encoder is not None, beside)
        forbid = request.forbids(rules, self.tokenizer, self.runner.vocab_size)
        asked = zip(ids, stops, sources, request.constraints(len(ids)), strict=True)
        seqs = []
        for number, (tokens, stop, source, wanted) in enumerate(asked):
            bound = None if wanted is None else self.constraints(wanted, stop.room, tokens, patient)
            own = self._generation_processors(
                tokens, request.max_new_tokens, source=None if source is None else source.ids or None)
            seqs.append(RunningSequence(
                number=number, seq_id=number, tokens=list(tokens), prompt_length=len(tokens), stop=stop,
                sampling=request.sampling, seed=seed, plan=recipe.plan, salt=request.cache_salt, adapter=adapter,
                source=source, marks=self._marks(tokens, source) if self.runner.state_bytes else (),
                recipe=recipe if bound is None else replace(recipe, constraint=bound),
                processors=(*own, *forbid(len(tokens)), *request.logits_processor)))
        return seqs

    def _marks(self, tokens: Sequence[int], source: Encoded | Pictures | None) -> tuple[int, ...]:
        """Where recurrent layers keep states; also behind the last picture, of which another question may be asked."""
        found = places_of_states(keys_of(tokens, source), self._special)
        behind = source.places[-1] + 1 if isinstance(source, Pictures) else 0
        return tuple(sorted({*found, behind})) if 0 < behind < len(tokens) else found

    @cached_property
    def _special(self) -> frozenset[int]:
        """Tokens that text does not hold."""
        return frozenset(getattr(self.tokenizer, "all_special_ids", ()))

    @cached_property
    def constraints(self) -> Compiler:
        """Makes masks of constraints; Unsupported where there can be none, see `Compiler`."""
        return Compiler(self.tokenizer, self.runner.vocab_size, self.eos_token_ids)

    def cache_for(self, seqs: Sequence[RunningSequence], max_new_tokens: int) -> KVCache:
        """An empty cache with room for what each layer will store of these sequences."""
        prompt = max(seq.prompt_length for seq in seqs)
        answer = min(max_new_tokens, _RESERVE)
        drops = [max(drop) for drop in zip(*(seq.plan.attention for seq in seqs), strict=True)]
        room = max(min(_DRAFT, seq.recipe.scratch) for seq in seqs)
        reserve = [prompt + room + min(answer, drop - 1 if drop < NEVER else answer) for drop in drops]
        keeps = [seq.recipe.keep for seq in seqs if seq.recipe.keep is not None]
        if len(keeps) == len(seqs):
            reserve = [room + max(keep.most_slots(slots) for keep in keeps) for slots in reserve]
        return self.runner.new_cache(len(seqs), reserve)

    def turn(self) -> AbstractContextManager[bool]:
        """The lock that a forward holds; a logits processor may use the engine itself."""
        return self._turn

    def share_turns(self, turns: FairTurns) -> None:
        """Run no forward while another engine that shares these turns does; to be called before the first one."""
        self._turn = turns.of(self._turn)


def _with_sources(request: Request, sources: tuple[Any, ...]) -> Request:
    """The request with a source for each prompt."""
    return replace(request, source=sources if len(sources) > 1 else sources[0])
