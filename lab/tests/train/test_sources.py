"""Training beside an encoder: corpora of sounds and of texts, what is read under a plan, and what is written."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from drive import Seen, gap
from encoder_decoders import model_of
from encoder_decoders import write as write_reader
from families import tiny
from shoal.audio import RATE
from shoal.cli import main
from shoal.depth.plan import NEVER, DepthPlan
from shoal.engine.engine import Engine
from shoal.engine.loading.load import engine_for
from shoal.errors import Unsupported
from shoal.methods.schedule import Schedule
from shoal_lab.train import buckets, corpus, export
from shoal_lab.train.corpus import AnsweredText, CorpusWish
from shoal_lab.train.heal import HealModule, body
from shoal_lab.train.part import Base, TextBatch
from shoal_lab.train.sources import Sources, plain, spoken
from whispers import tone, wav, whisper, write

METHOD = Schedule(order=(1, 0), steps=(2, 5))
PLAN = DepthPlan.whole_layers([5, 2, NEVER])
TEXTS = [[*range(9, 9 + length), 257] for length in (4, 60, 7, 33, 5, 50)]
pytest.importorskip("peft", reason="shoal train heal needs the package peft")


@pytest.fixture(scope="module")
def sounds(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("sounds")
    for number, seconds in enumerate((3.0, 1.5)):
        (folder / f"{number}.wav").write_bytes(wav(tone(seconds, 300 + 200 * number)))
    return sorted(folder.iterdir())


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder, reader = tmp_path_factory.mktemp("models"), model_of("bart")
    reader.final_logits_bias.zero_()
    return {"whisper": write(folder / "whisper", whisper(2)), "bart": write_reader(folder / "bart", reader)}


def asked_of(kind: str, folders: dict[str, Path], sounds: Sequence[Path]) -> tuple[Engine, Sources, list[list[int]]]:
    engine = shoal.load(str(folders[kind]))
    sources = Sources(engine, sounds if kind == "whisper" else ())
    return engine, sources, sources.windows(4, 0) if kind == "whisper" else TEXTS


def answered(folder: Path, engine: Engine, sources: Sources, asked: list[list[int]]) -> list[AnsweredText]:
    made = corpus.make(folder, engine, lambda: asked, CorpusWish(max_new_tokens=12), sources=sources)
    return [one for held in (True, False) for one in made.answers(0, validation=held)]


def shaken(engine: Engine) -> HealModule:
    one, dice = HealModule(Base(engine.runner), plain(engine, torch.float32), {"some": PLAN}, 4), torch.Generator()
    with torch.no_grad():
        for weight in one.adapters:
            weight += 0.1 * torch.randn(weight.shape, generator=dice.manual_seed(2))
    return one


@pytest.mark.parametrize("kind", ["whisper", "bart"])
def test_answers_come_with_the_states_of_their_sources(
    kind: str, folders: dict[str, Path], sounds: list[Path], tmp_path: Path
) -> None:
    """Against transformers' modules, which read source and answer again."""
    engine, sources, asked = asked_of(kind, folders, sounds)
    found, model = answered(tmp_path, engine, sources, asked), plain(engine, torch.float32)
    assert len(found) == len(asked)
    asked = sources.ordered(asked, corpus.SHARD)
    for one in found:
        assert one.source is not None
        with torch.no_grad():
            again = body(model)(input_ids=one.tokens[None], encoder_hidden_states=one.source[None])
        assert gap(again.last_hidden_state[0], one.states.float()) < 0.03  # bfloat16
    if kind == "bart":
        assert [*map(len, asked)] == sorted(map(len, TEXTS))
        expected = model.get_encoder()(torch.tensor([asked[0]])).last_hidden_state[0]
        assert found[0].source is not None and gap(found[0].source, expected) < 1e-5
    again = corpus.make(tmp_path, engine, list, CorpusWish(max_new_tokens=12), sources=sources)
    assert again.facts.get("sounds") == sources.facts.get("sounds") and len(again.shards) == 1


@pytest.mark.parametrize("kind", ["whisper", "bart"])
def test_what_is_written_decodes_as_the_adapters_said(
    kind: str, folders: dict[str, Path], sounds: list[Path], tmp_path: Path
) -> None:
    engine, sources, asked = asked_of(kind, folders, sounds)
    one = shaken(engine)
    export.model(tmp_path, engine, one, copy.deepcopy(one).checkpoint(torch.float32))
    healed = shoal.load(str(tmp_path))
    seen, read = Seen(), Sources(healed, sounds if kind == "whisper" else ()).read(asked[1])
    run = healed.generate(read.prompt, source=read.encoded, method=METHOD, logits_processor=[seen], max_new_tokens=12)
    text = torch.tensor([*read.prompt, *run.tokens[:-1]])
    answer = AnsweredText(text, torch.zeros(len(text), 32), len(read.prompt), source=read.states)
    assert gap(read.states, sources.read(asked[1]).states) == 0, "the encoder was trained too"
    with torch.no_grad():
        said = one.read(TextBatch.of([answer]), PLAN)[0, len(read.prompt) - 1 :] @ one.head.rows.T
        full = one.read(TextBatch.of([answer]), DepthPlan.full(3))[0, len(read.prompt) - 1 :] @ one.head.rows.T
    assert len(run.tokens) > 6 and gap(torch.stack(seen.logits), said) < 1e-3 < gap(full, said)


def test_sources_of_other_lengths_in_a_batch_change_nothing(
    folders: dict[str, Path], sounds: list[Path], tmp_path: Path
) -> None:
    engine, sources, asked = asked_of("bart", folders, sounds)
    one, found = shaken(engine), answered(tmp_path, engine, sources, asked)
    whole = TextBatch.of(found)
    with torch.no_grad():
        together = one.read(whole, PLAN)
        for row, answer in enumerate(found):
            alone = one.read(TextBatch.of([answer]), PLAN)[0]
            assert gap(together[row, : len(alone)], alone) < 1e-4
    sizes = [(len(answer.source), len(answer.tokens)) for answer in found if answer.source is not None]
    assert [*corpus.batches(found, 150)] == [[found[place] for place in batch]
                                             for batch in buckets.two_dimensional(sizes, 150)]


def test_windows_are_cuts_of_the_files(folders: dict[str, Path], sounds: list[Path]) -> None:
    engine, sources, _ = asked_of("whisper", folders, sounds)
    windows = sources.windows(40, 1)
    assert windows == sources.windows(40, 1) != sources.windows(40, 2)
    lengths = [len(one) for one in sources.sounds]
    for window in windows:
        cuts = [*zip(window[::3], window[1::3], window[2::3], strict=True)]
        assert 1 <= len(cuts) <= 4 and sum(count for _, _, count in cuts) <= 30 * RATE
        assert all(first >= 0 and first + count <= lengths[file] and count >= RATE for file, first, count in cuts)
    assert len({len(window) for window in windows}) > 1
    heard = sources._samples(windows[0])
    file, first, count = windows[0][:3]
    assert (heard[:count] == sources.sounds[file][first : first + count]).all()


def test_a_model_that_hears_is_healed(
    folders: dict[str, Path], sounds: list[Path], tmp_path: Path, capsys: Any
) -> None:
    argv = ["train", "heal", "--model", str(folders["whisper"]), "--speech", str(sounds[0].parent), "--windows", "8",
            "--max-new-tokens", "10", "--epochs", "1", "--rank", "2", "--out", str(tmp_path / "healed"), "--under",
            "schedule:order=[1]:steps=[1],full", "--json"]
    assert main(argv) == 0
    card = json.loads(capsys.readouterr().out)
    assert card["part"] == "heal" and len(card["answers"]["sounds"]) == 16 and card["steps"] == [1, 1]
    assert card["answers"]["files"] == [path.name for path in sounds]
    assert card["plans"]["full"]["before"]["distance"] < 0.001
    assert main(argv) == 0
    err = capsys.readouterr().err
    assert "going on at step 1 of 1" in err and "use it: shoal transcribe FILE --model" in err
    transcript = ["transcribe", str(sounds[0]), "--model", str(tmp_path / "healed"), "--language", "en"]
    assert main([*transcript, "--method", "schedule", "--order", "1", "--steps", "1"]) == 0
    assert main([*argv, "--language", "xx"]) == 2
    assert "holds answers of another kind" in capsys.readouterr().err


def test_a_layer_is_trained_on_transcripts_and_guesses(
    folders: dict[str, Path], sounds: list[Path], tmp_path: Path, capsys: Any
) -> None:
    argv = ["train", "eagle", "--model", str(folders["whisper"]), "--speech", str(sounds[0].parent), "--windows", "20",
            "--max-new-tokens", "12", "--epochs", "1", "--out", str(tmp_path / "part"), "--json"]
    assert main(argv) == 0
    card = json.loads(capsys.readouterr().out)
    assert card["part"] == "eagle" and card["answers"]["files"] == [path.name for path in sounds]
    assert card["answers"]["varied"] and card["steps"][0] == card["steps"][1] > 0
    held = corpus.Corpus(tmp_path / "part" / "answers")
    assert len(held.shards) == 2 and held.answers(0, validation=False)[0].source is None
    assert main(argv) == 0
    assert f"going on at step {card['steps'][0]}" in capsys.readouterr().err
    found = []
    for more in ([], ["--method", "eagle", "--part", str(tmp_path / "part"), "--stop", "0"]):
        assert main(["transcribe", str(sounds[0]), "--model", str(folders["whisper"]), "--json", *more]) == 0
        found.append(json.loads(capsys.readouterr().out)["files"][0]["segments"])
    assert found[0] == found[1]


def test_times_and_words_learned_first_are_guessed_beside_frequent_ones(folders: dict[str, Path]) -> None:
    engine = shoal.load(str(folders["whisper"]))
    first = engine.tokenizer.get_added_vocab()["<|0.00|>"]
    found = spoken(engine, {3, first + 1}, 1600)
    assert found[:2] == [first, first + 2] and len(found) == 1598 and {3, first + 1}.isdisjoint(found)
    words = found[engine.runner.vocab_size - first - 1 :]
    assert words == [token for token in range(len(words) + 1) if token != 3] != []
    assert spoken(engine, {3}, 1) == []


def test_varied_windows_are_said_at_other_speeds_under_noise(folders: dict[str, Path], sounds: list[Path]) -> None:
    engine, plainly, _ = asked_of("whisper", folders, sounds)
    varied = Sources(engine, sounds, varied=True, kept=False)
    windows = varied.windows(40, 1)
    assert [one[3:] for one in windows] == plainly.windows(40, 1)
    assert varied.facts == {**plainly.facts, "varied": True, "sources_kept": False}
    speeds = set()
    for window in windows:
        bare, heard = plainly._samples(window[3:]), varied._samples(window)
        speeds.add(window[1])
        assert abs(len(heard) - min(len(bare) * 100 / window[1], 30 * RATE)) < 2 and heard.dtype == bare.dtype
        assert (heard == varied._samples(window)).all()
    assert min(speeds) < 95 and max(speeds) > 107
    loud, soft = (varied._samples([-1, 100, above, *windows[0][3:]]) for above in (10, 40))
    bare = plainly._samples(windows[0][3:])[:-1]
    size = (bare**2).mean() ** 0.5
    noises = [((some - bare) ** 2).mean() ** 0.5 / size for some in (loud, soft)]
    assert abs(noises[0] - 10**-0.5) < 0.01 and abs(noises[1] - 0.01) < 0.001


def test_what_cannot_be_trained_beside_an_encoder(
    folders: dict[str, Path], sounds: list[Path], tmp_path: Path, capsys: Any
) -> None:
    def refusal(*argv: Any) -> str:
        assert main(["train", *map(str, argv), "--out", str(tmp_path / "out")]) == 2
        return str(capsys.readouterr().err)

    tiny("llama").save_pretrained(tmp_path / "deaf")
    under, deaf = ("--under", "full"), ("--model", tmp_path / "deaf")
    assert "--speech is for a model that hears" in refusal("heal", *deaf, *under, "--speech", sounds[0])
    assert "name sounds by --speech" in refusal("heal", "--model", folders["whisper"], *under)
    assert "leave out --speech" in refusal("heal", "--model", folders["bart"], *under, "--speech", sounds[0])
    assert "medusa beside an encoder" in refusal("medusa", "--model", folders["bart"], "--questions", 1)
    assert "--taps beside an encoder" in refusal("eagle", "--model", folders["bart"], "--taps", "0,1")
    assert "--windows belongs to heal and eagle" in refusal("medusa", *deaf, "--windows", 3)
    with pytest.raises(Unsupported, match="its decoder's layers are not read one by one"):
        Sources(engine_for(model_of("t5")))
    with pytest.raises(Unsupported, match="its LM head has a bias"):
        Sources(engine_for(model_of("bart")))
