"""Responses that the server holds in memory, so that a request may go on from an earlier one.

What is stored and how it is listed follows OpenAI's `/v1/responses`.
"""

from __future__ import annotations

import json
import uuid
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from shoal.serve.errors import ApiError, refused

Json = dict[str, Any]
_MOST_LISTED = 100


class StoredResponses:
    """Responses with what was said before them, the ones used last. Each is for the key that asked for it alone.

    Args:
        most: bytes of all of them as JSON; 0 to store none.
    """

    def __init__(self, most: int = 32 << 20) -> None:
        if most < 0:
            raise ValueError(f"max_responses is {most}; it must be at least 0 bytes")
        self.most, self._bytes = most, 0
        self._found: OrderedDict[tuple[str, str], bytes] = OrderedDict()

    def store(self, owner: str, response: Json, said: Sequence[Json]) -> None:
        """Hold a response, and the items of its conversation before it; older ones make way."""
        items = [item if item.get("id") else {**item, "id": f"msg_{uuid.uuid4().hex}"} for item in said]
        raw = json.dumps({"response": response, "items": items}, ensure_ascii=False).encode("utf-8", "surrogatepass")
        self._found[owner, response["id"]] = raw
        self._bytes += len(raw)
        while self._bytes > self.most:
            self._bytes -= len(self._found.popitem(last=False)[1])

    def get(self, owner: str, name: str) -> tuple[Json, list[Json]]:
        """A response, and the items before it; ApiError 404 where there is none."""
        self._check(owner, name)
        self._found.move_to_end((owner, name))
        found = json.loads(self._found[owner, name].decode("utf-8", "surrogatepass"))
        return found["response"], found["items"]

    def delete(self, owner: str, name: str) -> None:
        """Forget a response; ApiError 404 where there is none."""
        self._check(owner, name)
        self._bytes -= len(self._found.pop((owner, name)))

    def _check(self, owner: str, name: str) -> None:
        if (owner, name) not in self._found:
            raise ApiError(404, f"no response {name[:100]!r} is stored: it was deleted, made way for later ones, or "
                           "the server was started since; send the whole conversation", code="response_not_found")

    def before(self, owner: str, name: Any) -> list[Json]:
        """The items of a conversation up to the response of that name and with it; [] for None."""
        if name is None:
            return []
        if not isinstance(name, str):
            raise refused("previous_response_id", "previous_response_id must be text")
        if not self.most:
            raise refused("previous_response_id", "this server stores no responses: send the whole conversation")
        response, items = self.get(owner, name)
        return [*items, *response["output"]]


def page_of(said: Sequence[Json], query: Mapping[str, str]) -> Json:
    """A part of a list of items by `limit`, `order` and `after`; ApiError 400 for a value that they may not have."""
    items = [*map(_shown, said)]
    order, limit = query.get("order", "desc"), query.get("limit", "20")
    if order not in ("asc", "desc"):
        raise refused("order", f"order is {order[:20]!r}; it must be asc or desc")
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit) <= _MOST_LISTED):
        raise refused("limit", f"limit is {limit[:20]!r}; it must be from 1 to {_MOST_LISTED}")
    told = [*items] if order == "asc" else [*reversed(items)]
    names = [item["id"] for item in told]
    if (after := query.get("after")) is not None and after not in names:
        raise refused("after", f"there is no item {after[:100]!r}")
    first = 0 if after is None else names.index(after) + 1
    shown, ids = told[first : first + int(limit)], names[first : first + int(limit)]
    return {"object": "list", "data": shown, "first_id": ids[0] if ids else None, "last_id": ids[-1] if ids else None,
            "has_more": first + len(shown) < len(told)}


def _shown(item: Json) -> Json:
    """An item as lists have it: a message's content is a list of parts."""
    if item.get("type", "message") != "message" or not isinstance(item.get("content"), str):
        return {"type": "message", **item}
    part = {"type": "output_text", "annotations": []} if item.get("role") == "assistant" else {"type": "input_text"}
    return {"type": "message", "status": "completed", **item, "content": [{**part, "text": item["content"]}]}
