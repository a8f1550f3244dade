"""EAGLE's layer beside a decoder that hears: it guesses what its description says, and no word depends on it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaModel, WhisperForConditionalGeneration
from typing_extensions import override

import shoal
from eagle_part import LayerReference, write_eagle_for
from shoal.cli import main
from shoal.engine.engine import Engine
from shoal.errors import Unsupported
from shoal.methods.eagle import Eagle
from shoal.model.packed.native_runner import NativeRunner
from shoal.speculative.draft_head_file import CARD, TENSORS, TOKENS
from shoal.speculative.layer_head import FUSE, NORMS, LayerShape
from whispers import features, tone, wav, whisper, write

IDS = tuple(range(3, 240))
PROMPT, NEW = [257, 5, 9], 40
DTYPES = (torch.float32, torch.float64)
"""On the kernels, where the layer goes on in one call, and on torch."""


class BesideEncoder(LayerReference):
    """The layer of a part beside transformers' Whisper, which hears `heard`."""

    def __init__(self, folder: Path, model: WhisperForConditionalGeneration, heard: Tensor) -> None:
        tensors = load_file(folder / TENSORS)
        sizes = json.loads((folder / CARD).read_text("utf-8"))["shape"]
        shape = LayerShape(*(sizes[name] for name in ("hidden", "ffn", "heads", "head_dim")))
        layer = LlamaModel(shape.config(len(tensors[TOKENS]))).double().eval()
        layer.load_state_dict({name: tensors[name].double() for name in shape.sizes()}, strict=False)
        super().__init__(model, layer, tensors[FUSE], [tensors[name] for name in NORMS], shape.eps,
                         tensors[TOKENS].long())
        self._decoder = model.get_decoder()
        with torch.no_grad():
            self._source = model.get_encoder()(heard[None]).last_hidden_state

    @override
    def states_of(self, tokens: list[int]) -> Tensor:
        found = self._decoder(torch.tensor([tokens]), encoder_hidden_states=self._source).last_hidden_state[0]
        return found.double()

    @override
    def says(self, states: Tensor, tokens: Sequence[int]) -> Tensor:
        first = self._decoder.embed_positions.weight[0]  # no position is told: all have the first one's
        embedded = self._decoder.embed_tokens(torch.tensor(tokens[: len(states)])) + first
        both = [torch.nn.functional.rms_norm(x.double(), x.shape[-1:], norm, self._eps)
                for x, norm in zip((states, embedded), self._norms, strict=True)]
        joined = torch.nn.functional.linear(torch.cat(both, -1), self._join)
        return self._layer(inputs_embeds=joined[None]).last_hidden_state[0]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[WhisperForConditionalGeneration, Path, Path]:
    folder, model = tmp_path_factory.mktemp("whisper"), whisper(2, max_source_positions=20)
    place = write(folder / "model", model)
    (folder / "part").mkdir()
    return model, place, write_eagle_for(shoal.load(place), folder / "part", IDS)


def answer(engine: Engine, method: Any, **options: Any) -> Any:
    source = engine.encoder(features(3, frames=40))
    return engine.generate(PROMPT, source=source, method=method, max_new_tokens=NEW, ignore_eos=True, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [{}, dict.fromkeys((5, 8, 11), 40.0)], ids=["any", "three"])
def test_words_are_those_of_plain_decoding(made: Any, dtype: torch.dtype, bias: Mapping[int, float]) -> None:
    _, place, part = made
    engine = shoal.load(place, dtype=dtype)
    assert isinstance(engine.runner, NativeRunner) == (dtype == torch.float32)
    plain = answer(engine, "full", logit_bias=dict(bias))
    for width in (1, 2):
        found = answer(engine, Eagle(part=str(part), stop=0.0, width=width), logit_bias=dict(bias))
        assert found.tokens == plain.tokens and found.stats.drafted > NEW / 2
        if bias:
            assert 0 < found.stats.accepted < found.stats.drafted
            assert found.stats.target_forwards < plain.stats.target_forwards


@pytest.mark.parametrize("dtype", DTYPES)
def test_guesses_are_what_the_layer_says_by_other_means(made: Any, dtype: torch.dtype, monkeypatch: Any) -> None:
    model, place, part = made
    engine = shoal.load(place, dtype=dtype)
    reference = BesideEncoder(part, model, features(3, frames=40))
    seen, method = list[tuple[list[int], Any]](), Eagle(part=str(part), stop=0.0, length=3)
    recipe = method.recipe(engine.info(NEW))
    begin = type(recipe.proposer).begin

    def watched(self: Any, runner: Any, cache: Any) -> Any:
        drafter = begin(self, runner, cache)
        propose = drafter.propose

        def noted(seqs: Any, limits: Any) -> Any:
            trees = propose(seqs, limits)
            seen.extend(([*seq.tokens], tree) for seq, tree in zip(seqs, trees, strict=True))
            return trees

        drafter.propose = noted
        return drafter

    monkeypatch.setattr(type(recipe.proposer), "begin", watched)
    answer(engine, method)
    trees = [(tokens, tree) for tokens, tree in seen if len(tree) > 1]
    assert len(trees) > NEW / 4
    assert all(reference.agrees(tokens, tree, {}, 1) for tokens, tree in trees[:12])


def test_a_lossy_rule_changes_words(made: Any) -> None:
    """So equal words above say something."""
    _, place, part = made
    engine = shoal.load(place)
    loose = answer(engine, Eagle(part=str(part), stop=0.0, rule="lenient", margin=50.0))
    assert loose.tokens != answer(engine, "full").tokens


def test_the_part_of_another_model_is_refused_in_a_line(made: Any, tmp_path: Path, capsys: Any) -> None:
    part, other = made[2], write(tmp_path / "other", whisper(5, max_source_positions=20))
    with pytest.raises(Unsupported, match="it was trained for a model with the fingerprint"):
        answer(shoal.load(other), Eagle(part=str(part)))


def test_a_transcript_with_it_is_the_plain_one(tmp_path: Path, capsys: Any) -> None:
    place, other = (write(tmp_path / str(seed), whisper(seed)) for seed in (2, 5))
    (tmp_path / "part").mkdir()
    part = write_eagle_for(shoal.load(place), tmp_path / "part", IDS)
    (tmp_path / "tone.wav").write_bytes(wav(tone(2.0)))

    def told(model: Path, *more: str) -> Any:
        assert main(["transcribe", str(tmp_path / "tone.wav"), "--model", str(model), "--json", *more]) == 0
        return json.loads(capsys.readouterr().out)["files"][0]["segments"]

    drafting = "--method", "eagle", "--part", str(part), "--stop", "0"
    assert told(place, *drafting) == told(place) != []
    assert main(["transcribe", str(tmp_path / "tone.wav"), "--model", str(other), *drafting]) == 2
    refusal = capsys.readouterr().err.strip()
    assert "it was trained for a model with the fingerprint" in refusal and "\n" not in refusal
