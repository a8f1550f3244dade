"""A bound on what guesses may lose, whatever the text: an account of plain steps."""

from __future__ import annotations

SHARE = 0.03
"""Plain steps that guesses may lose for every token."""
START = 2.0
"""Plain steps that they may lose before the first one."""


class DraftBudget:
    """Plain steps that guesses for one sequence may still lose.

    Guesses that save time fill it, guesses that lose time empty it. Where only guesses are made that it could pay for
    if none were kept, n tokens take at most (1 + SHARE) n + START plain steps, however the text goes on. That holds as
    far as the time of a step is known before the step.

    Attributes:
        left: plain steps.
        gained: plain steps that guesses saved beyond what they and the asking for them took; negative for a loss.
    """

    def __init__(self) -> None:
        self.left, self.gained = START, 0.0

    def passed(self, tokens: int, steps: float) -> None:
        """Count tokens, and the plain steps that their forwards and guesses took."""
        self.left += (1 + SHARE) * tokens - steps
        self.gained += tokens - steps
