"""Bodies of `/v1/embeddings` and `/v1/rerank`, and of Ollama's routes for vectors; what a reranker reads."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from shoal.engine.embeddings import Pooling
from shoal.serve.errors import refused
from shoal.serve.protocol.fields import Ignored, Refused, Unread

_MOST = 2048
"""Most texts of a request, as OpenAI's."""
_AS_IT_IS = Refused("put what is asked before the text, as the model's card says")
_WHOLE = Refused("a text is read as it is; shorten it", (-1, False))


class EmbeddingBody(BaseModel):
    """`/v1/embeddings`."""

    model_config = ConfigDict(strict=True, extra="forbid")

    model: str = ""
    input: str | list[str] | list[int] | list[list[int]]
    dimensions: int | None = Field(default=None, ge=1)
    encoding_format: Literal["float", "base64"] = "float"
    user: str | None = None
    pooling: Pooling | None = None
    normalize: bool = True


class EmbedBody(BaseModel):
    """`/api/embed`, and `/api/embeddings`, where the text is the `prompt`."""

    model_config = ConfigDict(strict=True, extra="forbid")

    model: str = ""
    input: str | list[str] | None = None
    prompt: str | None = None
    truncate: bool = True
    dimensions: int | None = Field(default=None, ge=1)


class RerankBody(BaseModel):
    """`/v1/rerank`."""

    model_config = ConfigDict(strict=True, extra="forbid")

    model: str = ""
    query: str
    documents: list[str | dict[str, Any]] = Field(min_length=1, max_length=_MOST)
    top_n: int | None = Field(default=None, ge=1)
    return_documents: bool = True
    instruction: str | None = None
    user: str | None = None


EMBEDDINGS: dict[str, Unread] = {
    **dict.fromkeys(("input_type", "task", "prompt_name", "instruction"), _AS_IT_IS),
    **dict.fromkeys(("truncate_prompt_tokens", "truncate", "max_tokens_per_doc", "max_chunks_per_doc"), _WHOLE),
    "add_special_tokens": Refused("a text is read as the tokenizer reads it; give token ids for another way", (True,)),
    "embedding_types": Refused("use `encoding_format`", (["float"],)),
    **dict.fromkeys(("keep_alive", "priority", "options"), Ignored("the operator says how the model is run")),
}
"""Fields of other servers that these routes do not read."""
_ASKED = "Given a web search query, retrieve relevant passages that answer the query"
_JUDGE = ("<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
          'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n')
_ANSWER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


def inputs_of(given: str | Sequence[Any]) -> list[str | list[int]]:
    """The texts of a request, or their token ids; ApiError 400 for none, too many, and empty ones."""
    alone = isinstance(given, str) or (len(given) > 0 and isinstance(given[0], int))
    texts: list[Any] = [given] if alone else list(given)
    if not 0 < len(texts) <= _MOST:
        raise refused("input", f"input holds {len(texts)} texts; it must hold 1 to {_MOST}")
    empty = next((place for place, text in enumerate(texts) if not len(text)), None)
    if empty is not None:
        raise refused("input", f"input.{empty} is empty; a text must have at least one token")
    return texts


def text_of(document: str | Mapping[str, Any], place: int) -> str:
    """A document's text, which may be an entry `text`; ApiError 400 for anything else."""
    text = document if isinstance(document, str) else document.get("text")
    if not isinstance(text, str):
        raise refused("documents", f"documents.{place} must be text, or an object with a text")
    return text


def question(query: str, document: str, instruction: str | None) -> str:
    """What Qwen3-Reranker is asked, by its card (huggingface.co/Qwen/Qwen3-Reranker-0.6B); it says yes or no."""
    return (f"{_JUDGE}<Instruct>: {instruction or _ASKED}\n<Query>: {query}\n<Document>: {document}{_ANSWER}")


def written(vector: Any, encoding: str) -> list[float] | str:
    """A vector as numbers, or as little-endian float32 in base64."""
    if encoding == "base64":
        return base64.b64encode(vector.numpy().astype("<f4").tobytes()).decode()
    return [float(value) for value in vector]
