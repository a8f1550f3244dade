"""A second model as a drafter: what it may be, what it keeps, what it feeds; shapes of trees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from drafts import draft_of, noisy
from drive import breaks_at_times, decode, make_run, prompt
from families import fingerprint, tiny
from shoal.decode.rules.accept import Rule
from shoal.decode.rules.probabilistic import Rejection
from shoal.decode.tree import TokenTree
from shoal.engine.engine import Engine, Stream
from shoal.engine.loading.load import engine_for
from shoal.engine.request import Request
from shoal.errors import Unsupported
from shoal.methods.draft_model import DraftModel
from shoal.methods.full import Full
from shoal.model.runner import SequenceChunk
from shoal.speculative.growth import Branching, Leaf
from toy_tokenizers import byte_level, metaspace

NEW = 24
PROMPTS = [prompt(9, 1), prompt(4, 2)]


def home(**options: Any) -> Engine:
    return engine_for(tiny("llama", **options))


class Fed:
    """Keeps what a runner is fed, and fails when told to."""

    def __init__(self, runner: Any, fail_at: int | None = None) -> None:
        self._forward, self._fail_at = runner.forward, fail_at
        self.chunks: list[Sequence[SequenceChunk]] = []
        runner.forward = self

    def __call__(self, chunks: Sequence[SequenceChunk], cache: Any, hook: Any = None) -> Any:
        self.chunks.append(chunks)
        if len(self.chunks) == self._fail_at:
            raise RuntimeError("the draft model broke")
        return self._forward(chunks, cache, hook)


@pytest.mark.parametrize("noise", [0.0, 0.03])
def test_the_draft_reads_nothing_twice(noise: float) -> None:
    """Per sequence: the prompt, every emitted token but the last once, and guesses that were refused."""
    engine, draft = home(), draft_of("llama", noise)
    fed = Fed(engine.info().draft_engine(draft).runner)  # type: ignore[misc]
    result = engine.generate(PROMPTS[0], method=DraftModel(draft, length=3), max_new_tokens=NEW)
    tokens = sum(len(chunk.tokens) for chunks in fed.chunks for chunk in chunks)
    refused = result.stats.drafted - result.stats.accepted
    assert result.stats.accepted > 0
    assert tokens <= len(PROMPTS[0]) + NEW - 1 + refused
    assert len(fed.chunks) == result.stats.draft_forwards


def test_the_draft_model_is_not_changed_and_loaded_once() -> None:
    engine, draft = home(), noisy(tiny("llama"), 0.1)
    before = fingerprint(draft)
    draft_engine = engine.info().draft_engine
    assert draft_engine is not None and draft_engine(draft) is draft_engine(draft)
    engine.generate(PROMPTS, method=DraftModel(draft), max_new_tokens=NEW)
    assert fingerprint(draft) == before


def test_a_draft_model_is_found_by_its_folder(tmp_path: Any) -> None:
    draft_of("llama").save_pretrained(tmp_path)
    engine = home()
    by_name = engine.generate(PROMPTS, method=DraftModel(str(tmp_path)), max_new_tokens=NEW)
    by_object = engine.generate(PROMPTS, method=DraftModel(draft_of("llama")), max_new_tokens=NEW)
    assert [r.tokens for r in by_name] == [r.tokens for r in by_object]
    assert [r.stats.accepted for r in by_name] == [r.stats.accepted for r in by_object] != [0, 0]
    draft_engine = engine.info().draft_engine
    assert draft_engine is not None and draft_engine(str(tmp_path)) is draft_engine(str(tmp_path))
    assert draft_engine(str(tmp_path)).runner.dtype == engine.runner.dtype


@pytest.mark.parametrize(("sizes"), [(97, 104), (97, 90)])
@pytest.mark.quick(1)
def test_heads_of_other_sizes_with_the_same_tokenizer(sizes: tuple[int, int]) -> None:
    """Padded embeddings: the draft says nothing about tokens it has not, and none that the target has not."""
    words = byte_level()
    target = engine_for(tiny("llama", vocab_size=sizes[0]), words)
    other = engine_for(tiny("llama", vocab_size=sizes[1]), words)
    draft = target.info().draft_engine
    assert draft is not None
    draft._known["padded"] = "padded", other  # type: ignore[attr-defined]
    for options in ({}, {"temperature": 1.0, "seed": 3}):
        plain = target.generate(PROMPTS, max_new_tokens=NEW, **options)
        for method in (DraftModel("padded"), DraftModel("padded", branching=(3, 2, 1))):
            found = target.generate(PROMPTS, method=method, max_new_tokens=NEW, **options)
            assert [r.tokens for r in found] == [r.tokens for r in plain]


def refused(engine: Engine, method: Any, words: str, **options: Any) -> None:
    with pytest.raises(ValueError, match=words):
        engine.generate(prompt(20), method=method, **options)


def test_drafts_that_do_not_fit_are_refused() -> None:
    engine = home()
    refused(engine, DraftModel(), "draft_model has no draft model; give draft")
    refused(engine, DraftModel("/no/such/folder"), "draft model '/no/such/folder' cannot be loaded.*no folder")
    refused(engine, DraftModel(3), "object of type int.*no transformers model")
    refused(engine, DraftModel(tiny("llama", vocab_size=50)), "has 50 tokens and the model 97")
    short = tiny("llama", max_position_embeddings=64)
    refused(engine, DraftModel(short), "up to 276 tokens.*context is 64 tokens.*max_new_tokens")
    engine.generate(prompt(20), method=DraftModel(short), max_new_tokens=44)
    refused(engine, DraftModel(short), "context is 64", max_new_tokens=45)


def test_other_tokenizers_are_refused() -> None:
    engine = engine_for(tiny("llama"), byte_level())
    other = engine_for(tiny("llama"), metaspace())
    draft_engine = engine.info().draft_engine
    assert draft_engine is not None
    draft_engine._open = lambda home, model: other  # type: ignore[attr-defined]
    refused(engine, DraftModel(tiny("llama", seed=1)), "its tokenizer has another vocabulary. Draft with")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: DraftModel("m", length=0), "length is 0"),
        (lambda: DraftModel("m", branching=()), "at least one level"),
        (lambda: DraftModel("m", branching=(2, 0)), "at least 1 child"),
        (lambda: DraftModel("m", rule="lenient"), "margin is None"),
    ],
)
def test_settings_out_of_range(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


def test_a_loaded_model_has_no_json_form() -> None:
    method = DraftModel(draft_of("llama"))
    assert "LlamaForCausalLM" in repr(method) and len(repr(method)) < 200
    with pytest.raises(Unsupported, match="cannot be written down"):
        method.to_dict()


@pytest.mark.parametrize("call", [1, 2, 3, 5])
def test_a_draft_that_breaks_leaves_the_target_as_it_was(call: int) -> None:
    engine, draft = home(), noisy(tiny("llama"), 0.03)
    before = fingerprint(engine.model)
    draft_engine = engine.info().draft_engine
    assert draft_engine is not None
    runner = draft_engine(draft).runner
    fed = Fed(runner, fail_at=call)
    stream = engine.stream(PROMPTS[0], method=DraftModel(draft), max_new_tokens=NEW)
    with pytest.raises(RuntimeError, match="the draft model broke"):
        list(stream)
    assert stream.result.finish_reason == "cancelled"
    assert fingerprint(engine.model) == before
    assert len(fed.chunks) == call
    plain = engine.generate(PROMPTS[0], method=Full(), max_new_tokens=NEW)
    assert plain.tokens[: len(stream.result.tokens)] == stream.result.tokens
    assert engine.generate(PROMPTS[0], method=DraftModel(draft), max_new_tokens=NEW).tokens == plain.tokens


def test_a_step_that_breaks_is_taken_again() -> None:
    """The last token, which the draft model has read, is read again."""
    engine = home()
    recipe = DraftModel(draft_of("llama"), length=3).recipe(engine.info(NEW))
    run = make_run(None, PROMPTS, recipe, NEW, runner=engine.runner, watch=False)
    breaks_at_times(run)
    assert run.tokens == decode(None, PROMPTS, recipe, NEW, runner=engine.runner, watch=False).tokens


def test_stop_strings_inside_a_block() -> None:
    words = metaspace()
    engine = engine_for(tiny("llama", vocab_size=len(words)), words)
    draft = noisy(engine.model, 0.03)
    ids = prompt(5, 1, len(words))
    text = engine.generate(ids, max_new_tokens=NEW).text
    for stop in {text[at : at + size] for at in (2, 5, 9) for size in (1, 3)}:
        found = engine.generate(ids, method=DraftModel(draft), max_new_tokens=NEW, stop=[stop])
        assert found.text == text[: text.index(stop)] and found.finish_reason == "stop"


# Shapes.


def test_branching_keeps_all() -> None:
    shape = Branching((3, 1))
    assert (shape.length, shape.width(0), shape.width(1)) == (2, 3, 1)
    assert [len(children) for children in shape.keep([Leaf(1), Leaf(2)], [[-1.0], [-2.0, -3.0]], lambda *_: None)] == [
        1,
        2,
    ]


def test_siblings_are_distinct_and_drawn_with_their_law() -> None:
    trees: list[TokenTree] = []
    engine, draft = home(), draft_of("llama")

    class Kept(Rule):
        exact = True

        def walk(self, tree: TokenTree, target: Any) -> Any:
            trees.append(tree)
            return Rejection().walk(tree, target)

    method = DraftModel(draft, branching=(4, 3, 2), rule="rejection")
    request = Request.from_options({"max_new_tokens": NEW, "temperature": 1.0, "top_k": 3, "seed": 1, "method": method})
    seqs = engine.seqs(PROMPTS, request)
    for seq in seqs:
        seq.rule = Kept()
    list(Stream(engine, seqs, engine.cache_for(seqs, NEW)))
    assert any(not tree.is_chain for tree in trees)
    for tree in trees:
        if tree.draft_probs is None:
            continue
        for node in range(len(tree)):
            children = tree.children(node)
            assert len({tree.tokens[child] for child in children}) == len(children) <= 3
            for child in children:
                probs = tree.draft_probs[child]
                assert probs[tree.tokens[child]] > 0 and int((probs > 0).sum()) <= 3
