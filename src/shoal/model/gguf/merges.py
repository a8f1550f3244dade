"""The merges of a SentencePiece vocabulary, which GGUF files leave out, kept once they have been worked out.

A large vocabulary has half a million of them, and finding them takes longer than all else in a second start.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from shoal.model.gguf.vocabulary import NORMAL, USER_DEFINED
from shoal.user_cache import cache_folder, write_whole


def merges_of(tokens: Sequence[str], kinds: Sequence[int], keys: Sequence[float]) -> list[tuple[str, str]]:
    """All ways to join two tokens into a third that text can hold, in the order of the third's key, smallest first.

    They are kept in `shoal/merges` of $XDG_CACHE_HOME, by default ~/.cache, under the SHA-256 of the arguments.
    """
    kept = cache_folder() / "merges" / f"{_digest(tokens, kinds, keys)}.npy"
    pairs = _read(kept, len(tokens))
    if pairs is None:
        pairs = implied_merges(tokens, kinds, keys)
        found = np.asarray(pairs, dtype=np.int32).reshape(-1, 2)
        write_whole(kept, lambda file: np.save(file, found, allow_pickle=False))
    return [(tokens[first], tokens[second]) for first, second in pairs]


def implied_merges(tokens: Sequence[str], kinds: Sequence[int], keys: Sequence[float]) -> list[tuple[int, int]]:
    """The same as pairs of ids, worked out anew."""
    ids = {token: number for number, token in enumerate(tokens)}
    joined = [n for n, token in enumerate(tokens)
              if len(token) > 1 and (not kinds or kinds[n] in (NORMAL, USER_DEFINED))]
    joined.sort(key=keys.__getitem__)
    known, find = ids.keys(), ids.__getitem__
    merges: list[tuple[int, int]] = []
    for number in joined:
        token = tokens[number]
        merges += sorted((find(first), find(second)) for cut in range(1, len(token))
                         if (first := token[:cut]) in known and (second := token[cut:]) in known)
    return merges


def _digest(tokens: Sequence[str], kinds: Sequence[int], keys: Sequence[float]) -> str:
    digest = hashlib.sha256("\0".join(tokens).encode("utf-8", "surrogatepass"))
    digest.update(array("q", kinds).tobytes())
    digest.update(array("d", keys).tobytes())
    return digest.hexdigest()[:32]


def _read(path: Path, tokens: int) -> list[tuple[int, int]] | None:
    """None where the file is missing or not what was kept."""
    try:
        pairs = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    if pairs.dtype != np.int32 or pairs.ndim != 2 or pairs.shape[1] != 2 or not np.all((pairs >= 0) & (pairs < tokens)):
        return None
    found: list[tuple[int, int]] = pairs.tolist()
    return found
