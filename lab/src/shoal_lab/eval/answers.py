"""The final answer of a worked solution: the text after `####`."""

from __future__ import annotations

MARK = "####"


def final_answer(text: str) -> str | None:
    """The text after the first `####`, without spaces, thousands separators and a closing full stop; None without one.

    The first one counts, because a model that goes on after its answer has answered already. A number ends with its
    line.
    """
    _, mark, rest = text.partition(MARK)
    if not mark:
        return None
    line = rest.strip().split("\n")[0]
    return line.replace(",", "").replace("$", "").strip().rstrip(".").strip() or None


def is_right(text: str, reference: str) -> bool:
    """Whether the final answer of `text` is `reference`, compared as text after the same cleaning."""
    found = final_answer(text)
    return found is not None and found == final_answer(f"{MARK} {reference}")
