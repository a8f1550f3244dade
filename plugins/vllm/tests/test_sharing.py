"""Blocks of the prefix cache: prompts are shared, answers that ran fewer layers are not."""

import pytest

import shoal
import tiny

D3 = {"method": "d3", "mean": 0.7}
PROMPT = [7 * place % 300 + 3 for place in range(40)]


@pytest.mark.parametrize(("asked", "shared"), [("full", 96), (D3, 32), ({"method": "schedule", "order": [4],
                                                                        "steps": [80]}, 32)])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_the_next_turn_computes_a_shallow_answer_again(family: str, asked: object, shared: int) -> None:
    with tiny.engine(tiny.folder(family), {}) as llm:
        answer = tiny.answers(llm, [PROMPT], tiny.params(80, asked))[0]
        turn = [*PROMPT, *answer, 5, 6, 7]
        for plan, method in (("full", "full"), (D3, shoal.D3(mean=0.7))):
            output = llm.generate([{"prompt_token_ids": turn}], tiny.params(30, plan), use_tqdm=False)[0]
            assert list(output.outputs[0].token_ids) == tiny.reference(family, turn, 30, method)
            # Of 120 positions, three blocks of 32 are whole; then this turn's prompt is in the cache itself.
            # Of sliding windows vLLM keeps fewer.
            assert output.num_cached_tokens == shared or (family == "gemma3" and output.num_cached_tokens < shared)
            shared = 96


def test_a_shallow_answer_finds_a_prompt_that_others_computed() -> None:
    with tiny.engine(tiny.folder("llama"), {}) as llm:
        tiny.answers(llm, [PROMPT], tiny.params(4, "full"))
        output = llm.generate([{"prompt_token_ids": PROMPT}], tiny.params(60, D3), use_tqdm=False)[0]
    assert output.num_cached_tokens == 32
    assert list(output.outputs[0].token_ids) == tiny.reference("llama", PROMPT, 60, shoal.D3(mean=0.7))
