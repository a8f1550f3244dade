"""The memory that a model and a request will take at their peak, part by part, before they run.

Weights that are not loaded yet are counted by their files. The process is measured as it stands, with the weights of
every model in it. KV, masks and logits follow from shapes and are those that the engine makes. What is left,
activations and the like, is estimated.

The peak of the KV is exact for sequences that are decoded together to their full length of two tokens or more, token by
token or with chains of guesses: at full depth, by depth plans, in other forms (`store`), and where `keep` says how many
slots there are. It is an upper bound for sliding windows, trees, a `keep` that knows only its most slots, the bias
of merged slots, and forms that slots take late, which are counted in both forms.
"""

from __future__ import annotations

import gc
import mmap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from shoal.decode.running_sequence import RunningSequence
from shoal.decode.worker import Select
from shoal.engine.loaded import LoadedModel
from shoal.engine.memory.amounts import shown
from shoal.engine.memory.shorter import guesses
from shoal.heap import give_back, resident
from shoal.methods.base import Method
from shoal.model.config import widest_of
from shoal.model.gguf.splits import bytes_on_disk
from shoal.model.kv.cache import KVCache
from shoal.model.kv.form import GROWTH, slot_bytes
from shoal.model.kv.layer import WINDOW_SLACK, KVLayer
from shoal.model.kv.memory import SMALL, is_paged
from shoal.model.kv.room import STATES
from shoal.model.packed.linear import Quant
from shoal.model.packed.native.library import ROOM_BESIDE
from shoal.model.packed.native_calls import LIMIT
from shoal.model.packed.native_runner import NativeRunner
from shoal.model.packed.runner import PackedRunner
from shoal.model.runner import ModelRunner

OVERHEAD = 3 << 20
"""Bytes of a request's small objects and of gaps between them, measured by `lab/benchmarks/memory.py`."""

_RANKING = 3
"""Copies in float32 of the scores of a layer's slots while torch ranks them: an estimate."""

_REWRITING = 5
"""Copies in float32 of a layer's slots while some of them are chosen or merged: measured."""


@dataclass(frozen=True)
class Footprint:
    """Bytes at the peak of a request.

    Attributes:
        process: measured: all that is in memory now, less the weights.
        weights: of the model, as they are packed.
        kv: keys and values of the target, as the cache counts them.
        drafts: nodes of trees off their deepest path, and a second model's keys and values.
        masks: of the largest forward.
        logits: of the largest forward.
        work: estimated: activations, buffers, choice of tokens, partly used pages.
    """

    process: int
    weights: int
    kv: int
    drafts: int
    masks: int
    logits: int
    work: int

    @property
    def total(self) -> int:
        """The whole process."""
        return sum(asdict(self).values())

    def described(self) -> str:
        """The parts in one line."""
        return ", ".join(f"{name} {shown(size)}" for name, size in asdict(self).items() if size)


def standing() -> int:
    """Bytes of the process, once what earlier requests have left is freed; it would be counted twice."""
    gc.collect()
    give_back()
    return resident() or 0


def footprint(
    engine: LoadedModel, seqs: Sequence[RunningSequence], method: Method, max_new_tokens: int,
    process: int | None = None,
) -> Footprint:
    """The peak of sequences that are decoded together by `Engine.generate`.

    Args:
        engine: whose process it is, with all models loaded.
        process: bytes that the process takes as it stands, weights included; None measures them.
    """
    process = standing() if process is None else process
    runner, (most, extra) = engine.runner, guesses(method, seqs[0].recipe)
    cache = engine.cache_for(seqs, max_new_tokens)
    plain, whole = peak_of(runner, cache, seqs), peak_of(runner, cache, seqs, extra)
    nodes = [1 + max(0, min(most, seq.stop.room - 2 + extra)) for seq in seqs for _ in range(seq.branches)]
    weights, work = weight_bytes(engine), _work(engine, seqs, nodes) + whole.resident + whole.moving - whole.counted
    return Footprint(process=max(0, process - weights), weights=weights, kv=plain.counted,
                     drafts=whole.counted - plain.counted + second_bytes(seqs, extra),
                     masks=_masks(runner, seqs, nodes), logits=logits_bytes(runner, nodes), work=work)


def weight_bytes(engine: LoadedModel) -> int:
    """Bytes of a model's weights in memory, a tied matrix counted once, and of encoders with what they keep."""
    beside = sum(one.nbytes for one in (engine.encoder, engine.vision, engine.hearing) if one is not None)
    if isinstance(engine.runner, PackedRunner):
        return engine.runner.weights.nbytes + beside
    return 0 if engine.model is None else sum(one.nbytes for one in engine.model.parameters())


def second_bytes(seqs: Sequence[RunningSequence], extra: int) -> int:
    """Keys, values and states that a second model stores of the sequences, and states of prompts that it is to read."""
    pairs = [(seq, other) for seq in seqs if (other := seq.recipe.second_runner) is not None]
    stored = sum((seq.recipe.second_reads or seq.prompt_length + seq.stop.room - 1 + extra) * sum(other.position_bytes)
                 + STATES * sum(other.state_bytes.values()) for seq, other in pairs)
    return stored + sum(seq.prompt_length * seq.recipe.kept_bytes for seq in seqs)


def logits_bytes(runner: ModelRunner, nodes: Sequence[int]) -> int:
    """Bytes of the logits of a forward, by each sequence's nodes. Logits of several calls are joined in a copy."""
    size = 4 if isinstance(runner, NativeRunner) else runner.dtype.itemsize
    copies = 2 if isinstance(runner, NativeRunner) and sum(nodes) > LIMIT else 1
    return copies * sum(nodes) * runner.vocab_size * size


def work_bytes(engine: LoadedModel, tokens: int, slots: int, sampled: int = 0) -> int:
    """An estimate of the bytes that a forward's activations and buffers and the choice of tokens take.

    Args:
        tokens: of the forward.
        slots: most that one of them sees.
        sampled: nodes whose token is drawn. The probabilities of each are kept, and those of one are sorted.
    """
    runner, vocabulary = engine.runner, engine.runner.vocab_size
    total = OVERHEAD + (sampled and (sampled + 8) * vocabulary * 4)
    if isinstance(runner, PackedRunner):
        total += tokens * runner.input_bytes
    if isinstance(runner, NativeRunner):
        return total + runner.decoder.scratch_bytes(min(tokens, LIMIT), slots)
    heads = [sum(dims) * count for count, *dims in runner.kv_sizes]
    if isinstance(runner, PackedRunner):
        shape = runner.shape
        hidden, ffn, query = shape.hidden, max(shape.ffns), shape.heads * shape.head_dim
    else:
        config = engine.model.config.get_text_config()
        hidden, query = config.hidden_size, config.hidden_size
        ffn = widest_of(config) if getattr(config, "intermediate_size", None) else 4 * hidden
    line = 24 * hidden + (3 * ffn + 3 * query + max(heads)) * runner.dtype.itemsize
    return int(total + tokens * (line + slots * runner.dtype.itemsize))


def _work(engine: LoadedModel, seqs: Sequence[RunningSequence], nodes: Sequence[int]) -> int:
    """Bytes of work of the larger of two forwards: one that reads prompts, and one that decodes."""
    runner, slots = engine.runner, max(seq.prompt_length + seq.stop.room for seq in seqs)
    read = min(runner.prefill_chunk, sum(seq.prompt_length for seq in seqs))
    drawn = 0 if seqs[0].sampling.greedy else max(nodes)
    keep, rewriting = seqs[0].recipe.keep, 0
    if keep is not None and keep.differs and max(seq.prompt_length for seq in seqs) > keep.untouched:
        # it compares the slots of a prompt: scores and copies in float32, one layer at a time
        rewriting = _REWRITING * 4 * max(heads * sum(dims) for heads, *dims in runner.kv_sizes) * slots
    lengths = [seq.prompt_length + seq.stop.room for seq in seqs for _ in range(seq.branches)]
    choosing = choosing_bytes(engine, seqs[0].recipe.select, lengths, nodes)
    bounds = runner.bound_bytes if isinstance(runner, NativeRunner) and seqs[0].takes_argmax else 0
    experts = seqs[0].recipe.experts
    groups = 0 if experts is None else experts.bytes_to_come(runner)
    forward = max(work_bytes(engine, tokens, slots, drawn) for tokens in {read, sum(nodes)})
    return bounds + rewriting + choosing + groups + forward


def choosing_bytes(engine: LoadedModel, select: Select | None, lengths: Sequence[int], nodes: Sequence[int]) -> int:
    """Bytes taken while sequences of these lengths select what they read: scores, selected slots, labels of kernels."""
    runner = engine.runner
    if select is None or max(lengths) <= select.most_read:
        return 0
    heads = runner.shape.heads if isinstance(runner, PackedRunner) else (
        engine.model.config.get_text_config().num_attention_heads)
    kv_heads, dim, _ = max(runner.kv_sizes)
    labels = [select.label_bytes(runner, length) for length in lengths]
    if None in labels or not isinstance(runner, NativeRunner):  # torch ranks the slots of a sequence at a time
        return int(4 * max(lengths) * (_RANKING * heads * max(nodes) + kv_heads * dim))
    scores = sum(count * (length + ROOM_BESIDE) for count, length in zip(nodes, lengths, strict=True))
    chosen = (heads if select.by_query_head else kv_heads) * select.most_read * sum(nodes)
    return 4 * (heads * scores + chosen) + sum(filter(None, labels))


def _masks(runner: ModelRunner, seqs: Sequence[RunningSequence], nodes: Sequence[int]) -> int:
    """Bytes of the masks of the largest forward: in the kernels 8 for each token, else 1 for each slot."""
    reads = _reads([seq.prompt_length for seq in seqs], runner.prefill_chunk)
    if isinstance(runner, NativeRunner):
        sizes = [sum(size for _, _, size in read) for read in reads] + [sum(nodes)]
        return 8 * min(max(sizes), LIMIT)
    last = [(seq, seqs[seq].prompt_length + seqs[seq].stop.room - 1 - count, count) for seq, count in enumerate(nodes)]
    return max(_mask(runner, read) for read in [*reads, last])


def _mask(runner: ModelRunner, read: Sequence[tuple[int, int, int]]) -> int:
    """Of pieces (sequence, first position, size): a byte for each token and slot, or an element to be added."""
    adds = runner.adds_masks
    element = runner.dtype.itemsize if adds else 1
    if isinstance(runner, PackedRunner):  # sequence by sequence, in each layer anew
        return max(_seen(first, size, window, adds) for _, first, size in read for window in {*runner.windows})
    firsts, sizes = [first for _, first, _ in read], {size for _, _, size in read}
    if len(sizes) > 1 and runner.shows_queries:  # see `PrepackedCall`
        windows = {*runner.windows}
        return element * sum(_seen(first, size, window, adds) for _, first, size in read for window in windows)
    first, size, ragged = max(firsts), max(sizes), adds or len({*firsts}) + len(sizes) > 2
    return element * len(read) * sum(_seen(first, size, window, ragged) or (first + size) * (ragged and len(read) > 1)
                                     for window in {*runner.windows})


def _seen(first: int, size: int, window: int | None, explicit: bool) -> int:
    """Elements of one sequence's mask; none where attention needs none, see `shoal.model.masks`."""
    fits = window is None or first + size <= window
    free = fits and (size == 1 or (first == 0 and not explicit))
    return 0 if free else size * (first + size)


def _reads(lengths: Sequence[int], budget: int) -> list[list[tuple[int, int, int]]]:
    """Forwards that read prompts one after the other: of each piece the sequence, the first position and the size."""
    places = list(pairwise(accumulate(lengths, initial=0)))
    return [[(seq, max(begin - start, 0), min(begin + budget, end) - max(begin, start))
             for seq, (start, end) in enumerate(places) if start < begin + budget and begin < end]
            for begin in range(0, sum(lengths), budget)]


def weights_on_disk(place: str, dtype: torch.dtype, quant: Quant | None) -> int:
    """The least that a model's weights will take in memory, in bytes, by its files alone.

    It is 0 where it is unknown: the files are not on this machine, or a GGUF file is to be quantised anew.

    Args:
        dtype: in which the weights are to be held. A GGUF file keeps its own types.
        quant: what they are quantised to. Its scales are not counted.
    """
    path = Path(place)
    if path.is_file():
        return bytes_on_disk(path) if quant is None else 0
    bits = {"int8": 8, "int4": 4}.get(quant or "", 8 * dtype.itemsize)
    return sum(_bits(file, bits) for file in path.glob("*.safetensors")) // 8 if path.is_dir() else 0


def _bits(path: Path, bits: int) -> int:
    """Bits of the numbers in a safetensors file, by its header, with so many each; bytes and integers hold more."""
    try:
        with safe_open(path, "pt") as file:
            widths = {"U8": min(bits, 8), "I32": 32, "F16": min(bits, 16)}  # kernels keep two bytes of such numbers
            parts = [file.get_slice(name) for name in file.keys()]  # noqa: SIM118
            return sum(prod(one.get_shape()) * widths.get(one.get_dtype(), bits) for one in parts)
    except (OSError, SafetensorError):  # loading the file says what is wrong
        return 0


class KVPeak(NamedTuple):
    """Bytes.

    Attributes:
        counted: as `KVCache.bytes` counts what is allocated.
        resident: what takes memory of it: whole pages, and small tensors as a whole.
        moving: what exists twice while storage grows.
    """

    counted: int
    resident: int
    moving: int = 0


def peak_of(runner: ModelRunner, cache: KVCache, seqs: Sequence[RunningSequence], extra: int = 0) -> KVPeak:
    """The peak of sequences that have run nothing yet.

    Args:
        cache: as the engine makes it for them, still empty; nothing is written to it.
        seqs: the sequences, each with room for as many tokens as it may emit.
        extra: nodes of a tree beside those of its deepest path, of each sequence.
    """
    seqs = [seq for seq in seqs for _ in range(seq.branches)]
    last = max(seq.stop.room for seq in seqs) - 1
    drops = {drop - 1 for seq in seqs for drop in seq.plan.attention if drop - 1 < last}
    found = [_at(runner, cache, seqs, step, extra) for step in sorted({0, last, *drops})]
    return KVPeak(*map(max, zip(*found, strict=True)))


def _at(runner: ModelRunner, cache: KVCache, seqs: Sequence[RunningSequence], step: int, extra: int) -> KVPeak:
    """What is stored when every sequence has fed `step` tokens of its answer and released nothing since."""
    counted = resident = moving = 0
    for number, layer in enumerate(cache.layers):
        heads, *dims = runner.kv_sizes[number]
        ends = [_slots(seq, number, layer, runner.prefill_chunk, step, extra) for seq in seqs]
        first = max(layer.reserve, min(runner.prefill_chunk, *(_kept(seq, seq.prompt_length) for seq in seqs)))
        written, outside = [], 0
        for seq, end in zip(seqs, ends, strict=True):
            form = None if seq.recipe.store is None else seq.recipe.store.form(number)
            size = 0 if form is None else slot_bytes(form, runner.kv_sizes[number], runner.dtype)
            written.append(end if form is None or form.late else 0)
            if form is not None and form.late:  # slots leave the cache tensors later, so they are counted in both
                outside += size * _more(max(layer.reserve, end))
            elif end:
                outside += size * _grown(first, end)
            if seq.recipe.keep is not None and seq.recipe.keep.weighs:  # a bias on the scores of each slot
                outside += 4 * heads * _more(end)
        capacity, held, pages = _grown(first, max(written)), 0, 0
        if any(written) and is_paged(runner.device):
            held = sum(written) * runner.position_bytes[number]
            pages = sum(_pages(tuple(written), heads, capacity, dim * runner.dtype.itemsize) for dim in dims)
        elif any(written):
            held = pages = len(seqs) * capacity * runner.position_bytes[number]
        size, running = runner.state_bytes.get(number, 0), [seq for seq, end in zip(seqs, ends, strict=True) if end]
        states = size * sum(STATES + len(seq.marks) for seq in running)
        counted += held + outside + states - size * len(running)
        resident += pages + outside + states
        moving = max(moving, held if capacity > first and layer.window is None else 0)
    return KVPeak(counted, resident, moving)


def _slots(seq: RunningSequence, number: int, layer: KVLayer, chunk: int, step: int, extra: int) -> int:
    """Slots of a layer, scratch included; none where it was released."""
    drop, fed = seq.plan.attention[number], min(step, seq.stop.room - 1)
    if drop <= fed and not seq.drafts:
        return 0
    end = seq.prompt_length + min(fed, drop - 1) + (extra if fed else 0)
    if layer.window is not None:
        piece = min(chunk, seq.prompt_length)
        needed, room = layer.window + piece + min(layer.window, WINDOW_SLACK) // 2, max(piece, layer.reserve)
        return min(end, max(needed, _more(room)) if needed > room else room)
    return _kept(seq, end)


def _kept(seq: RunningSequence, positions: int) -> int:
    """Slots that are stored of the first `positions`."""
    return positions if seq.recipe.keep is None else seq.recipe.keep.most_slots(positions)


def _more(capacity: int) -> int:
    return int(capacity * GROWTH) + 16


def _grown(capacity: int, slots: int) -> int:
    """The capacity once `slots` are needed."""
    while capacity < slots:
        capacity = _more(capacity)
    return capacity


@lru_cache(maxsize=256)
def _pages(written: tuple[int, ...], heads: int, capacity: int, size: int) -> int:
    """Bytes of pages that are written to of [seqs, heads, capacity] slots; see `shoal.model.kv.memory.zeros`."""
    whole = len(written) * heads * capacity * size
    if whole < SMALL:
        return whole
    pages = done = 0
    for place, slots in enumerate(slots for slots in written for _ in range(heads)):
        first, end = place * capacity * size, (place * capacity + slots) * size
        begin, stop = max(done, first // mmap.PAGESIZE), -(-end // mmap.PAGESIZE)
        if slots and stop > begin:
            pages, done = pages + stop - begin, stop
    return pages * mmap.PAGESIZE
