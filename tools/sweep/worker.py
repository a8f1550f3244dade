"""A process that checks configurations: a line of JSON in for each, a line of JSON out."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import sys

import torch
import transformers

from .checks import check
from .configs import configurations


def main() -> None:
    """Work until there is nothing more."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is no answer
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    logging.getLogger("shoal").setLevel(logging.CRITICAL)
    for line in sys.stdin:
        model_type, name = json.loads(line)
        row = check(model_type, name, configurations(model_type)[name])
        print(json.dumps(dataclasses.asdict(row)), file=out, flush=True)


if __name__ == "__main__":
    main()
