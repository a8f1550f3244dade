"""If a request names the layers that draft, there is no warning about an uncalibrated model."""

from __future__ import annotations

import pytest
import torch

from families import tiny
from shoal.engine.loading.load import engine_for
from shoal.methods.base import Method
from shoal_lab.methods.del_ import DEL
from shoal_lab.methods.draft_and_verify import DraftAndVerify
from shoal_lab.methods.layerskip import LayerSkip


@pytest.mark.parametrize("method", [LayerSkip(4), DraftAndVerify((2, 3), (3,)), DEL((2, 4))],
                         ids=lambda method: method.name)
def test_there_is_no_notice(method: Method, caplog: pytest.LogCaptureFixture) -> None:
    engine_for(tiny("llama", dtype=torch.float32)).recipe(method, 8)
    assert "nothing is known" not in caplog.text
