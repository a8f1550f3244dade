"""Trains a small masked-diffusion model from scratch on generated tasks: lists, squares, sums, sentences.

The model has Llama's blocks with bidirectional attention. An answer is padded with ends of sequence to a random length,
a uniformly random number of its tokens is masked, and the loss is their mean cross-entropy: times the length, a bound
of the answer's negative log-likelihood (LLaDA, arXiv 2502.09992, equation 6). Every batch follows from the seed and its
number.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from shoal_lab.eval.sources import parallel
from shoal_lab.train.optimizer import CheckpointedOptimizer

CHECKPOINT = "training.pt"
EOS, MASK, UNKNOWN = "<eos>", "<mask>", "<unk>"
_WEIGHTS = {"replace_random": 5, "shuffle": 3, "latin": 3, "sentence": 2, "sum": 2}
"""How often a task is drawn, 1 by default: dependences are learnt last."""
_WARM = 0.03
_LONGEST = 16
_TIGHT = 0.5
"""Share of answers that end with the canvas; the others are padded to a random length, at most `_LONGEST`."""


@dataclass(frozen=True)
class DiffusionTraining:
    """Settings of the training.

    Attributes:
        steps: optimiser steps.
        batch: texts of a step.
        rate: highest learning rate of AdamW; Muon, if torch has it, trains matrices at three times this rate.
        seed: of first weights, texts and masks.
        hidden, layers, heads, inner: sizes of the model.
        causal: whether to train the autoregressive reference instead: the same first weights and texts, causal
            attention, and the loss of every token of an answer and of its end.
    """

    steps: int = 3500
    batch: int = 64
    rate: float = 2e-3
    seed: int = 0
    hidden: int = 128
    layers: int = 3
    heads: int = 4
    inner: int = 320
    causal: bool = False

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "hidden", "layers", "heads", "inner"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.hidden % (2 * self.heads):
            raise ValueError(f"hidden is {self.hidden}; it must be a multiple of twice the {self.heads} heads")


def tokenizer_of(vocabulary: list[str]) -> Any:
    """A tokenizer with one token per word; words are separated by single spaces."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ids = {word: number for number, word in enumerate([UNKNOWN, EOS, MASK, *vocabulary])}
    core = Tokenizer(models.WordLevel(ids, unk_token=UNKNOWN))
    core.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token=UNKNOWN, eos_token=EOS, mask_token=MASK,
                                   pad_token=EOS, clean_up_tokenization_spaces=False)


def fresh_model(tokenizer: Any, how: DiffusionTraining) -> Any:
    """A model with its first weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=how.hidden, intermediate_size=how.inner, num_hidden_layers=how.layers,
        num_attention_heads=how.heads, num_key_value_heads=how.heads, max_position_embeddings=128,
        tie_word_embeddings=False, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id, mask_token_id=None if how.causal else tokenizer.mask_token_id,
        attn_implementation="sdpa",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(how.seed)
        return LlamaForCausalLM(config).float()


@dataclass(frozen=True)
class MaskedBatch:
    """Texts of a step.

    Attributes:
        tokens: int64 [B, T] with masks in place of what is to be predicted; short texts are padded at the end.
        wanted: int64 [B, T], the token behind each mask, -100 elsewhere; without masks if `causal`, the next token.
        inside: bool [B, T], whether a place belongs to a text.
        causal: whether attention is causal.
    """

    tokens: Tensor
    wanted: Tensor
    inside: Tensor
    causal: bool = False


def batch_of(number: int, tokenizer: Any, how: DiffusionTraining, part: Any = "calibration") -> MaskedBatch:
    """The batch of a step."""
    random = Random(f"{how.seed}/{number}/{part}")
    names = [name for name in parallel.TASKS for _ in range(_WEIGHTS.get(name, 1))]
    texts = [_text(random, random.choice(names), tokenizer, part) for _ in range(how.batch)]
    width = max(len(prompt) + len(answer) for prompt, answer in texts)
    tokens = torch.full((how.batch, width), tokenizer.eos_token_id)
    wanted, inside = torch.full_like(tokens, -100), torch.zeros(how.batch, width, dtype=torch.bool)
    start = random.random()
    for row, (prompt, answer) in enumerate(texts):
        first, last = len(prompt), len(prompt) + len(answer)
        tokens[row, :last], inside[row, :last] = torch.tensor(prompt + answer), True
        if how.causal:
            end = first + answer.index(tokenizer.eos_token_id)
            wanted[row, first - 1 : end] = tokens[row, first : end + 1]
            continue
        count = 1 + int(len(answer) * (row + start) / how.batch)  # stratified: all shares of a text are equal
        masked = random.sample(range(first, last), count)
        wanted[row, masked] = tokens[row, masked]
        tokens[row, masked] = tokenizer.mask_token_id
    return MaskedBatch(tokens, wanted, inside, how.causal)


def _text(random: Random, task: str, tokenizer: Any, part: Any) -> tuple[list[int], list[int]]:
    """Token ids of a prompt, and of a padded answer."""
    prompt, answers = parallel.drawn(task, random, part)
    ids = [tokenizer.convert_tokens_to_ids(text.split(" ")) for text in (prompt, random.choice(answers))]
    longest = max(len(ids[1]) + 1, _LONGEST)
    length = len(ids[1]) + 1 if random.random() < _TIGHT else random.randint(len(ids[1]) + 1, longest)
    return ids[0], ids[1] + [tokenizer.eos_token_id] * (length - len(ids[1]))


def loss_of(model: Any, batch: MaskedBatch) -> Tensor:
    """Nats per token: the bound of a text's negative log-likelihood over its answer's length, on average.

    If causal, it is not a bound but the negative log-likelihood itself.
    """
    seen = batch.inside[:, None, None].expand(-1, 1, batch.tokens.shape[1], -1)
    seen = seen.tril() if batch.causal else seen
    hidden = model.model(input_ids=batch.tokens, attention_mask=seen, use_cache=False).last_hidden_state
    masked = batch.wanted >= 0
    losses = nn.functional.cross_entropy(model.lm_head(hidden[masked]), batch.wanted[masked], reduction="none")
    return (losses / masked.sum(1)[masked.nonzero()[:, 0]]).sum() / len(batch.tokens)


def train(
    how: DiffusionTraining, folder: Path, tell: Callable[[str], None], late: Callable[[], bool]
) -> dict[str, Any]:
    """Train, or resume a run in that folder, and write the model there when it is done.

    Returns:
        The card as written: settings, steps, losses by step, seconds.

    Raises:
        ValueError: the checkpoint is of another run, or training has diverged.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizer_of(parallel.vocabulary())
    model = fresh_model(tokenizer, how)
    optimizer = _optimizer(model, how, folder / CHECKPOINT)
    card: dict[str, Any] = optimizer.resume() or {"step": 0, "seconds": 0.0, "losses": {}}
    began, kept, losses = time.monotonic() - card["seconds"], time.monotonic(), list[float]()
    while card["step"] < how.steps and not late():
        loss = loss_of(model, batch_of(card["step"], tokenizer, how))
        losses.append(optimizer.step(loss, card["step"], _share(card["step"], how.steps)))
        card["step"] += 1
        card["seconds"] = round(time.monotonic() - began, 1)
        if card["step"] % 100 == 0 or card["step"] == how.steps:
            card["losses"][str(card["step"])] = round(sum(losses) / len(losses), 4)
            tell(f"step {card['step']} of {how.steps}, {card['seconds']:.0f} s, loss {sum(losses) / len(losses):.4f}")
            losses = []
        if time.monotonic() - kept > 60:
            optimizer.save(card)
            kept = time.monotonic()
    optimizer.save(card)
    card = {**asdict(how), **card}
    _export(folder, model, tokenizer, card)
    return card


def _share(step: int, steps: int) -> float:
    """The learning rate of a step, as a share of the highest."""
    return min((step + 1) / (_WARM * steps), (1 + math.cos(math.pi * step / steps)) / 2)


def _optimizer(model: Any, how: DiffusionTraining, path: Path) -> CheckpointedOptimizer:
    """Muon for the layers' matrices if torch has it, and AdamW for the rest."""
    muon = hasattr(torch.optim, "Muon")
    matrices = [weight for weight in model.model.layers.parameters() if muon and weight.dim() == 2]
    return CheckpointedOptimizer(model, matrices, (3 * how.rate, how.rate), (0.9, 0.98), 0.01, 1.0, path, asdict(how))


def _export(folder: Path, model: Any, tokenizer: Any, card: dict[str, Any]) -> None:
    """Write the model in bfloat16, its tokenizer and its card."""
    import copy

    small = copy.deepcopy(model).to(torch.bfloat16)
    small.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "training.json").write_text(json.dumps(card, indent=1) + "\n", encoding="utf-8")
