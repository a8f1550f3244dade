"""The model for lm-evaluation-harness: likelihoods against an uncached pass, answers against the engine, its tasks."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.nn.functional import log_softmax
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from oracle import prefix_counts, prefix_oracle
from shoal.errors import Unsupported

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed; pip install 'shoal-lab[eval]'")
    from lm_eval.api.instance import Instance

    from shoal_lab.eval.lm_eval import ShoalLM, evaluate, local_tasks

pytestmark = pytest.mark.filterwarnings("ignore")
D3 = {"method": "d3", "method_args": {"alpha": 0.8, "core": 2, "order": "center_out"}}


@pytest.fixture(scope="module")
def parts() -> tuple[Any, Any]:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: number for number, letter in enumerate([*alphabet, "<end>"])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", pad_token="<end>")
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=257, hidden_size=32, intermediate_size=64, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096, initializer_range=0.3, bos_token_id=None,
        eos_token_id=256, pad_token_id=256,
    )
    return LlamaForCausalLM(config).double().eval(), tokenizer


def lm(parts: tuple[Any, Any], method: Any = "full", **options: Any) -> Any:
    return ShoalLM(parts[0], method, tokenizer=parts[1], batch_size=3, **options)


@pytest.mark.parametrize("method", ["full", D3])
def test_likelihoods_are_those_of_the_plan(parts: tuple[Any, Any], method: Any) -> None:
    model = lm(parts, method)
    pairs = [("Two and two", " are four, I am told"), ("A", "b"), ("Some words before", " and some after them")]
    found = model.loglikelihood([Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)])
    plan = model.engine.recipe(method, model.max_gen_toks).plan
    for (context, continuation), (value, greedy) in zip(pairs, found, strict=True):
        prompt, target = (parts[1](text)["input_ids"] for text in (context, continuation))
        ids = [*prompt, *target[:-1]]
        logits = prefix_oracle(parts[0], torch.tensor([ids]), prefix_counts(plan.attention, len(prompt), len(ids)))
        draft_probs = log_softmax(logits[len(prompt) - 1 :], -1)
        expected = float(draft_probs.gather(1, torch.tensor(target)[:, None]).sum())
        assert value == pytest.approx(expected, abs=1e-3)
        assert greedy == (draft_probs.argmax(-1).tolist() == target)
    assert (model.mean_layers == 6) == (method == "full")


def test_answers_are_the_engine_s(parts: tuple[Any, Any]) -> None:
    model = lm(parts, D3)
    prompts = ["Once upon a time", "Two", "The quick brown fox"]
    options = {"until": ["zzzz"], "max_gen_toks": 20, "do_sample": False}
    found = model.generate_until([Instance("generate_until", {}, (text, options), i) for i, text in enumerate(prompts)])
    for text, answer in zip(prompts, found, strict=True):
        assert answer == model.engine.generate(text, method=D3, max_new_tokens=20).text
    with pytest.raises(ValueError, match="num_beams"):
        model._model_generate(torch.tensor([[1, 2]]), 8, [], num_beams=2)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for part in ("train", "test"):
        rows = [{"question": f"What is {i} + {i}?", "answer": f"It is {2 * i}.\n#### {2 * i}"} for i in range(8)]
        path = tmp_path / "gsm8k" / f"{part}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "bbh" / "bbh").mkdir(parents=True)
    (tmp_path / "bbh" / "cot-prompts").mkdir()
    examples = [{"input": f"not {value} is", "target": str(not value)} for value in (True, False, True)]
    for name in ("logic", "other"):
        (tmp_path / "bbh" / "bbh" / f"{name}.json").write_text(json.dumps({"canary": "c", "examples": examples}))
        prompt = "canary\n-----\nEvaluate {this}.\n\nQ: not True is\nA: Let's think step by step.\nSo it is False."
        (tmp_path / "bbh" / "cot-prompts" / f"{name}.txt").write_text(prompt)
    return tmp_path


def test_local_tasks_run_and_say_what_ran(parts: tuple[Any, Any], data: Path) -> None:
    found = evaluate(lm(parts, D3), ["gsm8k", "bbh_logic"], data, limit=2, gen_kwargs="max_gen_toks=24")
    assert set(found["results"]) == {"gsm8k_local", "bbh_logic_local"}
    assert 2 < found["mean_layers"] < 6 and found["num_layers"] == 6
    (sample, _) = found["samples"]["bbh_logic_local"]
    prompt = json.dumps(sample["arguments"], default=str)
    assert "canary" not in prompt and "Evaluate {this}." in prompt
    assert "Q: not True is\\nA: Let's think step by step.\\n" in prompt


def test_every_bbh_task_is_one(data: Path) -> None:
    assert [task["task"] for task in local_tasks(["bbh"], data)] == ["bbh_logic_local", "bbh_other_local"]


def test_what_is_missing_is_named(data: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Did you mean 'bbh_logic'"):
        local_tasks(["bbh_logi"], data)
    with pytest.raises(ValueError, match="there is no .*gsm8k"):
        local_tasks(["gsm8k"], tmp_path / "nothing")
    with pytest.raises(ValueError, match="unknown task 'gsm9k'"):
        local_tasks(["gsm9k"], None)


@pytest.mark.parametrize("method", ["kv_int8", "streaming_llm", "topk_oracle", "best_of"])
def test_likelihoods_that_a_plan_does_not_give_are_refused(parts: tuple[Any, Any], method: str) -> None:
    with pytest.raises(Unsupported, match=f"under {method}: .* scored by the plan alone"):
        lm(parts, method).loglikelihood([Instance("loglikelihood", {}, ("A", "b"), 0)])
