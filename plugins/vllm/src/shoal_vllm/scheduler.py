"""The scheduler under depth plans: which blocks of KV may be shared, and who starts together."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from typing import Any
from uuid import uuid4

from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from shoal_vllm.settings import Settings

Hasher = Callable[[Request], list[BlockHash]]


class DepthScheduler(Scheduler):
    """vLLM's scheduler. Blocks with positions of an answer that runs fewer layers are known to that request alone."""

    _pause_state: PauseState

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        settings = Settings.of(self.vllm_config)
        assert settings is not None
        self._settings = settings

    def add_request(self, request: Request) -> None:
        """Take a request, which has no answer yet: its blocks so far are of its prompt, which runs at full depth."""
        hasher, params = request._block_hasher, request.sampling_params
        if hasher is not None and params is not None and not self._settings.plan(params).is_full:
            request._block_hasher = private(hasher)
        super().add_request(request)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """The next step. Waves start when the last one has ended, so that their rows are of like age."""
        waits = self._settings.admission == "waves" and any(request.num_output_tokens for request in self.running)
        if not waits or self._pause_state != PauseState.UNPAUSED:
            return super().schedule(*args, **kwargs)
        self._pause_state = PauseState.PAUSED_NEW
        try:
            return super().schedule(*args, **kwargs)
        finally:
            self._pause_state = PauseState.UNPAUSED


def private(hasher: Hasher) -> Hasher:
    """A hasher whose blocks no other request can find, nor find its own among those of others.

    vLLM finds blocks by the hash of their tokens. What a position holds under a plan depends on the plan and on where
    the prompt ended, which no token tells. The request itself finds its blocks again after a preemption.
    """
    salt = uuid4().bytes

    def hashes(request: Request) -> list[BlockHash]:
        return [BlockHash(sha256(salt + found).digest()) for found in hasher(request)]

    return hashes
