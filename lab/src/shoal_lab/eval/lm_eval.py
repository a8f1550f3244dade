"""A model for lm-evaluation-harness that decodes with a method of Shoal, and tasks that read local files.

Depth applies to generated tokens, and to the tokens of a log-likelihood's continuation: the context is the prompt, and
continuation token j is decided at step j. Pass a `ShoalLM` to `lm_eval.simple_evaluate`, or use `evaluate` here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from lm_eval import simple_evaluate
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from torch import Tensor
from torch.nn.functional import log_softmax
from tqdm import tqdm

from shoal.engine.engine import Engine
from shoal.engine.loading.load import engine_for
from shoal.errors import Unsupported, unknown
from shoal.methods import make
from shoal.model.runner import SequenceChunk
from shoal_lab.eval.decoders import check_scored

_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_BBH_END = r"(?<=answer is )(.*?)(?=\.?\s*$)"


@register_model("shoal")
class ShoalLM(HFLM):  # type: ignore[misc]
    """The harness's transformers model, decoded by Shoal.

    Args:
        pretrained: as for `HFLM`: folder, Hub id or a loaded model.
        method: the method: its name, its dict, or a card.
        engine_backend: executor of the layers: "hf" for the model's own modules, "packed" or "auto" for a packed copy.
        **method: the options of `HFLM`.

    Attributes:
        engine: the engine over the harness's model.
        layer_tokens, tokens: layers summed over generated or scored tokens, and the number of these tokens.
    """

    def __init__(self, pretrained: Any, method: Any = "full", engine_backend: Any = "hf", **options: Any) -> None:
        super().__init__(pretrained=pretrained, backend="causal", **options)
        self.method = make(method)
        self.engine: Engine = engine_for(self.model, self.tokenizer, backend=engine_backend)
        self.layer_tokens, self.tokens = 0.0, 0

    @property
    def mean_layers(self) -> float:
        """Realised layers per token so far."""
        return self.layer_tokens / self.tokens if self.tokens else float(self.engine.runner.num_layers)

    def _model_generate(
        self, context: Tensor, max_length: int, stop: list[str], attention_mask: Tensor | None = None, **options: Any
    ) -> Tensor:
        """Ids [B, T], context included, padded on the right."""
        real = torch.ones_like(context) if attention_mask is None else attention_mask
        prompts = [row[mask.bool()].tolist() for row, mask in zip(context, real, strict=True)]
        results = self.engine.generate(
            prompts,
            method=self.method,
            max_new_tokens=max_length - context.shape[1],
            stop=[text for text in stop if text],
            **_sampling(options),
        )
        for result in results:
            self.layer_tokens += result.stats.layer_tokens
            self.tokens += len(result.tokens)
        pad = self.tokenizer.pad_token_id
        widest = max(len(result.tokens) for result in results)
        answers = [[*result.tokens, *[pad] * (widest - len(result.tokens))] for result in results]
        return torch.cat([context, torch.tensor(answers, device=context.device)], dim=1)

    def _loglikelihood_tokens(
        self, requests: Sequence[Any], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation, and whether it is the greedy one."""
        order = sorted(range(len(requests)), key=lambda i: -len(requests[i][1]) - len(requests[i][2]))
        size = override_bs or (self.batch_size if isinstance(self.batch_size, int) else 1)
        found: dict[int, tuple[float, bool]] = {}
        with tqdm(total=len(order), disable=disable_tqdm, desc="loglikelihood") as bar:
            for start in range(0, len(order), size):
                part = order[start : start + size]
                found.update(zip(part, self._scored([requests[i][1:] for i in part]), strict=True))
                for index in part:
                    if requests[index][0] is not None:
                        self.cache_hook.add_partial("loglikelihood", requests[index][0], found[index])
                bar.update(len(part))
        return [found[index] for index in range(len(requests))]

    def _scored(self, pairs: Sequence[Any]) -> list[tuple[float, bool]]:
        """Score (context, continuation) pairs in one forward.

        Raises:
            Unsupported: the method's plan alone does not determine how probable a continuation is.
        """
        runner, chunks, targets = self.engine.runner, [], []
        for row, (context, continuation) in enumerate(pairs):
            room = max(1, self.max_length + 1 - len(continuation))
            prompt, target = list(context)[-room:], list(continuation)
            recipe = self.engine.recipe(self.method, max(len(target), self.max_gen_toks))
            check_scored(recipe, self.method.name)
            plan = recipe.plan
            steps = [0] * len(prompt) + list(range(1, len(target)))
            chunks.append(SequenceChunk(row, prompt + target[:-1], steps, plan, wanted=len(target)))
            targets.append(torch.tensor(target, device=runner.device))
            self.layer_tokens += plan.layer_tokens(len(target))
            self.tokens += len(target)
        with self.engine.turn(), torch.no_grad():
            logits = runner.forward(chunks, runner.new_cache(len(chunks)))
        scored = []
        for values, target_ids in zip(logits.split([len(t) for t in targets]), targets, strict=True):
            log_probs = log_softmax(values.float(), -1)
            chosen = log_probs.gather(1, target_ids[:, None]).sum()
            scored.append((float(chosen), bool((values.argmax(-1) == target_ids).all())))
        return scored


def _sampling(options: Mapping[str, Any]) -> dict[str, Any]:
    """The engine's sampling options from those of `generate`; others are refused."""
    known = {*_SAMPLING, "do_sample", "use_cache", "pad_token_id"}
    wrong = next((name for name in options if name not in known), None)
    if wrong is not None:
        raise Unsupported(f"the generation option {wrong}={options[wrong]!r}", "Shoal's harness model has none such",
                          f"Leave it out; there are {', '.join(sorted(known))}")
    if not options.get("do_sample"):
        return {}
    return {"temperature": 1.0, **{name: options[name] for name in _SAMPLING if name in options}}


def local_tasks(names: Sequence[str], data: Path | None) -> list[Any]:
    """Arguments `tasks` of `lm_eval.simple_evaluate`: own definitions that read `data`, the harness's names otherwise.

    With a data folder, "gsm8k" reads gsm8k/*.jsonl, "bbh" all of bbh/bbh/*.json with the prompts of bbh/cot-prompts,
    and "bbh_<task>" one of them. All other names are the harness's own, and without a folder all names are; these read
    the Hub.

    Raises:
        ValueError: the folder lacks the data, or the task is unknown.
    """
    tasks: list[Any] = []
    for name in names:
        if data is not None and (name == "gsm8k" or name == "bbh" or name.startswith("bbh_")):
            tasks += _gsm8k(data) if name == "gsm8k" else _bbh(data, name.removeprefix("bbh").removeprefix("_"))
            continue
        known = _harness().all_tasks
        if name not in known:
            raise unknown("task", name, ["gsm8k", "bbh", *(other for other in known if other[:3] == name[:3])])
        tasks.append(name)
    return tasks


@cache
def _harness(own_tasks: bool = True) -> TaskManager:
    """The harness's task finder. It reads thousands of files for its own tasks, so only on request, and once."""
    return TaskManager(include_defaults=own_tasks)


def _gsm8k(data: Path) -> list[dict[str, Any]]:
    files = {part: str(_existing(data / "gsm8k" / f"{part}.jsonl")) for part in ("train", "test")}
    return [
        {
            "task": "gsm8k_local",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": files},
            "output_type": "generate_until",
            "fewshot_split": "train",
            "test_split": "test",
            "fewshot_config": {"sampler": "first_n"},
            "num_fewshot": 5,
            "doc_to_text": "Question: {{question}}\nAnswer:",
            "doc_to_target": "{{answer}}",
            "generation_kwargs": {"until": ["Question:", "</s>"], "do_sample": False},
            "filter_list": [
                {"name": "strict-match", "filter": [
                    {"function": "regex", "regex_pattern": r"#### (\-?[0-9\.\,]+)"}, {"function": "take_first"}]}
            ],
            "metric_list": [
                {"metric": "exact_match", "aggregation": "mean", "higher_is_better": True, "ignore_case": True,
                 "regexes_to_ignore": [",", r"\$", r"(?s).*#### ", r"\.$"]}
            ],
        }
    ]


def _bbh(data: Path, only: str) -> list[dict[str, Any]]:
    folder = _existing(data / "bbh" / "bbh")
    known = sorted(path.stem for path in folder.glob("*.json"))
    if only and only not in known:
        raise unknown("task", f"bbh_{only}", [f"bbh_{name}" for name in known])
    return [_bbh_task(data, name) for name in ([only] if only else known)]


def _bbh_task(data: Path, name: str) -> dict[str, Any]:
    """Three worked examples, then the question; the answer follows "the answer is"."""
    prompt = _existing(data / "bbh" / "cot-prompts" / f"{name}.txt").read_text("utf-8").partition("-----\n")[2].strip()
    return {
        "task": f"bbh_{name}_local",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data / "bbh" / "bbh" / f"{name}.json")}, "field": "examples"},
        "output_type": "generate_until",
        "test_split": "test",
        "num_fewshot": 0,
        "doc_to_text": prompt.replace("{", "{{ '{' }}") + "\n\nQ: {{input}}\nA: Let's think step by step.\n",
        "doc_to_target": "{{target}}",
        "generation_kwargs": {"until": ["</s>", "Q:", "\n\n"], "do_sample": False, "max_gen_toks": 512},
        "filter_list": [
            {"name": "get-answer", "filter": [
                {"function": "regex", "regex_pattern": _BBH_END}, {"function": "take_first"}]}
        ],
        "metric_list": [
            {"metric": "exact_match", "aggregation": "mean", "higher_is_better": True, "ignore_case": True,
             "ignore_punctuation": False}
        ],
    }


def _existing(path: Path) -> Path:
    if not path.exists():
        raise ValueError(f"there is no {str(path)!r}; name the folder that holds gsm8k/ and bbh/ as the data folder")
    return path


def evaluate(
    model: ShoalLM, tasks: Sequence[str], data: Path | None = None, limit: int | None = None, **options: Any
) -> dict[str, Any]:
    """Run tasks of the harness, and add what the method ran.

    Args:
        model: the model with its method.
        tasks: as for `local_tasks`.
        data: folder of local data, or None.
        limit: most documents per task; None for all.
        **options: options of `lm_eval.simple_evaluate`.

    Returns:
        The harness's results, with `mean_layers` and `num_layers`, and a `warning` if the tasks hardly exercise the
        method.
    """
    model.layer_tokens, model.tokens = 0.0, 0
    chosen = local_tasks(tasks, data)
    if "metadata" not in options:  # the harness passes these to a task finder of its own
        options.setdefault("task_manager", _harness(own_tasks=any(isinstance(task, str) for task in chosen)))
    found: dict[str, Any] = simple_evaluate(model=model, tasks=chosen, limit=limit, **options)
    layers = model.engine.runner.num_layers
    found["mean_layers"], found["num_layers"] = model.mean_layers, layers
    plan = model.engine.recipe(model.method, model.max_gen_toks).plan
    if not plan.is_full and model.mean_layers > layers - (layers - plan.mean_depth(model.max_gen_toks)) / 4:
        found["warning"] = (
            f"these tasks hardly exercise {model.method.name}: {model.mean_layers:.2f} of {layers} layers ran, since "
            f"their answers are short; take tasks with longer answers, or lay the schedule out over fewer tokens"
        )
    return found
