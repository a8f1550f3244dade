"""Compares methods with lm-evaluation-harness, document by document. Needs the extra `eval`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.depth.budget import ideal_speedup
from shoal.errors import Unsupported
from shoal.methods import make
from shoal.methods.base import Method
from shoal_lab.eval.paired import accuracy_difference, holm, wilson

if TYPE_CHECKING:
    from shoal_lab.eval.lm_eval import ShoalLM

_METRICS = ("exact_match", "acc")
_FILTERS = ("strict-match", "get-answer", "none")


def compare(
    model: Any, methods: Mapping[str, Method | str], tasks: Sequence[str], data: Path | None = None,
    limit: int | None = None, *, task_options: Mapping[str, Any] | None = None, **options: Any,
) -> list[dict[str, Any]]:
    """Rows per task and method, each with the full model on the same documents.

    Args:
        model: folder, Hub id or a loaded transformers model.
        methods: methods by label; the full model is always compared.
        tasks: see `shoal_lab.eval.lm_eval.local_tasks`.
        data: folder of local data, or None.
        limit: most documents per task.
        task_options: options of `lm_eval.simple_evaluate`.
        **options: options of `ShoalLM`.

    Raises:
        Unsupported: lm-evaluation-harness is not installed.
    """
    lm = _model_class()(model, **options)
    found: dict[str, dict[str, Any]] = {}
    for label, method in {"full": "full", **methods}.items():
        lm.method = make(method)
        found[label] = _run(lm, tasks, data, limit, task_options or {})
    rows = [row for label, run in found.items() for row in _rows(label, found["full"], run)]
    compared = [row for row in rows if row["label"] != "full"]
    for row, p in zip(compared, holm([row["difference"]["p"] for row in compared]), strict=True):
        row["difference"]["p_holm"] = p
    return rows


def _model_class() -> Callable[..., ShoalLM]:
    try:
        from shoal_lab.eval.lm_eval import ShoalLM
    except ImportError as error:
        raise Unsupported("a task of lm-evaluation-harness", f"it is not installed ({error})",
                          "Install it with: pip install 'shoal-lab[eval]', or take a suite that `shoal eval --list` "
                          "names") from error
    return ShoalLM


def _run(
    model: ShoalLM, tasks: Sequence[str], data: Path | None, limit: int | None, options: Mapping[str, Any]
) -> dict[str, Any]:
    from shoal_lab.eval.lm_eval import evaluate

    found = evaluate(model, tasks, data, limit, **options)
    return {
        "right": {task: _right(samples) for task, samples in found["samples"].items()},
        "mean_layers": found["mean_layers"],
        "num_layers": found["num_layers"],
        "head_layers": model.engine.runner.head_layers,
        "method": model.method.to_dict(),
        "warning": found.get("warning"),
    }


def _right(samples: Sequence[Mapping[str, Any]]) -> dict[Any, bool]:
    """Whether each document was answered right, by the strictest filter of the task."""
    filters = [sample.get("filter", "none") for sample in samples]
    chosen = next((name for name in _FILTERS if name in filters), filters[0])
    kept = [sample for sample, name in zip(samples, filters, strict=True) if name == chosen]
    metric = next((name for name in _METRICS if name in kept[0]), None)
    if metric is None:
        raise Unsupported("a task without exact_match or acc", "nothing tells whether a document came out right",
                          "Take another task, or run it through lm_eval.simple_evaluate with a ShoalLM")
    return {sample["doc_id"]: bool(sample[metric]) for sample in kept}


def _rows(label: str, full: Mapping[str, Any], run: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row per task, and one over all tasks if there are several."""
    pairs = {
        task: ([full["right"][task][doc] for doc in sorted(right)], [right[doc] for doc in sorted(right)])
        for task, right in run["right"].items()
    }
    if len(pairs) > 1:
        both = zip(*pairs.values(), strict=True)
        base, other = ([right for part in parts for right in part] for parts in both)
        pairs["all"] = (base, other)
    return [_row(label, task, *pair, run) for task, pair in pairs.items()]


def _row(label: str, task: str, base: Sequence[bool], other: Sequence[bool], run: Mapping[str, Any]) -> dict[str, Any]:
    difference = accuracy_difference(base, other)
    return {
        "label": label,
        "task": task,
        "method": run["method"],
        "n": len(other),
        "accuracy": sum(other) / len(other),
        "accuracy_interval": list(wilson(sum(other), len(other))),
        "difference": {key: getattr(difference, key) for key in ("mean", "low", "high", "p")},
        "mean_layers": run["mean_layers"],
        "num_layers": run["num_layers"],
        "ideal_speedup": ideal_speedup(run["num_layers"], run["mean_layers"], run["head_layers"]),
        "warning": run["warning"],
    }
