"""A small training: batches, optimizer, resuming, LayerSkip's options, and the exported model."""

from __future__ import annotations

import argparse
import json
import signal
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tools.reference import batches, build, curve, export, muon, templates, train
from tools.reference.model import Model, Shape
from transformers import AutoModelForCausalLM, AutoTokenizer

SHAPE = "3,32,48,2"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of 400 tokens and 300 examples."""
    folder = tmp_path_factory.mktemp("data")
    problems = [templates.trained_problem(seed) for seed in range(300)]
    texts = (f"{problem.question}\n{problem.solution}" for problem in problems)
    tokenizer = build.tokenizer_from(texts, 400)
    tokenizer.save(str(folder / "tokenizer.json"))
    build.save(
        folder / "corpus.pt",
        [(*build.encode(tokenizer, problem), number % 3) for number, problem in enumerate(problems)],
    )
    return folder


def arguments(data: Path, out: Path, tokens: int, *more: str) -> argparse.Namespace:
    out.mkdir(exist_ok=True)
    given = ["--data", str(data), "--out", str(out), "--tokens", str(tokens), "--shape", SHAPE, "--vocab", "400"]
    return train.options().parse_args([*given, "--batch", "512", "--threads", "1", *more])


def state(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / "state.pt", weights_only=False)["model"]


def test_a_resumed_run_ends_with_the_same_weights(data: Path, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    more = ("--layer-dropout", "0.3", "--early-exit", "0.5")
    train.Run(arguments(data, whole, 10_000, *more)).train()
    first = train.Run(arguments(data, parts, 10_000, *more))
    plain = first._step

    def stop_after(batch: batches.Batch) -> dict[str, float]:
        if first.step == 8:
            signal.raise_signal(signal.SIGTERM)
        return plain(batch)

    first._step = stop_after  # type: ignore[method-assign]
    first.train()
    assert first.stop
    assert first.step == 9
    train.Run(arguments(data, parts, 10_000, *more)).train()
    ours, theirs = state(whole), state(parts)
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name
    curves = [json.loads((folder / "curve.json").read_text()) for folder in (whole, parts)]
    assert [point["loss"] for point in curves[0]] == [point["loss"] for point in curves[1]]
    assert [point["step"] for point in curves[1]] == list(range(1, len(curves[1]) + 1))
    assert len(curves[1]) >= 20


def test_the_loss_falls_and_the_rate_ends_at_zero(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "WARMUP", 5)
    run = train.Run(arguments(data, tmp_path / "run", 16_000))
    run.train()
    losses = [point["loss"] for point in run.curve]
    assert sum(losses[-5:]) / 5 < sum(losses[:5]) / 5 - 0.7
    run.tokens = 16_000
    run._step(run.corpus.batch([0, 1]))
    assert run.optimizers[0].param_groups[0]["lr"] == 0


def test_a_run_can_start_from_the_weights_of_another(data: Path, tmp_path: Path) -> None:
    train.Run(arguments(data, tmp_path / "one", 2_000)).train()
    other = train.Run(arguments(data, tmp_path / "two", 2_000, "--init", str(tmp_path / "one" / "state.pt")))
    assert other.step == 0
    assert torch.equal(other.model.qkv, state(tmp_path / "one")["qkv"])


def test_a_run_can_start_from_an_exported_folder(data: Path, tmp_path: Path) -> None:
    first = train.Run(arguments(data, tmp_path / "one", 2_000))
    first.train()
    other = train.Run(arguments(data, tmp_path / "two", 2_000, "--init", str(tmp_path / "one" / "latest")))
    for (name, trained), start in zip(first.model.named_parameters(), other.model.parameters(), strict=True):
        assert torch.equal(trained.bfloat16().float(), start), name


def test_layer_dropout_spares_the_first_layer(data: Path, tmp_path: Path) -> None:
    run = train.Run(arguments(data, tmp_path / "run", 2_000, "--layer-dropout", "0.9"))
    drawn = torch.tensor([run._run(torch.Generator().manual_seed(seed)) for seed in range(200)]).float().mean(0)
    assert drawn[0] == 1
    assert drawn[0] > drawn[1] > drawn[2]
    assert abs(float(drawn[2]) - 0.1) < 0.08


def test_batches_hold_every_example_once_and_little_padding(data: Path) -> None:
    corpus = batches.Corpus(data / "corpus.pt")
    plan = corpus.plan(1_024, seed=1)
    seen: list[int] = []
    while len(seen) < len(corpus.lengths):
        seen += (group := next(plan))
        batch = corpus.batch(group)
        assert batch.weights.numel() <= 1_024
        assert batch.tokens == int(corpus.lengths[group].sum())
    assert sorted(seen) == list(range(len(corpus.lengths)))
    again = corpus.plan(1_024, seed=1)
    first = [index for _ in range(5) for index in next(again)]
    assert first == seen[: len(first)]
    other = corpus.plan(1_024, seed=2)
    assert first != [index for _ in range(5) for index in next(other)]


def test_the_loss_weighs_answers_whole_questions_little_and_padding_not(data: Path) -> None:
    corpus = batches.Corpus(data / "corpus.pt")
    tokenizer = Tokenizer.from_file(str(data / "tokenizer.json"))
    batch = corpus.batch([3, 4])
    for row, index in enumerate((3, 4)):
        problem = templates.trained_problem(index)
        answer = batch.ids[row, 1:][batch.weights[row] == 1].tolist()
        question = batch.ids[row, 1:][(batch.weights[row] > 0) & (batch.weights[row] < 1)].tolist()
        assert answer[-1] == tokenizer.token_to_id("</s>")
        assert tokenizer.decode(answer) == problem.solution
        assert tokenizer.decode(question) == problem.question + "\n"


def test_orthogonal_pushes_singular_values_towards_one() -> None:
    stack = torch.randn(5, 12, 30, generator=torch.Generator().manual_seed(0))
    for matrices in (stack, stack.mT):
        values = torch.linalg.svdvals(muon.orthogonal(matrices))
        assert values.min() > 0.5
        assert values.max() < 1.3


def test_muon_treats_each_block_of_rows_as_a_matrix() -> None:
    draw = torch.Generator().manual_seed(0)
    joint = torch.nn.Parameter(torch.zeros(2, 24, 8))
    joint.grad = torch.randn(2, 24, 8, generator=draw)
    apart = [torch.nn.Parameter(torch.zeros(2, 8, 8)) for _ in range(3)]
    for part, grad in zip(apart, joint.grad.chunk(3, 1), strict=True):
        part.grad = grad.clone()
    muon.Muon([{"params": [joint], "blocks": 3}], lr=0.1).step()
    muon.Muon([{"params": apart}], lr=0.1).step()
    torch.testing.assert_close(joint.detach(), torch.cat(apart, 1).detach())


def test_the_exported_model_computes_what_was_trained(data: Path, tmp_path: Path) -> None:
    model = Model(Shape(3, 32, 48, 2, 400), seed=3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.05)
            parameter.copy_(parameter.bfloat16().float())
    export.export(model, data / "tokenizer.json", tmp_path / "model")
    hugging_face = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    ids = torch.randint(400, (2, 40), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        ours = model.logits(model.hidden_states(ids, torch.float32)[-1])
        torch.testing.assert_close(ours, hugging_face(ids).logits, atol=2e-4, rtol=1e-4)


def test_the_exported_tokenizer_puts_the_start_first_and_splits_digits(data: Path, tmp_path: Path) -> None:
    export.export(Model(Shape(1, 32, 48, 2, 400)), data / "tokenizer.json", tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    ids = tokenizer("Tom has 127 + 5 apples.\n")["input_ids"]
    assert ids[0] == tokenizer.bos_token_id == 0
    assert tokenizer.decode(ids, skip_special_tokens=True) == "Tom has 127 + 5 apples.\n"
    assert [tokenizer.decode([token]) for token in ids if tokenizer.decode([token]).strip().isdigit()] == list("1275")
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "How many?"}], tokenize=False)
    assert chat == "<s>How many?\n"


def test_the_curves_of_several_runs_are_joined(tmp_path: Path) -> None:
    first = [{"tokens": 10, "novels": 4.0}, {"tokens": 20, "novels": 2.0, "drills": 1.0}]
    second = [{"tokens": 15, "novels": 3.0}]
    assert curve.lines([first, second])["novels"] == ([10, 20, 35], [4.0, 3.0, 3.0])
    assert curve.lines([first, second])["drills"] == ([20], [1.0])
    curve.draw([first, second], tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 1_000
