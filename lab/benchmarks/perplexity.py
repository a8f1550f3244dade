"""Whether a system computes what a model file says: perplexity on windows of a text, window by window.

A text's tokens are cut into windows that do not overlap; every token of a window except the first is judged, so windows
are independent. If the tokenizer begins texts with a special token, every window begins with it. A record on disk grows
with each window, so that a reading can be interrupted and resumed.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from tqdm import tqdm

from readers import Reader

_BLOCK = 128
"""Positions whose losses are computed at once: the softmax copies the logits."""


def windows(ids: Sequence[int], tokens: int, length: int, first: int | None) -> list[list[int]]:
    """Windows of `length` ids from the first `tokens` ids of a text.

    Args:
        ids: the text, without special tokens.
        tokens: most ids to read.
        length: length of a window, with its special token.
        first: the special token that begins every window, or None.

    Raises:
        ValueError: the text does not fill a window.
    """
    if length < 2:
        raise ValueError(f"window is {length}; it must be at least 2 tokens, of which the first is not judged")
    head = [] if first is None else [first]
    step = length - len(head)
    usable = min(tokens, len(ids))
    found = [[*head, *ids[start : start + step]] for start in range(0, usable - step + 1, step)]
    if not found:
        raise ValueError(f"the text has {usable} tokens, and a window takes {step}; give a longer text or fewer tokens")
    return found


def loss(logits: Tensor, ids: Sequence[int]) -> float:
    """Summed negative log-likelihood (nats) of ids 1.. under logits [len(ids), V] after each of them."""
    targets = torch.tensor(list(ids[1:]))
    pairs = zip(logits[:-1].split(_BLOCK), targets.split(_BLOCK), strict=True)
    return sum(float(cross_entropy(part.double(), wanted, reduction="sum")) for part, wanted in pairs)


def read(
    reader: Reader, pieces: Sequence[Sequence[int]], record: Path, about: Mapping[str, Any], until: float | None = None
) -> dict[str, Any]:
    """Judge windows that the record lacks.

    Args:
        reader: the system.
        pieces: all windows.
        record: JSON file that is read first and written after every window.
        about: facts of the reading; a record with other facts is started again.
        until: `time.perf_counter()` at which no further window is begun.
    """
    found = resume(record, about)
    for ids in tqdm(pieces[len(found["losses"]) :], desc="windows", disable=None):
        if until is not None and time.perf_counter() > until:
            break
        start = time.perf_counter()
        found["losses"].append(loss(reader.logits(ids), ids))
        found["judged"].append(len(ids) - 1)
        found["seconds"] += time.perf_counter() - start
        record.write_text(json.dumps(found), encoding="utf-8")
    return found


def resume(record: Path, about: Mapping[str, Any]) -> dict[str, Any]:
    """A record of the same reading; otherwise an empty one."""
    empty = {"about": dict(about), "losses": [], "judged": [], "seconds": 0.0}
    if not record.is_file():
        return empty
    found: dict[str, Any] = json.loads(record.read_text("utf-8"))
    return found if found["about"] == empty["about"] else empty


def against(found: Mapping[str, Any], reference: Mapping[str, Any]) -> dict[str, Any]:
    """Perplexity and the reference's, over the windows that both have read.

    Returns:
        windows, tokens, perplexity, reference_perplexity; ratio of the two with the ends of its 95 % interval, from the
        spread of the windows' differences (`ratio_low`, `ratio_high`; absent with fewer than two windows).
    """
    count = min(len(found["losses"]), len(reference["losses"]))
    if not count:
        return {"windows": 0, "tokens": 0}
    judged = found["judged"][:count]
    total = sum(judged)
    ours, theirs = (sum(one["losses"][:count]) / total for one in (found, reference))
    result: dict[str, Any] = {
        "windows": count, "tokens": total, "perplexity": math.exp(ours), "reference_perplexity": math.exp(theirs),
        "ratio": math.exp(ours - theirs),
    }
    pairs = zip(found["losses"], reference["losses"], judged, strict=False)
    differences = torch.tensor([(a - b) / size for a, b, size in pairs], dtype=torch.float64)
    if count > 1:
        margin = 1.96 * float(differences.std()) / math.sqrt(count)
        result |= {"ratio_low": math.exp(ours - theirs - margin), "ratio_high": math.exp(ours - theirs + margin)}
    return result


def logit_error(logits: Tensor, reference: Tensor) -> dict[str, float]:
    """Largest difference of logits [T, V], its root mean square, and the largest logit of the reference."""
    width = min(logits.shape[1], reference.shape[1])  # a vocabulary may be padded
    gap = (logits[:, :width].double() - reference[:, :width].double()).abs()
    largest = float(reference[:, :width].double().abs().max())
    return {"largest": float(gap.max()), "rms": float(gap.square().mean().sqrt()), "largest_logit": largest,
            "relative": float(gap.max()) / largest}
