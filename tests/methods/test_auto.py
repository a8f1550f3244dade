"""`auto`: quiet where the text is new, awake where it repeats, and never where times say that it cannot pay."""

from __future__ import annotations

import json
import math
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from backends import reference
from chat_tokenizer import chat_tokenizer
from drafts import draft_of
from eagle_part import ECHO, eagle_part
from families import VOCAB, tiny
from scripted import Scripted
from shoal.engine.engine import Engine
from shoal.engine.loading.load import engine_for
from shoal.engine.scheduling.scheduler import Scheduler
from shoal.errors import Unsupported
from shoal.methods import auto
from shoal.methods.auto import Auto, CautiousDrafter
from shoal.methods.eagle import Eagle
from shoal.methods.full import Full
from shoal.model.kv.cache import KVCache
from shoal.speculative import draft_head_file
from shoal.speculative.cost import budget, policy
from shoal.speculative.cost.budget import SHARE, START, DraftBudget
from shoal.speculative.cost.model import ForwardTimes
from shoal.speculative.eagle import LayerDrafter
from shoal.types import ModelInfo, Result


def new_text(length: int, seed: int) -> list[int]:
    """Random tokens; pairs come again by chance only."""
    dice = random.Random(seed)
    return [dice.randrange(1, VOCAB) for _ in range(length)]


def repeating(length: int, seed: int, period: int = 25) -> list[int]:
    """A passage over and over."""
    passage = random.Random(seed).sample(range(1, VOCAB), period)
    return [passage[place % period] for place in range(length)]


def cheap(seqs: int, tokens: int) -> float:
    return 1 + 0.02 * (tokens - 1)


def dear(seqs: int, tokens: int) -> float:
    return 1.0 * tokens


def answer(machine: Scripted, text: list[int], prompt: int = 30, **options: object) -> Result:
    result = machine.engine.generate(
        text[:prompt], method=Auto(**options), max_new_tokens=len(text) - prompt, ignore_eos=True
    )
    assert list(result.tokens) == text[prompt:]
    return result


def test_on_new_text_it_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    text = new_text(430, 1)
    result = answer(Scripted(monkeypatch, [text], cheap), text)
    assert result.stats.target_forwards >= 390
    assert result.stats.drafted < 60  # by chance a pair of tokens comes again
    again = Scripted(monkeypatch, [text], cheap)
    seconds = answer(again, text).stats
    assert again.now < 1.03 * (cheap(1, 30) + 399) and seconds.new_tokens == 400


def test_what_was_answered_before_is_guessed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same salt alone: what another one's requests taught costs and brings nothing."""
    text = new_text(430, 1)
    machine = Scripted(monkeypatch, [text], cheap)
    first = answer(machine, text).stats
    assert first.drafted < 60
    with Scheduler(machine.engine, max_seqs=1, prefix_bytes=0) as scheduler:
        def ask(salt: str) -> Result:
            handle = scheduler.submit(text[:30], method=Auto(), max_new_tokens=400, ignore_eos=True, cache_salt=salt)
            list(handle)
            assert list(handle.results[0].tokens) == text[30:]
            return handle.results[0]

        stranger, known = ask("another").stats, ask("").stats
        assert stranger.drafted < 60 and known.accepted > 300 and known.target_forwards < 80
        assert ask("another").stats.accepted > 300


def test_answers_in_a_folder_serve_later_starts_with_the_same_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = new_text(230, 1)
    assert answer(Scripted(monkeypatch, [text], cheap), text, keep=str(tmp_path)).stats.drafted < 60
    assert answer(Scripted(monkeypatch, [text], cheap), text).stats.drafted < 60
    assert answer(Scripted(monkeypatch, [text], cheap), text, keep=str(tmp_path)).stats.accepted > 150
    other = Scripted(monkeypatch, [text], cheap)
    monkeypatch.setattr(other.engine, "fingerprint", lambda: "another model")
    assert answer(other, text, keep=str(tmp_path)).stats.drafted < 60
    assert len(list(tmp_path.iterdir())) == 2


def test_plain_steps_share_calls_until_the_text_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    copied = new_text(60, 6)
    text = [*copied, *new_text(300, 7), *copied]
    machine = Scripted(monkeypatch, [text], lambda seqs, tokens: cheap(seqs, tokens) / 1000, further=0.0008)
    result = answer(machine, text, 60)
    shared = [tokens for _, tokens in machine.forwards[1:]]
    assert sum(tokens == 8 for tokens in shared[:38]) > 34 and max(shared) > 8  # 300 new tokens, then the passage
    assert machine.now < 0.001 * (cheap(1, 60) + 0.84 * 300 + 25)
    assert result.stats.accepted > 40
    helped = Auto().recipe(machine.engine.info()).proposer
    assert helped.judge.times.step(1) == pytest.approx(0.000825)  # of a step, not of a call


def test_on_repeated_text_it_wakes_up(monkeypatch: pytest.MonkeyPatch) -> None:
    text = repeating(430, 2)
    machine = Scripted(monkeypatch, [text], cheap)
    result = answer(machine, text)
    assert result.stats.target_forwards < 400 / 8 and machine.now < 400 / 5
    assert result.stats.accepted / result.stats.drafted > 0.9


def test_it_wakes_up_in_the_middle_and_goes_quiet_again(monkeypatch: pytest.MonkeyPatch) -> None:
    copied = new_text(100, 3)
    text = [*copied, *new_text(100, 4), *copied, *new_text(200, 5)]
    machine = Scripted(monkeypatch, [text], cheap)
    result = answer(machine, text, prompt=110)
    plain = [tokens for _, tokens in machine.forwards[1:]]
    assert result.stats.target_forwards < 390 - 70
    assert sum(tokens > 4 for tokens in plain[-150:]) < 10


def test_it_never_guesses_where_a_forward_over_more_positions_costs_what_it_brings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = repeating(480, 6)
    machine = Scripted(monkeypatch, [text], dear)
    result = answer(machine, text)
    assert result.stats.target_forwards >= 450 - 45
    assert sum(tokens > 1 for _, tokens in machine.forwards[1:]) <= 5  # a trial, after longer and longer pauses
    assert machine.now < 1.05 * (450 + 30)


def test_guesses_stay_within_the_budget_of_their_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passages come again and go on otherwise: the text takes what the budget says that it took."""
    dice, budgets = random.Random(9), list[DraftBudget]()

    class Watched(DraftBudget):
        def __init__(self) -> None:
            super().__init__()
            budgets.append(self)

    monkeypatch.setattr(auto, "DraftBudget", Watched)
    passage = new_text(14, 10)
    text = [token for _ in range(30) for token in (*passage, dice.randrange(1, VOCAB))]
    machine = Scripted(monkeypatch, [text], lambda seqs, tokens: 1 + 0.2 * (tokens - 1))
    result = answer(machine, text)
    plain, took = len(text) - 30, machine.now - (1 + 0.2 * 29)
    assert result.stats.drafted > 0 and took <= (1 + SHARE) * plain + START
    assert budgets[0].left == pytest.approx((1 + SHARE) * plain + START - took, abs=2.0)
    monkeypatch.setattr(Watched, "left", property(lambda _: 0.0, lambda *_: None), raising=False)
    assert answer(Scripted(monkeypatch, [text], cheap), text).stats.drafted == 0


@pytest.mark.parametrize("seed", range(4))
def test_steps_that_share_no_call_are_losses_too(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Pairs of few tokens come again all the time, and say nothing; alone a step takes 1.25 times as long."""
    dice = random.Random(seed)
    learned, text = ([first, *(dice.randrange(1, 12) for _ in range(429))] for first in (20, 21))

    def step(seqs: int, tokens: int) -> float:
        return (1 + 0.15 * (tokens - 1)) / 1000

    def took() -> float:
        machine = Scripted(monkeypatch, [learned, text], step, further=0.0008)
        answer(machine, learned)  # what steps take
        machine.now = 0.0
        answer(machine, text)
        return 1000 * machine.now - (1 + 0.15 * 29)

    best = 400 * (1 + 7 * 0.8) / 8
    bound = (1 + SHARE) * best + START * best / 400
    counted = took()
    monkeypatch.setattr(ForwardTimes, "slower", lambda *_: 1.0)
    monkeypatch.setattr("shoal.methods.auto._BARREN", 2)
    assert counted < bound + 1 and took() > bound + 5


def test_what_was_learned_serves_the_next_request(monkeypatch: pytest.MonkeyPatch) -> None:
    text = repeating(430, 7)
    machine = Scripted(monkeypatch, [text], dear)
    answer(machine, text)
    machine.forwards.clear()
    answer(machine, text)
    assert sum(tokens > 1 for _, tokens in machine.forwards[1:]) <= 2


def test_the_length_is_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    text = repeating(230, 8)
    machine = Scripted(monkeypatch, [text], cheap)
    answer(machine, text, length=3)
    assert max(tokens for _, tokens in machine.forwards[1:]) == 4


def test_rows_of_a_batch_are_told_apart_and_the_width_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [[seq, *(repeating(229, seq) if seq % 2 else new_text(229, seq))] for seq in range(1, 13)]
    machine = Scripted(monkeypatch, texts, cheap)
    results = machine.engine.generate(
        [text[:30] for text in texts], method="auto", max_new_tokens=200, ignore_eos=True
    )
    assert [list(result.tokens) for result in results] == [text[30:] for text in texts]
    forwards = [result.stats.target_forwards for result in results]
    assert max(forwards[::2]) < min(forwards[1::2]) and min(forwards[1::2]) > 180
    limit = machine.engine.runner.prefill_chunk
    assert max(tokens for _, tokens in machine.forwards[1:]) <= limit
    waited = sum(cheap(seqs, tokens) / cheap(seqs, seqs) - 1 for seqs, tokens in machine.forwards[1:])
    assert waited <= START + SHARE * 200  # plain steps that guesses for some took of the others


def test_rows_that_all_repeat_a_passage_gain_together(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [[seq, *repeating(229, seq)] for seq in range(1, 9)]
    machine = Scripted(monkeypatch, texts, cheap)
    results = machine.engine.generate([text[:30] for text in texts], method="auto", max_new_tokens=200, ignore_eos=True)
    assert [list(result.tokens) for result in results] == [text[30:] for text in texts]
    assert max(result.stats.target_forwards for result in results) < 80


@pytest.mark.parametrize("options", [{}, {"temperature": 0.9, "repetition_penalty": 1.2, "seed": 4}], ids=str)
def test_rows_that_join_and_leave_give_what_plain_decoding_gives(options: dict[str, object]) -> None:
    engine = engine_for(tiny("llama", dtype=torch.float64))
    prompts = [[4, 8, 15, 8] * size + [size] for size in (2, 5, 3, 7, 4)]
    plain = [engine.generate(prompt, max_new_tokens=20 + number, **options) for number, prompt in enumerate(prompts)]
    with Scheduler(engine, max_seqs=3, start=False) as scheduler:
        handles = []
        for number, prompt in enumerate(prompts):
            method = "full" if number == 3 else "auto"  # the switch of one request
            handles.append(scheduler.submit(prompt, method=method, max_new_tokens=20 + number, **options))
            scheduler.turn()
        for _ in range(200):
            scheduler.turn()
        assert [handle.results[0].tokens for handle in handles] == [result.tokens for result in plain]
        assert handles[3].results[0].stats.drafted == 0


def test_turns_of_a_chat_are_those_of_plain_decoding() -> None:
    engine = engine_for(tiny("llama", dtype=torch.float64), chat_tokenizer())
    chats = [engine.session(method=method, max_new_tokens=16) for method in ("full", "auto")]
    for message in ("one two one two one two", "one two one two", "and one two one two one"):
        plain, found = (chat.send(message) for chat in chats)
        assert found.tokens == plain.tokens


def test_a_draft_model_helps_where_the_text_gives_no_guess() -> None:
    engine = engine_for(tiny("llama", dtype=torch.float64))
    plain = engine.generate([[5, 17, 80], [60, 2, 33, 9]], max_new_tokens=40)
    method = Auto(draft=draft_of("llama", 0.0))
    drafted = engine.generate([[5, 17, 80], [60, 2, 33, 9]], method=method, max_new_tokens=40)
    assert [one.tokens for one in drafted] == [one.tokens for one in plain]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "seed": 3}], ids=str)
def test_calibrated_self_drafting_changes_no_token(sampling: dict[str, object]) -> None:
    class Calibrated(Engine):
        def info(self, max_new_tokens: int = 256) -> ModelInfo:
            return replace(super().info(max_new_tokens), skips=((1, 2, 3, 4), (1, 2, 3, 4)))

    base = engine_for(tiny("llama", dtype=torch.float64))
    engine = Calibrated(base.runner, eos_token_ids=base.eos_token_ids, model=base.model)
    prompts = [[5, 17, 80, 3, 41], [60, 2, 33]]
    plain = engine.generate(prompts, max_new_tokens=60, **sampling)
    found = engine.generate(prompts, method="auto", max_new_tokens=60, **sampling)
    assert [one.tokens for one in found] == [one.tokens for one in plain]
    assert found[0].stats.draft_forwards > 0


@pytest.fixture
def shipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Engine:
    """A model for which a part comes with Shoal."""
    shutil.copytree(eagle_part("llama"), tmp_path / "tiny")
    monkeypatch.setattr(draft_head_file, "SHIPPED", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "none"))
    return engine_for(reference("llama"))


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "seed": 3}], ids=str)
def test_the_part_that_ships_changes_no_token(
    shipped: Engine, sampling: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "MARGIN", 0.0)  # whatever it costs
    monkeypatch.setattr(budget, "START", math.inf)
    prompts = [[5, 17, 80, 3, 41], [60, 2, 33]]
    options = {"max_new_tokens": 60, "logit_bias": ECHO, **sampling}
    plain = shipped.generate(prompts, **options)
    found = shipped.generate(prompts, method=Auto(), **options)
    assert [one.tokens for one in found] == [one.tokens for one in plain]
    assert found[0].stats.draft_forwards > 0 and sum(one.stats.accepted for one in found) > 0
    long = [*range(1, 91)]  # the part reads its end alone
    plain, drafted = (shipped.generate(long, method=one, max_new_tokens=40, **sampling) for one in (Full(), Auto()))
    assert drafted.tokens == plain.tokens and drafted.stats.draft_forwards > 0


def test_a_step_in_which_a_part_was_not_asked_says_nothing_of_its_time(
    shipped: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, timed = list[int](), list[int]()
    propose, took = LayerDrafter.propose, policy.DrafterRecord.took

    def asking(self: LayerDrafter, *args: object) -> object:
        asked.append(1)
        return propose(self, *args)  # type: ignore[arg-type]

    def timing(self: policy.DrafterRecord, rows: int, guesses: int, share: float) -> None:
        timed.append(rows)
        took(self, rows, guesses, share)

    monkeypatch.setattr(LayerDrafter, "propose", asking)
    monkeypatch.setattr(policy.DrafterRecord, "took", timing)
    monkeypatch.setattr(CautiousDrafter, "_spare", lambda *_: math.inf)
    monkeypatch.setattr(policy.DrafterRecord, "_TRIES", 20)
    shipped.generate([[5, 17, 80, 3, 41], [60, 2, 33]], method=Auto(), max_new_tokens=60, ignore_eos=True)
    assert asked and len(timed) <= len(asked)


@pytest.mark.slow
def test_the_part_that_ships_rests_where_it_does_not_pay(shipped: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked again after a pause, when it has seen nothing of what was decoded in between but the end."""
    monkeypatch.setattr(policy, "MARGIN", 1e9)
    monkeypatch.setattr(budget, "START", math.inf)  # whatever the trials cost
    prompt = [5, 17, 80, 3, 41]
    plain = shipped.generate(prompt, max_new_tokens=300, ignore_eos=True)
    found = shipped.generate(prompt, method=Auto(), max_new_tokens=300, ignore_eos=True)
    assert found.tokens == plain.tokens
    assert 1 <= found.stats.draft_forwards <= 8
    again = shipped.generate(prompt, method=Auto(), max_new_tokens=40, ignore_eos=True)
    assert again.stats.draft_forwards == 0  # where no guess could pay, another text is no other matter
    proposer = Auto().recipe(shipped.info()).proposer
    drafter = proposer.begin(shipped.runner, KVCache(shipped.runner.windows, 0))
    reading, decoding = ([type("Standing", (), {"emitted": emitted})()] for emitted in (0, 1))
    assert proposer.judge.drafter.rest and drafter.watch(decoding, []) is None  # nothing is collected for it meanwhile
    with pytest.raises(AttributeError):
        drafter.watch(reading, [object()])


def test_the_part_is_that_of_the_model_and_of_no_other(shipped: Engine) -> None:
    assert Auto().recipe(shipped.info()).proposer.drafter.part.name.endswith("tiny")
    assert Auto().recipe(engine_for(tiny("gpt2", dtype=torch.float64)).info()).proposer.drafter is None
    assert Eagle().recipe(shipped.info()).proposer.part.name.endswith("tiny")
    with pytest.raises(ValueError, match="eagle has no trained part, and none is known for this model"):
        Eagle().recipe(engine_for(tiny("gpt2", dtype=torch.float64)).info())


def test_a_part_in_the_users_cache_is_found_before_that_which_ships(
    shipped: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mine = tmp_path / "cache" / "shoal" / "parts"
    shutil.copytree(eagle_part("llama"), mine / "zebra")
    (mine / "damaged").mkdir()
    (mine / "damaged" / draft_head_file.CARD).write_text("{")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    engine = engine_for(reference("llama"))
    assert Auto().recipe(engine.info()).proposer.drafter.part.name == str(mine / "zebra")
    assert str(mine / "damaged" / draft_head_file.CARD) in caplog.text


def test_a_part_that_was_named_is_the_drafter_and_no_other_beside_it(shipped: Engine, tmp_path: Path) -> None:
    named = eagle_part("llama")
    assert Auto(part=named).recipe(shipped.info()).proposer.drafter.part.name == named
    assert Auto().recipe(shipped.info()).proposer.drafter.part.name.endswith("tiny")
    with pytest.raises(ValueError, match="draft is 'small' and part 'trained'; only one helper drafts"):
        Auto(draft="small", part="trained")
    other = tmp_path / "other"
    shutil.copytree(named, other)
    card = json.loads((other / draft_head_file.CARD).read_text("utf-8"))
    (other / draft_head_file.CARD).write_text(json.dumps({**card, "part": "medusa"}), "utf-8")
    with pytest.raises(ValueError, match="is of kind 'medusa'; eagle needs"):
        Auto(part=str(other)).recipe(shipped.info())


def test_only_a_search_that_found_sublayers_to_skip_gives_a_drafter() -> None:
    found, nothing = (Auto().recipe(ModelInfo(6, skips=skips)).proposer for skips in (((2,), (2,)), ((), ())))
    assert found.drafter is not None and nothing.drafter is None


def test_where_processes_must_decide_alike_it_is_plain_decoding() -> None:
    recipe = Auto().recipe(ModelInfo(6, free=False))
    assert recipe.proposer is None and recipe.exact_to == "full"


def test_requests_of_one_engine_share_what_they_learn() -> None:
    info = ModelInfo(6)
    one, other = Auto().recipe(info), Auto().recipe(info)
    assert one.proposer is other.proposer is not None
    assert Auto(length=3).recipe(info).proposer is not one.proposer
    assert Auto().recipe(ModelInfo(6)).proposer is not one.proposer


def test_bad_settings() -> None:
    with pytest.raises(ValueError, match="length is 0"):
        Auto(length=0)
    with pytest.raises(Unsupported, match="auto with a loaded"):
        Auto(draft=torch.nn.Linear(1, 1)).to_dict()
