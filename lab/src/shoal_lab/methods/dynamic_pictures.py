"""The image half of Dynamic-LLaVA: after its first layers, a prompt goes on without most of its pictures' tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from shoal.decode.recipe import Recipe
from shoal.decode.worker import Keep, Keeper
from shoal.depth.plan import NEVER, DepthPlan
from shoal.errors import Unsupported
from shoal.methods.base import Method, check_layer
from shoal.methods.common.drafting import made_of
from shoal.methods.common.limits import Seed, Share
from shoal.speculative.per_sequence import PerSequence
from shoal.types import ModelInfo

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.decode.sequence import SequenceState
    from shoal.model.kv.cache import KVCache
    from shoal.model.kv.layer import KVLayer
    from shoal.model.runner import HiddenStateHook, ModelRunner, SequenceChunk
    from shoal_lab.components.picture_gate import PictureGate


@dataclass(frozen=True)
class DynamicPictures(Method):
    """Of each picture's tokens, only those that a small trained gate chooses go on from a layer on.

    The gate reads that layer's inputs, all of a picture's at once. The other tokens run no later layer, and nothing of
    them is stored there; those that stay keep their positions. Tokens that stand side by side are one picture. A
    picture that ends the prompt stays whole. The model itself is not trained; in the paper it is, a little, with the
    gate. Its text half is `dynamic_context`.

    Attributes:
        part: the folder of the trained component; None for the known component of the model.
        keep: share of each picture's tokens that stay, rounded down, but one token at least; 1 keeps all.
        random: seed by which as many tokens are drawn instead: the control. None for the gate's choice.
    """

    name: ClassVar[str] = "dynamic_pictures"
    paper: ClassVar[str] = "arXiv 2412.00876"
    needs: ClassVar[tuple[str, ...]] = ("a part trained for the model",)
    reads: ClassVar[tuple[str, ...]] = ("part",)

    part: str | None = None
    keep: Share = 0.2
    random: Seed | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.keep <= 1:
            raise ValueError(f"keep is {self.keep}; it must be in (0, 1], a share of a picture's tokens")

    def recipe(self, info: ModelInfo) -> Recipe:
        """Every layer, and of pictures a part of the tokens.

        Raises:
            ValueError: there is no component, or it cannot be read, or it is not one for this method and model.
            Unsupported: it was trained for another model, or layers see windows, or keep states or nothing.
        """
        plan = DepthPlan.full(info.num_layers)
        if self.keep == 1:
            return Recipe(plan)
        windows, attends = any(one is not None for one in info.windows), all(info.attends)
        if windows or not attends or any(one is not None for one in info.sources):
            raise Unsupported(f"{self.name} with this model", "some of its layers have a sliding window or a state, or "
                              "read what others keep", "Use it with a model whose layers all see the whole text")
        return Recipe(plan, keep=GatedPictures(self, self._gate(info)))

    def _gate(self, info: ModelInfo) -> PictureGate | None:
        """The gate, the same one for all requests; None without an engine."""
        if info.tensors is None:
            return None
        from shoal_lab.components.picture_gate import PictureGate

        part, gate = made_of(self.name, self.part, info, PictureGate)
        check_layer(f"the layer that the trained part {part.name!r} reads", gate.layer, info)
        return gate


@dataclass(frozen=True)
class GatedPictures(Keep):
    """Lets tokens of pictures go by a gate; see `DynamicPictures`."""

    differs: ClassVar[bool] = True

    method: DynamicPictures
    gate: PictureGate | None

    def begin(self, runner: Any, cache: Any) -> PictureKeeper:
        """A keeper."""
        assert self.gate is not None
        return PictureKeeper(self.method, self.gate, runner, cache)

    def most_slots(self, length: int) -> int:
        """All of them: the first layers store the pictures."""
        return length

    @override
    def check(self, seq: SequenceState) -> None:
        """Refuse pictures whose tokens depend on those that would go."""
        from shoal.model.layers.pictures import Pictures

        source = seq.source
        if not isinstance(source, Pictures):
            return
        found = {"tokens of a picture see those after them": source.mutual or source.prefix,
                 "its pictures add to layers behind the first": bool(source.deeper),
                 "its tokens are turned by rows and columns": source.turns is not None,
                 "it is a film or a sound": any(one.token is not None for one in source.pictures)}
        if why := [what for what, holds in found.items() if holds]:
            raise Unsupported(f"{self.method.name} for this prompt", why[0], "Use full, or a model such as LLaVA")


class PictureKeeper(Keeper):
    """Runs pictures through the layers below the gate's, and then those of their tokens that stay through the rest."""

    def __init__(self, method: DynamicPictures, gate: PictureGate, runner: ModelRunner, cache: KVCache) -> None:
        self._method, self._gate, self._runner, self._cache = method, gate, runner, cache
        upper = range(gate.layer, runner.num_layers)
        self._shallow = DepthPlan.skipping(runner.num_layers, upper, upper)
        self._spans = PerSequence(lambda seq: [*_spans(seq)])
        self._seen: PerSequence[dict[int, Tensor]] = PerSequence(lambda _: {})

    def next_length(self, seq: SequenceState, length: int) -> int:
        """Where a picture begins or ends, so that no piece of the prompt holds text beside it."""
        if length >= seq.prompt_length:
            return NEVER
        return next((edge for span in self._spans[seq.root or seq] for edge in span if edge > length), NEVER)

    @override
    def chunk(self, seq: SequenceState, chunk: SequenceChunk) -> SequenceChunk:
        """Tokens of a picture run the layers below the gate's."""
        if not self._in_picture(seq):
            return chunk
        return replace(chunk, plan=self._shallow, steps=[1] * len(chunk.tokens))  # step 0 would run all layers

    def watch(self, seqs: Sequence[SequenceState], chunks: Sequence[SequenceChunk]) -> HiddenStateHook | None:
        """Read tokens of pictures."""
        from shoal.model.runner import OfLayers

        reading = [(place, self._cache.positions[seq.seq_id], len(chunk.tokens), self._seen[seq.root or seq])
                   for place, (seq, chunk) in enumerate(zip(seqs, chunks, strict=True)) if self._in_picture(seq)]
        if not reading:
            return None

        def hook(layer: int, hidden: Tensor) -> None:
            if layer == self._gate.layer:
                for place, begin, size, seen in reading:
                    seen[begin] = hidden[place][:size].clone()  # the forward reuses its memory

        return OfLayers((self._gate.layer,), hook)

    def _in_picture(self, seq: SequenceState) -> bool:
        at = self._cache.positions[seq.seq_id]
        return not seq.emitted and any(begin <= at < end for begin, end in self._spans[seq.root or seq])

    def rewrite(self, seq: SequenceState, layers: Sequence[tuple[int, KVLayer]]) -> None:
        """Behind a picture, run those of its tokens that stay through the other layers."""
        from shoal.model.runner import SequenceChunk, Start
        from shoal_lab.components.picture_gate import joined

        cache, number, upper = self._cache, seq.seq_id, self._cache.layers[self._gate.layer :]
        begin = next((first for first, last in self._spans[seq.root or seq] if last == cache.positions[number]), None)
        if begin is None:
            return
        end, seen = cache.positions[number], self._seen[seq.root or seq]
        states = joined([seen.pop(at) for at in sorted(seen)])
        stays = self._stays(seq, begin, states)
        chunk = SequenceChunk(
            number, [seq.tokens[begin + place] for place in stays], [0] * len(stays),
            DepthPlan.full(self._runner.num_layers), range(-1, len(stays) - 1), stays, wanted=0)
        cache.positions[number] = begin
        try:
            self._runner.forward([chunk], cache, start=Start(self._gate.layer, states[stays][None]))
        finally:
            cache.positions[number] = end
        for layer in upper:
            layer.keep(number, len(stays))
            layer.skip(number, end - begin - len(stays))
        seq.ledger.prefill_layer_tokens -= (end - begin - len(stays)) * len(upper)

    def _stays(self, seq: SequenceState, begin: int, states: Tensor) -> list[int]:
        """Which of a picture's tokens stay, by its states [n, D]."""
        from shoal.model.layers.pictures import Pictures
        from shoal_lab.components.picture_gate import drawn

        method = self._method
        if method.random is None:
            return self._gate.best(states, method.keep)
        assert isinstance(seq.source, Pictures)
        return drawn(len(states), method.keep, f"{method.random}/{seq.source.keyed(seq.tokens)[begin]}")


def _spans(seq: SequenceState) -> Iterator[tuple[int, int]]:
    """First and last position of what stands side by side of pictures, the last not counted, before other tokens."""
    places = getattr(seq.source, "places", ())
    cuts = [at for at, (one, other) in enumerate(pairwise(places), start=1) if other > one + 1]
    for first, last in pairwise([0, *cuts, len(places)]):
        if first < last and places[last - 1] + 1 < seq.prompt_length:
            yield places[first], places[last - 1] + 1
