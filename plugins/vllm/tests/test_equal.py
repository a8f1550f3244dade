"""Tokens of the plug-in are those of Shoal's own engine under the same plan, alone and in batches."""

import pytest

import shoal
import tiny

PROMPTS = [[5, 6, 7, 8], list(range(20, 61)), [9, 8, 7], list(range(100, 190, 2))]
LENGTHS = [60, 40, 90, 25]


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_tokens_are_shoals_and_the_layers_those_of_the_plan(family: str) -> None:
    method = shoal.D3(mean=0.7)
    with tiny.engine(tiny.folder(family), {"method": "d3", "mean": 0.7}, enable_prefix_caching=False) as llm:
        together = tiny.answers(llm, PROMPTS, [tiny.params(length) for length in LENGTHS])
        before = llm.collective_rpc("shoal_counts")[0]
        alone = [tiny.answers(llm, [prompt], tiny.params(length))[0]
                 for prompt, length in zip(PROMPTS, LENGTHS, strict=True)]
        after = llm.collective_rpc("shoal_counts")[0]
    assert together == alone
    assert alone == [tiny.reference(family, prompt, length, method)
                     for prompt, length in zip(PROMPTS, LENGTHS, strict=True)]
    plans = [method.recipe(shoal.ModelInfo(8, length)).plan for length in LENGTHS]
    for layer in range(8):
        # Token 0 comes with the prompt, and the last token is not fed.
        steps = [min(plan.attention[layer], length) for plan, length in zip(plans, LENGTHS, strict=True)]
        assert after["layer_forwards"][layer] - before["layer_forwards"][layer] == sum(steps)
        prompts = sum(len(prompt) - 1 for prompt in PROMPTS)
        assert after["layer_rows"][layer] - before["layer_rows"][layer] == prompts + sum(steps)
    shallow = sum(plan.layer_tokens(length) for plan, length in zip(plans, LENGTHS, strict=True))
    assert shallow < 0.75 * 8 * sum(LENGTHS)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_full_depth_is_vllm_alone(family: str) -> None:
    wanted = [tiny.params(length) for length in LENGTHS]
    with tiny.engine(tiny.folder(family)) as llm:
        plain = tiny.answers(llm, PROMPTS, wanted)
        assert type(tiny.worker(llm)).__name__ == "CPUWorker"
    with tiny.engine(tiny.folder(family), {"method": "d3", "alpha": 1.0}) as llm:
        assert tiny.answers(llm, PROMPTS, wanted) == plain
        shallow = tiny.answers(llm, PROMPTS, [tiny.params(length, {"method": "d3", "mean": 0.7}) for length in LENGTHS])
    assert all(one != other for one, other in zip(shallow, plain, strict=True))


def test_other_depth_methods_and_own_orders() -> None:
    asked = [{"method": "schedule", "order": [0, 5, 4], "steps": [3, 3, 20]},
             {"method": "d3", "alpha": 0.98, "order": "late_middle", "core": 2}, "early_exit", "full"]
    with tiny.engine(tiny.folder("llama"), {}) as llm:
        found = tiny.answers(llm, PROMPTS, [tiny.params(30, one) for one in asked])
    methods = [shoal.methods.make({"method": "schedule", "method_args": {"order": [0, 5, 4], "steps": [3, 3, 20]}}),
               shoal.D3(alpha=0.98, order="late_middle", core=2), shoal.EarlyExit(), "full"]
    assert found == [tiny.reference("llama", prompt, 30, method) for prompt, method in
                     zip(PROMPTS, methods, strict=True)]


def test_a_row_that_passes_a_layer_writes_no_kv_there() -> None:
    with tiny.engine(tiny.folder("llama"), {}) as llm:
        caches = [layer.kv_cache for layer in tiny.worker(llm).compilation_config.static_forward_context.values()]
        for cache in caches:
            cache.zero_()
        shallow = {"method": "schedule", "order": [4], "steps": [3]}
        tiny.answers(llm, PROMPTS[:2], [tiny.params(20), tiny.params(20, shallow)])
    for layer, cache in enumerate(caches):
        of_shallow = 2 if layer == 4 else 19  # steps 1 and 2, or all but the last token
        written = len(PROMPTS[0]) + 19 + len(PROMPTS[1]) + of_shallow
        assert int(cache.count_nonzero()) == written * 2 * 32  # a key and a value of one head
