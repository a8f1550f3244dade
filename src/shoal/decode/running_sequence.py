"""A sequence with its recipe, as the engine makes it and a batch runs it."""

from __future__ import annotations

from dataclasses import dataclass, field

from shoal.decode import sampling
from shoal.decode.recipe import Recipe
from shoal.decode.sequence import SequenceState
from shoal.types import Step


@dataclass(slots=True, eq=False)
class RunningSequence(SequenceState):
    """A sequence of a batch, whose rule is that of its recipe. The plan is the recipe's until a planner replaces it.

    Attributes:
        recipe: the components from which it decodes; no component is shown the others.
        takes_argmax: whether only the argmax token after each node is needed.
        plain: whether besides a step is one token, of which nobody is told.
        quiet: whether besides nobody is told but a proposer.
    """

    recipe: Recipe = field(kw_only=True)
    takes_argmax: bool = field(init=False)
    plain: bool = field(init=False)
    quiet: bool = field(init=False)

    def __post_init__(self) -> None:
        self.drafts = self.recipe.proposer is not None
        if self.recipe.rule is not None:
            self.rule = self.recipe.rule
        if self.allowed is None and self.recipe.constraint is not None:
            self.allowed = self.recipe.constraint()
        how, recipe = self.sampling, self.recipe
        others = (how.logprobs, self.record, self.allowed, self.root, recipe.rule, recipe.search, recipe.loop)
        plain = how.greedy and not how.logit_bias and not sampling.needs_history(how, self.processors)
        self.takes_argmax = plain and all(other is None for other in others)
        self.plain = self.takes_argmax and not recipe.has_workers
        told = (recipe.pace, recipe.keep, recipe.select, recipe.experts, recipe.meter)
        self.quiet = self.takes_argmax and recipe.settled and all(other is None for other in told)

    def force(self) -> list[Step]:
        """Emit tokens without a forward as long as the constraint allows only one.

        It does nothing if a forward may not hold several tokens of the text, or if the logits of each are wanted.
        """
        if self.allowed is None or self.recipe.keep is not None or self.record is not None:
            return []
        steps: list[Step] = []
        while self.room and (token := self.allowed.sole(self.tokens[self.prompt_length :])) is not None:
            steps += self.emit([token], 0, self.certain)
        self.forced = len(steps)
        return steps

    @property
    def branches(self) -> int:
        """The most sequences of a batch that decode for this one."""
        return self.recipe.branches(self.sampling.greedy)

    def check(self) -> None:
        """Let the recipe's loop and `keep` refuse what they cannot honour."""
        for component in (self.recipe.loop, self.recipe.keep):
            if component is not None:
                component.check(self)
