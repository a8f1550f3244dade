"""The base of methods that ask a verifier which answer is best. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from typing_extensions import override

from shoal.decode.branches.examples import Execution
from shoal.decode.branches.verifier import Endpoint, Verifier, is_url, likelihood
from shoal.errors import Unsupported
from shoal.methods.base import Method
from shoal.methods.common.limits import Seconds


@dataclass(frozen=True)
class VerifiedMethod(Method):
    """A method that compares answers by what a verifier says of them.

    Attributes:
        verifier: "likelihood" takes the geometric mean of the tokens' probabilities. "execution" runs a finished
            program on the examples that the prompt gives, and judges all else by likelihood. An http or https URL is
            sent an attempt as JSON and answers {"score": r}. A callable is given a
            `shoal.decode.branches.verifier.Attempt` and returns a number in [0, 1].
        patience: seconds to wait for a verdict, more than 0. With "execution" they are for all examples of a program
            together; those that have not ended by then have failed.
    """

    reads: ClassVar[tuple[str, ...]] = ("verifier",)

    verifier: str | object = field(default="likelihood", kw_only=True)
    patience: Seconds = field(default=30.0, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.patience > 0:
            raise ValueError(f"patience is {self.patience}; it must be more than 0 seconds")
        self.judge()

    @override
    def to_dict(self) -> dict[str, Any]:
        if not isinstance(self.verifier, str):
            raise Unsupported(f"{self.name} with a verifier of one's own as JSON", "a callable cannot be written down",
                              "Name a verifier, or call the method from Python")
        return super().to_dict()

    def judge(self) -> Verifier:
        """The verifier that says which answer is best; ValueError if the option means none."""
        spec = self.verifier
        if callable(spec):
            return spec
        if spec == "likelihood":
            return likelihood
        if spec == "execution":
            return Execution(self.patience)
        if not is_url(spec):
            raise ValueError(f"verifier is {spec!r}; it must be 'likelihood', 'execution', an http or https URL, or a "
                             "callable")
        return Endpoint(str(spec), self.patience)
