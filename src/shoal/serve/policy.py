"""Chooses the method of a request, within what the operator allows."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from shoal import methods
from shoal.decode.branches.verifier import is_url
from shoal.methods.base import LAYER_SCORES, MASKED, SHOWN_QUERIES, WRAPPED, Method
from shoal.methods.common.limits import Most, beyond, limits_of
from shoal.serve.errors import ApiError
from shoal.serve.settings import Settings

_HARMLESS = (LAYER_SCORES, MASKED, SHOWN_QUERIES)
_MOST_METHODS, _DEEPEST = 16, 4
"""Most methods that one request may name, and how deep they may be nested."""


def allowed(settings: Settings) -> list[str]:
    """Names of the methods that a request may ask for."""
    return sorted(_harmless() if settings.methods is None else settings.methods)


@functools.cache  # it imports all methods
def _harmless() -> tuple[str, ...]:
    return tuple(name for name in methods.names() if all(need in _HARMLESS for need in methods.get(name).needs))


def choose(method: str | list[Any] | None, args: Mapping[str, Any], settings: Settings) -> Method:
    """A request's method; ApiError 403 where it is not allowed, 400 where it is unknown or its options are wrong."""
    if method is None:
        if args:
            raise ApiError(400, "method_args belongs to a method; name it in method", param="method")
        return methods.make(settings.method)
    spec = {"method": method, "method_args": args}
    _check(spec, settings, [])
    try:
        return methods.make(spec)
    except (ValueError, TypeError) as error:
        raise ApiError(400, str(error), param="method" if isinstance(method, list) else "method_args") from None


def _check(spec: Any, settings: Settings, seen: list[str], depth: int = 0) -> None:
    """Refuse a method, or one in it, that is not allowed, before anything is read; `seen` takes the names so far."""
    if depth > 2 * _DEEPEST:  # nested lists count too
        raise ApiError(400, f"method: more than {_DEEPEST} methods are nested in each other", param="method")
    spec = {"method": spec} if isinstance(spec, str | list) else spec
    if isinstance(spec, Mapping) and isinstance(spec.get("method"), list):
        for one in spec["method"]:
            _check(one, settings, seen, depth + 1)
        return
    name = spec.get("method") if isinstance(spec, Mapping) else None
    if not isinstance(name, str) or name not in methods.names():
        raise ApiError(400, f"method is {name!r:.200}; this server has {', '.join(allowed(settings))}", param="method")
    seen.append(name)
    if len(seen) > _MOST_METHODS:
        raise ApiError(400, f"method: more than {_MOST_METHODS} methods in one request", param="method")
    if name not in allowed(settings):
        message = f"method {name!r} is not allowed here; allowed are {', '.join(allowed(settings)) or 'none'}"
        raise ApiError(403, message, param="method", code="method_not_allowed")
    given = spec.get("method_args")
    args: Mapping[str, Any] = given if isinstance(given, Mapping) else {}  # making the method refuses anything else
    _check_files(name, args, settings)
    _check_numbers(name, args, settings)
    for holder in (spec, args):
        for option in WRAPPED:
            if holder.get(option) is not None:
                _check(holder[option], settings, seen, depth + 1)


def _check_numbers(name: str, args: Mapping[str, Any], settings: Settings) -> None:
    """Refuse numbers, lists and texts that are too large for a request."""
    limits = limits_of(methods.get(name))
    for option, value in args.items():
        if option in WRAPPED or option not in methods.get(name).option_names():
            continue
        limit = limits.get(option, Most(0))
        more = settings.limits.get(f"{name}.{option}")
        if (why := beyond(value, limit if more is None else Most(more, max(limit.items, int(more))))) is not None:
            raise ApiError(400, f"{option} of {name} is {why} from a request. The operator may allow more with "
                           f"--method-limit {name}.{option}=N", param="method_args")


def check_limits(limits: Mapping[str, float]) -> None:
    """Refuse limits of options that no method has; the ValueError names the known ones."""
    for place, most in limits.items():
        name, _, option = place.partition(".")
        known = limits_of(methods.get(name)) if name in methods.names() else {}
        if option not in known:
            there = f"{name} has {', '.join(known)}" if known else f"methods are {', '.join(methods.names())}"
            raise ValueError(f"--method-limit {place}: no method has such an option; {there}")
        if not most >= 0:
            raise ValueError(f"--method-limit {place} is {most}; it must be 0 or more")


def _check_files(name: str, args: Mapping[str, Any], settings: Settings) -> None:
    """Refuse options that name files of the server, unless the operator listed the method; refuse URLs always."""
    method = methods.get(name)
    defaults = {field.name: field.default for field in fields(method)}
    given = [option for option in method.reads if args.get(option) not in (None, defaults[option])]
    if given and (settings.methods is None or any(is_url(args[option]) for option in given)):
        message = (f"{given[0]} of {name} names a file on the server, or a program or address for it to call, which "
                   "requests may not")
        raise ApiError(403, message, param="method_args", code="method_not_allowed")
