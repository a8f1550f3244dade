"""AdaBlock-dLLM: a block ends where the model is sure that a step of its answer ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from typing_extensions import override

from shoal.decode.recipe import Recipe
from shoal.errors import Unsupported
from shoal.methods.common.limits import Most, Number, Share
from shoal_lab.loops.canvas import Confident, FixedBlocks, Guess, Reuse
from shoal_lab.methods._denoising import DenoisingMethod, check_range

if TYPE_CHECKING:
    from shoal.types import ModelInfo

_WINDOW = 4


@dataclass(frozen=True)
class AdaBlock(DenoisingMethod):
    """Tokens are decided as by `fast_dllm`, in blocks that end after a delimiter if the model is sure of one.

    It looks a quarter of the answer ahead for the most probable delimiter, which need not be the next one, and may be
    decided otherwise later. Without one, a block has the size `block`.

    Attributes:
        threshold: least probability of a decided token, in [0, 1].
        delimiter_threshold: least probability of a delimiter; above 1 blocks are those of `fast_dllm`.
        delimiters: ends of steps of an answer: texts of one token, or token ids.
        reuse: as for `fast_dllm`.
    """

    name: ClassVar[str] = "adablock"
    paper: ClassVar[str] = "arXiv 2509.26432"

    threshold: Share = 0.9
    delimiter_threshold: Number = 0.3
    delimiters: Annotated[tuple[str | int, ...], Most(1 << 31)] = ("\n",)
    reuse: Reuse = "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self.name, "threshold", self.threshold, 0, 1)
        if not self.delimiter_threshold >= 0:
            raise ValueError(f"delimiter_threshold is {self.delimiter_threshold}; it must be 0 or more, above 1 for "
                             "blocks of a fixed size")
        if not self.delimiters:
            raise ValueError("delimiters is empty; name one at least, such as a line break")

    def recipe(self, info: ModelInfo) -> Recipe:
        """Every layer, and a loop of its own."""
        ids = tuple(_id(one, info.tokenizer) for one in self.delimiters) if info.masked is not None else ()
        blocks = Delimited(self.block, float(self.delimiter_threshold), ids)
        return self.denoised(info, Confident(float(self.threshold)), blocks=blocks, reuse=self.reuse)


@dataclass(frozen=True)
class Delimited(FixedBlocks):
    """Blocks that end after a delimiter."""

    threshold: float = 0.3
    ids: tuple[int, ...] = ()

    @override
    def ahead(self, length: int, left: int) -> int:
        return max(super().ahead(length, left), self._window(length, left))

    @override
    def choose(self, guesses: Sequence[Guess], length: int, left: int) -> int:
        start = length - left
        found = [guess for guess in guesses if guess.place < start + self._window(length, left)
                 and guess.token in self.ids]
        best = max(found, key=lambda guess: guess.confidence, default=None)
        if best is None or best.confidence < self.threshold:
            return super().choose(guesses, length, left)
        return best.place + 1 - start

    def _window(self, length: int, left: int) -> int:
        return min(max(1, length // _WINDOW), left)


def _id(delimiter: str | int, tokenizer: Any) -> int:
    """The token of a delimiter; the last one if a tokenizer puts a mark before the text."""
    if isinstance(delimiter, int):
        return delimiter
    if tokenizer is None:
        raise Unsupported(f"the delimiter {delimiter!r}", "text is only known with a tokenizer",
                          "Give its token id, or load the model with its tokenizer")
    ids = tokenizer(delimiter, add_special_tokens=False)["input_ids"]
    if not ids or tokenizer.decode(ids[-1:]).strip(" ") != delimiter.strip(" "):
        raise Unsupported(f"the delimiter {delimiter!r}", "it is not one token of this model", "Give a token id")
    return int(ids[-1])
