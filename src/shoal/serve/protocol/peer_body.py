"""What bodies hold beyond OpenAI's fields and Shoal's own: the honoured fields of other servers, and their meaning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from shoal.serve.http.errors import refused

_LENGTHS = ("max_tokens", "max_completion_tokens", "n_predict", "num_predict", "max_new_tokens")
_NO_LIMIT = (-1, -2)
"""As llama.cpp and Ollama write it: without end, and until the context is full, which is the same here."""


class PeerFields(BaseModel):
    """Fields that other servers know; `shoal.serve.protocol.peers` says which."""

    model_config = ConfigDict(strict=True, extra="forbid")

    n: int = Field(default=1, ge=1, le=128)
    structured_outputs: dict[str, Any] | None = None
    json_schema: dict[str, Any] | str | bool | None = None
    grammar: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    format: dict[str, Any] | str | None = None
    typical_p: float = Field(default=1.0, gt=0, le=1)
    repeat_penalty: float | None = Field(default=None, gt=0, le=100)
    repeat_last_n: int | None = Field(default=None, ge=-1, le=1 << 30)
    min_tokens: int = Field(default=0, ge=0, le=1 << 30)
    bad_words: list[str] = Field(default_factory=list, max_length=1024)
    allowed_token_ids: list[int] | None = Field(default=None, min_length=1, max_length=1 << 20)
    include_stop_str_in_output: bool = False
    no_stop_trim: bool = False
    n_predict: int | None = Field(default=None, ge=-2)
    num_predict: int | None = Field(default=None, ge=-2)
    max_new_tokens: int | None = Field(default=None, ge=-2)
    n_cmpl: int | None = Field(default=None, ge=1, le=128)
    return_tokens_as_token_ids: bool = False

    def limit(self, default: int, most: int) -> int:
        """Most tokens of the answer: a larger number than the server's is no demand for so many.

        Args:
            default: where the request says nothing.
            most: the server's.
        """
        given: list[int] = [value for name in _LENGTHS if (value := getattr(self, name, None)) is not None]
        bounds = [value for value in given if value not in _NO_LIMIT]
        return min([*bounds, most] if given else [default, most])

    @property
    def zero_limit(self) -> str | None:
        """The name of the field that asks for no token at all, if one does."""
        return next((name for name in _LENGTHS if getattr(self, name, None) == 0), None)

    def peers_sampling(self) -> dict[str, Any]:
        """Fields of `Sampling` that are asked for by these names."""
        asked: dict[str, Any] = {"typical_p": self.typical_p} if "typical_p" in self.model_fields_set else {}
        if self.repeat_penalty is not None:
            asked["repetition_penalty"] = self.repeat_penalty
        if self.repeat_last_n is not None:
            asked["repetition_window"] = max(0, self.repeat_last_n)
        return {**asked, "repetition_penalty": 1.0} if self.repeat_last_n == 0 else asked

    def forbids(self) -> dict[str, Any]:
        """Options of the engine that say what must not come, and what stays of a stop string."""
        return {
            "min_new_tokens": self.min_tokens,
            "bad_words": self.bad_words,
            "allowed_token_ids": self.allowed_token_ids,
            "keep_stop": self.include_stop_str_in_output or self.no_stop_trim,
        }

    def check_twins(self) -> None:
        """ApiError 400 where two names of one thing have different values."""
        for name, other in (("repetition_penalty", "repeat_penalty"), ("n", "n_cmpl")):
            one, two = getattr(self, name), getattr(self, other)
            if two is not None and name in self.model_fields_set and one != two:
                raise refused(other, f"{name} is {one} and {other} {two}, which are two names of one thing; give one")
        self.n = self.n_cmpl or self.n


def flattened(given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a request, those in Ollama's `options` among them.

    Raises:
        ApiError: 400 where `options` is no object, or says something else than the request.
    """
    inner = given.get("options")
    outer = {name: value for name, value in given.items() if name != "options"}
    if inner is None:
        return outer
    if not isinstance(inner, Mapping) or "options" in inner:
        raise refused("options", "options must be an object, whose entries count as fields of the request")
    twice = sorted(name for name in inner if outer.get(name) not in (None, inner[name]))
    if twice:
        raise refused("options", f"options.{twice[0]} says something else than {twice[0]}; give one")
    return {**outer, **inner}
