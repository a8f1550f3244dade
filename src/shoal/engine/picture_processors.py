"""Processors of pictures whose tokens Shoal writes, where transformers' own processor needs more than there is.

Transformers prepares the pictures. Processors of Qwen and Gemma 4 need torchvision, for films; a GGUF file brings none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from shoal.errors import Unsupported, told_by_transformers
from shoal.model.gguf.projectors import PreprocessorConfig

Layout = Callable[[Mapping[str, Any], Any], list[str]]
"""Of the inputs that an image processor made of pictures, and itself: what stands in the text for each."""


class Written:
    """Prepares pictures, and writes their tokens into a text.

    Args:
        image_processor: of transformers.
        image_token: stands for a picture in a text.
        layout: what its tokens are.
    """

    def __init__(self, image_processor: Any, tokenizer: Any, image_token: str, layout: Layout) -> None:
        self.image_processor, self.image_token = image_processor, image_token
        self._tokenizer, self._layout = tokenizer, layout

    def __call__(self, text: Sequence[str], images: Sequence[Sequence[Any]], **how: Any) -> Mapping[str, Any]:
        """As transformers' processors are called with one text and its pictures; gives its token ids."""
        inputs = self.image_processor(images=[[*images[0]]], return_tensors="pt", **self._more)
        written, (first, *pieces) = self._layout(inputs, self.image_processor), text[0].split(self.image_token)
        if len(pieces) != len(written):
            raise ValueError(f"the text has {len(pieces)} tokens {self.image_token} for {len(written)} pictures")
        told = first + "".join(part + piece for part, piece in zip(written, pieces, strict=True))
        found: Mapping[str, Any] = self._tokenizer([told], **how)
        return found

    @property
    def _more(self) -> dict[str, bool]:
        """What an image processor that cuts pictures into tiles must be told, so that it says how many there are."""
        return {"return_row_col_info": True} if hasattr(self.image_processor, "do_image_splitting") else {}


def patches(inputs: Mapping[str, Any], processor: Any, token: str) -> list[str]:
    """One token for each square of patches."""
    counts = inputs["image_grid_thw"].prod(1) // processor.merge_size**2
    return [token * count for count in counts.tolist()]


def counted(inputs: Mapping[str, Any], processor: Any, token: str, around: tuple[str, str]) -> list[str]:
    """As many tokens for each picture as its processor says, as Gemma 4 has them."""
    before, behind = around
    return [before + token * int(count) + behind for count in inputs["num_soft_tokens_per_image"]]


def _same(inputs: Mapping[str, Any], processor: Any, prepared: PreprocessorConfig) -> list[str]:
    """As many tokens for each picture."""
    before, behind = prepared.around
    return [before + prepared.token * prepared.count + behind] * len(inputs["pixel_values"])


def _tiled(inputs: Mapping[str, Any], processor: Any, prepared: PreprocessorConfig) -> list[str]:
    """Tokens of tiles, row by row, and then of the whole picture, as Idefics 3 has them."""
    edge, whole = prepared.around
    states = prepared.token * prepared.count
    end, found = f"{edge}{whole}{states}{edge}", list[str]()
    for rows, columns in zip(inputs["rows"][0], inputs["cols"][0], strict=True):
        lines = ("".join(f"{edge}<row_{row}_col_{column}>{states}" for column in range(1, columns + 1)) + "\n"
                 for row in range(1, rows + 1))
        found.append("".join(lines) + ("\n" if rows else "") + end)
    return found


def _cropped(inputs: Mapping[str, Any], processor: Any, prepared: PreprocessorConfig) -> list[str]:
    """As many tokens for each crop of a picture, which stand side by side, as InternVL has them."""
    before, behind = prepared.around
    return [before + prepared.token * prepared.count * int(crops) + behind for crops in inputs["num_patches"]]


def _by_rows(inputs: Mapping[str, Any], processor: Any, prepared: PreprocessorConfig) -> list[str]:
    """Rows of tokens with a token between them, and another behind, as Pixtral has them."""
    between, behind = prepared.around
    return [between.join([prepared.token * (int(width) // prepared.count)] * (int(height) // prepared.count)) + behind
            for height, width in inputs["image_sizes"]]


_LAYOUTS = {"same": _same, "tiles": _tiled, "crops": _cropped, "rows": _by_rows}


def by_pillow(name: str) -> Any:
    """Transformers' image processor that needs no torchvision; Unsupported where it has none of that name."""
    import transformers

    found = getattr(transformers, f"{name}Pil", None) or getattr(transformers, name, None)  # as in transformers 5.0
    if found is None:
        raise Unsupported("pictures for this model", f"transformers has no {name}", "Update it")
    return found


def processor_of(prepared: PreprocessorConfig, tokenizer: Any) -> Written:
    """What prepares pictures as a GGUF file says; Unsupported where transformers lacks it."""
    kind = by_pillow(prepared.image_processor)
    layout: Layout = (partial(patches, token=prepared.token) if prepared.layout == "patches"
                      else partial(_LAYOUTS[prepared.layout], prepared=prepared))
    with told_by_transformers("what the mmproj file says of pictures"):
        return Written(kind(**prepared.options), tokenizer, prepared.mark, layout)
