"""An encoder with a shallow decoder beside a decoder alone of as many numbers: time, memory, and what both learn.

Return of the Encoder: two thirds of the layers encode, a third decodes. Speed is measured with random weights on
Shoal's kernels. A small pair learns to tell who did what in a story whose sentences come in any order. What differs
from the paper: T5's form and Llama's, so that positions are biases by distance on one side and rotations on the other;
millions of numbers instead of 330 million in what is trained, and no distillation.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from shoal_lab.bench import idle, rounds
from shoal_lab.other_fields import Options
from shoal_lab.other_fields._trained import Fit, trained

PAPER = "arXiv 2501.16273"
LINE = "an encoder with a shallow decoder beside a decoder of equal size: first token, tokens per second, memory, score"

PAIR, ALONE = "encoder-decoder", "decoder"
SHAPES = ((64, 512), (256, 256), (1024, 128), (4096, 32))
"""Tokens of prompts and of answers."""
START, END = 0, 1
_JUDGED, _BATCH, _DEEDS = 1000, 32, 4
"""Stories that are judged, and of a step; and deeds of a story."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of both models.

    Attributes:
        width: Of the states, in heads of `head`.
        inner: Of the feed-forwards.
        layers: Of the pair, a multiple of 3; two thirds encode.
        vocabulary: Tokens.
        head: Numbers of a head of attention.
    """

    width: int
    inner: int
    layers: int
    vocabulary: int = 32_128
    head: int = 64

    def __post_init__(self) -> None:
        if self.layers < 3 or self.layers % 3:
            raise ValueError(f"layers={self.layers}: two thirds encode and a third decodes; give 3, 6 or 9, say")
        if self.width < self.head or self.width % self.head or self.vocabulary < 3:
            raise ValueError(f"width={self.width}, head={self.head}, vocabulary={self.vocabulary}: give heads that "
                             "fill the width, and at least 3 tokens")

    @property
    def alone(self) -> int:
        """Layers of a decoder that has as many numbers, as nearly as whole layers allow."""
        attention, feeding = 4 * self.width**2, 3 * self.width * self.inner
        return self.layers + round(self.layers // 3 * attention / (attention + feeding))

    def configs(self) -> dict[str, Any]:
        """Of both models, by name."""
        import transformers as hf

        ends = {"bos_token_id": START, "eos_token_id": END, "pad_token_id": START}
        return {
            PAIR: hf.T5Config(
                d_model=self.width, d_ff=self.inner, d_kv=self.head, num_heads=self.width // self.head,
                num_layers=2 * self.layers // 3, num_decoder_layers=self.layers // 3, vocab_size=self.vocabulary,
                feed_forward_proj="gated-gelu", dropout_rate=0.0,
                decoder_start_token_id=START, **ends),
            ALONE: hf.LlamaConfig(
                hidden_size=self.width, intermediate_size=self.inner, num_attention_heads=self.width // self.head,
                num_key_value_heads=self.width // self.head, num_hidden_layers=self.alone, vocab_size=self.vocabulary,
                max_position_embeddings=8192, tie_word_embeddings=True, **ends),
        }

    def models(self, seed: int) -> dict[str, Any]:
        """Both with random weights."""
        import transformers as hf

        made = {}
        for name, config in self.configs().items():
            torch.manual_seed(seed)
            made[name] = (hf.T5ForConditionalGeneration if name == PAIR else hf.LlamaForCausalLM)(config)
        return made


SIZES = {"quick": Sizes(512, 1408, 18), "full": Sizes(1024, 2816, 24)}
"""Of what is measured; of what is trained `lessons` says."""


def run(options: Options) -> dict[str, Any]:
    """Train small pairs over some seeds, and measure random ones at all shapes."""
    sizes = SIZES["full" if options.full else "quick"]
    with torch.random.fork_rng(devices=[]):
        seeds, steps = (6, 4000) if options.full else (2, 600)
        learnt = lessons(options, range(options.seed, options.seed + seeds), steps=steps)
        with tempfile.TemporaryDirectory() as spare:
            speed = measured(sizes, SHAPES, 6, (options.work or Path(spare)) / f"encoder-decoder-{sizes.width}")
    found = {"speed": speed, "learnt": learnt}
    if options.pictures:
        plot(found, options.pictures / "encoder_decoder.png")
    return found


def headline(found: Mapping[str, Any]) -> str:
    """What is faster, how much, and what both learn."""
    rows = found["speed"]["shapes"]
    told = "; ".join(
        f"{row['prompt']}/{row['answer']}: first token {row['times_sooner']['median']:.2f} times as soon, tokens "
        f"{row['times_faster']['median']:.2f} times as fast, {row[PAIR]['bytes'] / row[ALONE]['bytes']:.2f} times the "
        "memory"
        for row in (rows[0], rows[-1]))
    right = {name: found["learnt"][name]["right"]["mean"] for name in (PAIR, ALONE)}
    return (f"an encoder-decoder beside a decoder of equal size, prompt/answer {told}; summaries right "
            f"{100 * right[PAIR]:.0f} % and {100 * right[ALONE]:.0f} % after equal training")


def measured(sizes: Sizes, shapes: Sequence[tuple[int, int]], times: int, folder: Path) -> dict[str, Any]:
    """Both models in int8 on Shoal's kernels, in turns; each round has prompts of its own."""
    import shoal

    engines: dict[str, Any] = {}
    for name, model in sizes.models(0).items():
        model.to(torch.bfloat16).save_pretrained(folder / name)
        engines[name] = shoal.load(str(folder / name), dtype="bfloat16", quant="int8")
    weights = {name: engine.runner.weights.nbytes + (engine.encoder.nbytes if engine.encoder else 0)
               for name, engine in engines.items()}
    busy, rows = idle.watch(1.0), []
    for prompt, answer in shapes:
        row: dict[str, Any] = {"prompt": prompt, "answer": answer}
        for name, engine in engines.items():
            held = kept(engine, _drawn(sizes, prompt, -1), answer)
            row[name] = {"kv_bytes": held, "bytes": weights[name] + held,
                         "first_seconds": [], "tokens_per_second": [], "seconds": []}
        for number in range(times):
            for name in rounds.in_order(list(engines), number):
                for key, value in timed(engines[name], _drawn(sizes, prompt, number), answer).items():
                    row[name][key].append(value)
        for told, key, up in (("times_sooner", "first_seconds", ALONE), ("times_faster", "tokens_per_second", PAIR),
                              ("times_as_soon_done", "seconds", ALONE)):
            down = PAIR if up == ALONE else ALONE
            row[told] = rounds.ratio(a / b for a, b in zip(row[up][key], row[down][key], strict=True))
        rows.append(row)
    return {"sizes": vars(sizes), "decoder_layers_alone": sizes.alone, "rounds": times, "busy_before": busy,
            "threads": torch.get_num_threads(), "weight_bytes": weights, "shapes": rows}


def kept(engine: Any, ids: list[int], answer: int) -> int:
    """Bytes of keys and values at the end of an answer, what layers read of the encoder's states included."""
    stats = engine.generate(ids, max_new_tokens=answer, method="full", temperature=0.0, ignore_eos=True).stats
    of_source = engine.encoder.read(ids).nbytes if engine.encoder else 0
    return int(stats.kv_bytes_used) + of_source


def timed(engine: Any, ids: list[int], answer: int) -> dict[str, float]:
    """Seconds to the first token and to the last, and tokens per second after the first."""
    times, began = list[float](), time.perf_counter()
    for _ in engine.stream(ids, max_new_tokens=answer, method="full", temperature=0.0, ignore_eos=True):
        times.append(time.perf_counter() - began)
    return {"first_seconds": times[0], "tokens_per_second": (len(times) - 1) / (times[-1] - times[0]),
            "seconds": times[-1]}


def _drawn(sizes: Sizes, prompt: int, seed: int) -> list[int]:
    """A prompt; equal ones would be encoded once."""
    generator = torch.Generator().manual_seed(seed + 1)
    found: list[int] = torch.randint(2, sizes.vocabulary, (prompt,), generator=generator).tolist()
    return found


NAMES = ("anna", "bert", "carla", "dirk", "edna", "finn", "greta", "hugo")
THINGS = ("lamp", "coin", "rope", "drum", "bell", "comb", "ring", "flute")
PLACES = ("mill", "barn", "well", "tower", "cellar", "forest", "harbour", "chapel")
WORDS = ("<start>", "<end>", *NAMES, *THINGS, *PLACES,
         "by", "day", "night", "hid", "in", "took", "to", ".")
_NUMBER = {word: number for number, word in enumerate(WORDS)}


@dataclass(frozen=True)
class Tale:
    """What was done by day and, once, by night; and its summary: who did what at night, and where."""

    text: str
    summary: str

    @classmethod
    def of(cls, draw: random.Random, deeds: int = _DEEDS) -> Tale:
        """A sentence for each deed, in any order; it begins or ends with the time."""
        if not 1 <= deeds <= len(NAMES):
            raise ValueError(f"deeds={deeds}: give 1 to {len(NAMES)}, as nobody does two")
        told, night = [], draw.randrange(deeds)
        done = list(zip(*(draw.sample(words, deeds) for words in (NAMES, THINGS, PLACES)), strict=True))
        for number, (name, thing, place) in enumerate(done):
            deed, when = f"{name} hid {thing} in {place}", "by night" if number == night else "by day"
            told.append(f"{when} {deed} ." if draw.random() < 0.5 else f"{deed} {when} .")
        name, thing, place = done[night]
        return cls(" ".join(told), f"{name} took {thing} to {place}")


def batch(stories: Sequence[Tale]) -> tuple[Tensor, Tensor]:
    """Words of stories of equal lengths (stories, words), and of their summaries with their ends."""
    told = [[[_NUMBER[word] for word in text.split()] for text in (one.text, one.summary)] for one in stories]
    return torch.tensor([text for text, _ in told]), torch.tensor([[*summary, END] for _, summary in told])


def logits(model: Any, texts: Tensor, summaries: Tensor) -> Tensor:
    """Of each word of the summaries (stories, words, vocabulary), given those before it."""
    first = torch.full((len(texts), 1), START)
    if model.config.is_encoder_decoder:
        found: Tensor = model(input_ids=texts, decoder_input_ids=torch.cat([first, summaries[:, :-1]], 1)).logits
        return found
    states = model.model(torch.cat([texts, first, summaries[:, :-1]], 1), use_cache=False).last_hidden_state
    scores: Tensor = model.lm_head(states[:, texts.shape[1]:])
    return scores


def learn(options: Options, name: str, model: nn.Module, seed: int, steps: int, deeds: int = _DEEDS) -> float:
    """Train on new stories of every step, which are the same for all models of a seed; returns seconds."""
    draw = random.Random()

    def loss(step: int) -> Tensor:
        draw.seed(seed * 1_000_003 + step)
        texts, summaries = batch([Tale.of(draw, deeds) for _ in range(_BATCH)])
        return cross_entropy(logits(model, texts, summaries).flatten(0, 1), summaries.flatten())

    return trained(options, f"encoder-decoder-{name}-{seed}", model, Fit(steps, 3e-3), loss)


@torch.no_grad()
def right(model: Any, stories: Sequence[Tale]) -> dict[str, float]:
    """Share of summaries that come out right greedily, and of the words that differ from story to story."""
    texts, summaries = batch(stories)
    hits = torch.cat([logits(model, a, b).argmax(-1) == b
                      for a, b in zip(texts.split(250), summaries.split(250), strict=True)])
    facts = hits[:, [0, 2, 4]].float().mean()
    return {"right": float(hits.all(1).float().mean()), "facts": float(facts)}


def lessons(options: Options, seeds: range, sizes: Sizes | None = None, steps: int = 600) -> dict[str, Any]:
    """Scores of pairs trained alike, over seeds."""
    sizes = sizes or Sizes(64, 128, 6, len(WORDS), 16)
    found: dict[str, Any] = {name: {"seeds": []} for name in (PAIR, ALONE)}
    draw = random.Random(-1)
    held_out = [Tale.of(draw) for _ in range(_JUDGED)]
    for seed in seeds:
        for name, model in sizes.models(seed).items():
            seconds = learn(options, name, model, seed, steps)
            found[name]["seeds"].append({"seed": seed, "seconds": seconds, **right(model, held_out)})
            found[name]["numbers"] = sum(one.numel() for one in model.parameters())
    for one in found.values():
        one.update({key: _spread([run[key] for run in one["seeds"]]) for key in ("right", "facts")})
    return {"sizes": vars(sizes), "steps": steps, "stories": _JUDGED, "example": vars(held_out[0]), **found}


def _spread(values: Sequence[float]) -> dict[str, Any]:
    from scipy.stats import t

    count = len(values)
    half = float(t.ppf(0.975, count - 1)) * stdev(values) / count**0.5 if count > 1 else 0.0
    return {"mean": mean(values), "interval": [mean(values) - half, mean(values) + half]}


def plot(found: Mapping[str, Any], path: Path) -> None:
    """Medians by shape, and scores by seed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3), dpi=100, layout="constrained")
    rows = found["speed"]["shapes"]
    for axes, (key, told) in zip(figure.subplots(1, 4), (
            ("first_seconds", "seconds to the first token"), ("tokens_per_second", "tokens per second"),
            ("bytes", "weights and keys, MB"), ("right", "summaries right, %")), strict=True):
        for shift, name in ((-0.2, PAIR), (0.2, ALONE)):
            if key == "right":
                values = [100 * one["right"] for one in found["learnt"][name]["seeds"]]
            else:
                values = [row[name][key] / 1e6 if key == "bytes" else rounds.figure(row[name][key])["median"]
                          for row in rows]
            axes.bar([at + shift for at in range(len(values))], values, 0.4, label=name)
        names = [f"{row['prompt']}/{row['answer']}" for row in rows]
        axes.set_xticks(range(len(values)), map(str, range(len(values))) if key == "right" else names, fontsize=6)
        axes.set_title(told, fontsize=8)
        if key == "first_seconds":
            axes.set_yscale("log")
            axes.legend(fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
