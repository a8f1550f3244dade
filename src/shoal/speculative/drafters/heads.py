"""From a folder with a drafter of another tool, whatever its kind, to what guesses beside a target."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shoal.model.runner import ModelRunner
from shoal.speculative import eagle_checkpoint
from shoal.speculative.drafter_files import kind_of
from shoal.speculative.drafters import assistant, dflash_checkpoint, medusa, mlp_speculator
from shoal.speculative.drafters.dflash import DFlashHead
from shoal.speculative.layer_head import CheckpointHead

_FORMS: dict[str, tuple[Callable[[str], Any], Callable[[ModelRunner, Any], Any]]] = {
    "eagle": (eagle_checkpoint.read, CheckpointHead), "dflash": (dflash_checkpoint.read, DFlashHead),
    "medusa": (medusa.read, medusa.ResidualHeads), "mlp_speculator": (mlp_speculator.read, mlp_speculator.MlpHeads),
    "mtp": (assistant.read, assistant.Assistant),
}


def read(folder: str) -> Callable[[ModelRunner], Any]:
    """Read the config and the names of a drafter's tensors; what is returned makes it ready for a target.

    Raises:
        ValueError: its files cannot be read.
        Unsupported: Shoal does not run it. What is returned raises it for a target that it does not fit.
    """
    reads, makes = _FORMS[kind_of(folder)]
    checkpoint = reads(folder)
    return lambda target: makes(target, checkpoint)
