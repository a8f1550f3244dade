"""Masked diffusion under a context-free grammar: a token is kept only if the masks around it can still be filled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from shoal.decode.recipe import Recipe
from shoal.errors import Unsupported
from shoal.methods.common.limits import Positions
from shoal_lab.loops.canvas import Remasking, Scheduled
from shoal_lab.loops.grammar import CanvasGrammar
from shoal_lab.methods._denoising import DenoisingMethod

if TYPE_CHECKING:
    from collections.abc import Callable

    from shoal.types import ModelInfo


@dataclass(frozen=True)
class DiffusionGrammar(DenoisingMethod):
    """Decodes like `diffusion`; a token that leaves no text of a grammar possible is replaced by the best that does.

    The answer is a text of the grammar, followed by ends of sequence; its length is fixed, so no text is begun that
    does not fit. A text in the grammar stands for its own tokens by the tokenizer. Pure Python, for grammars of a few
    dozen rules, and answers of up to 256 tokens. The paper takes grammars over characters, and gaps of any length.

    Attributes:
        rules: rules of the grammar, one per line, such as `list ::= name | name "," list`; the first one describes
            whole answers, `""` is the empty text. Empty for no grammar.
        steps: as for `diffusion`.
        remasking: as for `diffusion`.
    """

    name: ClassVar[str] = "diffusion_grammar"
    paper: ClassVar[str] = "arXiv 2508.10111"

    rules: str = ""
    steps: Positions | None = None
    remasking: Remasking = "confidence"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"steps is {self.steps}; it must be at least 1, or None for one a word")
        if self.rules:
            CanvasGrammar.read(self.rules, lambda text: [0])

    def recipe(self, info: ModelInfo) -> Recipe:
        """Every layer, and a loop of its own."""
        bound = CanvasGrammar.read(self.rules, _encoder(info.tokenizer)) if self.rules else None
        return self.denoised(info, Scheduled(self.steps), remasking=self.remasking, grammar=bound)


def _encoder(tokenizer: Any) -> Callable[[str], list[int]]:
    if tokenizer is None:
        raise Unsupported("a grammar", "text is only known with a tokenizer", "Load the model with its tokenizer")

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        if not ids or tokenizer.unk_token_id in ids:
            raise Unsupported(f"the text {text!r} of a grammar", "the model has no tokens for it", "Use its own words")
        return ids

    return encode
