"""How likely a guess is kept, learned from what became of earlier ones."""

from __future__ import annotations


class Acceptance:
    """Estimate of the chance that one more guess is kept, given that those before it were.

    Counts attempts up to and including the first rejection: guesses behind it were never judged, and counting them
    would bias the estimate low (SmartSpec, arXiv 2406.14066). Older attempts fade.

    Args:
        fade: weight that an attempt keeps with every later one, in (0, 1].
        prior: chance to begin with; it weighs as much as two attempts.
    """

    def __init__(self, fade: float = 0.95, prior: float = 0.5) -> None:
        self._fade, self._kept, self._tried = fade, 2 * prior, 2.0

    def observe(self, kept: int, offered: int) -> None:
        """`kept` guesses in a row were accepted out of `offered` one after another."""
        for attempt in range(min(kept + 1, offered)):
            self._kept = self._fade * self._kept + (attempt < kept)
            self._tried = self._fade * self._tried + 1

    @property
    def rate(self) -> float:
        """The estimate, in (0, 1)."""
        return self._kept / self._tried


def expected_tokens(rate: float, guesses: int) -> float:
    """Tokens that a block of so many guesses brings on average, the target's own included: 1 + a + ... + a^k."""
    return float(guesses + 1) if rate == 1 else (1 - rate ** (guesses + 1)) / (1 - rate)
