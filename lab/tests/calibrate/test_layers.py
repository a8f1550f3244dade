"""Scores of layers against transformers' own forward without the layer's output."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

from families import VOCAB, tiny
from oracle import prefix_oracle
from shoal.engine.loading.load import engine_for
from shoal_lab.calibrate.layers import measure_layers


class NumberTokenizer:
    """A tokenizer of numbers."""

    def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
        return {"input_ids": [int(word) % VOCAB for word in text.split()]}


@pytest.mark.parametrize("backend", ["hf", "packed"])
def test_a_layer_is_worth_what_the_loss_rises_without_it(backend: str) -> None:
    model = tiny("llama", dtype=torch.float32)
    engine = engine_for(model, backend=backend)
    engine.tokenizer = NumberTokenizer()
    pairs = [("3 1 4", "15 9 26 5"), ("2 7", "1 8 28 18 4 5 9")]
    found = measure_layers(engine, pairs, progress=False)
    losses = torch.zeros(7)
    for texts in pairs:
        prompt, answer = (engine.tokenizer(text)["input_ids"] for text in texts)
        whole = len(prompt) + len(answer) - 1
        for dropped in range(7):
            counts = [len(prompt) if layer == dropped else whole for layer in range(6)]
            logits = prefix_oracle(model, torch.tensor([[*prompt, *answer[:-1]]]), counts)[len(prompt) - 1 :]
            losses[dropped] += cross_entropy(logits, torch.tensor(answer), reduction="sum")
    losses /= found.tokens
    assert found.tokens == 11 and found.loss == pytest.approx(float(losses[-1]), abs=1e-4)
    assert found.leave_one_out == pytest.approx((losses[:-1] - losses[-1]).tolist(), abs=1e-4)
