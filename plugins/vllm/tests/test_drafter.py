"""The drafter changes no token: greedy answers with it are those without it, whatever it guesses."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import tiny
from shoal.speculative.cost.policy import CostModel
from shoal_vllm.drafter import Auto

SPECULATIVE = {"model": "shoal_vllm.drafter.Auto", "num_speculative_tokens": 7}
PROMPTS = [[5, 6, 7, 8] * 5, [9, 8, 7], list(range(100, 130)) * 2, [3]]
CONFIG = SimpleNamespace(use_v2_model_runner=False, speculative_config=SimpleNamespace(num_speculative_tokens=7),
                         model_config=SimpleNamespace(max_model_len=60))


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guesses wherever the text repeats a passage, so that no measured time decides what is tested."""
    monkeypatch.setattr(CostModel, "lengths", lambda self, chances, *_: [len(one) for one in chances])


def watched(llm: Any) -> dict[str, int]:
    """Counts what the drafter guesses, and how much of it is kept."""
    drafter, seen = tiny.worker(llm).model_runner.drafter, {"guessed": 0, "kept": 0}
    propose = drafter.propose

    def counting(sampled: Any, *args: Any, **kwargs: Any) -> Any:
        seen["kept"] += sum(max(0, len(new) - 1) for new in sampled)
        found = propose(sampled, *args, **kwargs)
        seen["guessed"] += sum(map(len, found))
        return found

    drafter.propose = counting
    return seen


@pytest.mark.parametrize("family", ["llama", "llama-loops", "gemma3"])
def test_greedy_answers_are_the_same(family: str, eager: None) -> None:
    wanted = [tiny.params(length) for length in (80, 60, 100, 90)]
    with tiny.engine(tiny.folder(family)) as llm:
        plain = tiny.answers(llm, PROMPTS, wanted)
    with tiny.engine(tiny.folder(family), speculative_config=SPECULATIVE, max_num_seqs=3) as llm:
        seen = watched(llm)
        assert tiny.answers(llm, PROMPTS, wanted) == plain
    assert seen["guessed"] > seen["kept"] > (50 if family == "llama-loops" else -1)


class Rows:
    """Some texts as vLLM shows them to a drafter, which go on whatever is guessed."""

    def __init__(self, *texts: list[int]) -> None:
        self.texts = texts
        self.at = [0] * len(texts)

    def show(self, drafter: Auto, new: list[int], order: list[int]) -> list[list[int]]:
        """The guesses after so many new tokens of each row; `order` says where a row stands."""
        table, lengths = np.zeros((4, 64), dtype=np.int32), np.zeros(4, dtype=np.int32)
        for place, row in enumerate(order):
            self.at[row] += new[row]
            table[place, : self.at[row]] = self.texts[row][: self.at[row]]
            lengths[place] = self.at[row]
        sampled = [self.texts[row][self.at[row] - new[row] : self.at[row]] for row in order]
        return drafter.propose(sampled, lengths, table, slot_mappings=None)


def test_rows_are_told_by_their_tokens(eager: None) -> None:
    drafter = Auto(CONFIG)
    rows = Rows([1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6, 1], list(range(40, 60)))
    assert rows.show(drafter, [8, 8], [0, 1]) == [[3, 4, 5, 6, 1, 2, 3], []]
    known = drafter._rows[0]
    assert rows.show(drafter, [1, 1], [1, 0])[1][:3] == [4, 5, 6] and drafter._rows[1] is known
    assert rows.show(drafter, [2, 0], [0])[0][:2] == [6, 1] and drafter._rows[0] is known
    assert known.read == 0 and known.emitted == 11


def test_a_row_that_reads_its_prompt_gets_no_guess_and_a_full_context_ends_it(eager: None) -> None:
    drafter = Auto(CONFIG)
    assert drafter.propose([[], [2]], np.array([4, 5]), np.array([[1, 2, 1, 2, 0], [1, 2, 3, 1, 2]])) == [
        [], [3, 1, 2, 3, 1, 2, 3]]
    text = [1, 2] * 29
    found = drafter.propose([[2]], np.array([58]), np.array([text], dtype=np.int32))
    assert len(found[0]) == 1  # 60 positions at most, and one is for the token after the guess


def test_guesses_follow_measured_times() -> None:
    drafter, rows = Auto(CONFIG), Rows([1, 2, 3] * 20)
    assert rows.show(drafter, [9], [0]) == [[]]  # nothing was timed yet
    for _ in range(4):
        rows.show(drafter, [1], [0])
    assert drafter._drafter._proposer.judge.times.known(1)
