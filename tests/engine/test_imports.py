"""What a model loads of its libraries."""

from __future__ import annotations

import subprocess
import sys

import pytest
import transformers

from documents import ROOT
from shoal.compat import release


@pytest.mark.slow
@pytest.mark.skipif(release(transformers.__version__) < (5, 20), reason="other modules of it load the compiler")
def test_a_file_runs_without_the_compiler_of_torch() -> None:
    """transformers' paged cache still gets its mark, when a marked method is first called."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_COMPILER, FILE], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


FILE = str(ROOT / "tests" / "fixtures" / "gguf" / "llama-Q4_1.gguf")
WITHOUT_COMPILER = """
import sys
import shoal, torch.compiler
disable = torch.compiler.disable
assert len(shoal.load(sys.argv[1]).generate([1, 2, 3], max_new_tokens=3).tokens) == 3
assert torch.compiler.disable is disable
print("torch._dynamo" in sys.modules)
from transformers.generation.continuous_batching.cache import PagedAttentionCache
try:
    PagedAttentionCache.update(None, None, None, 0, {})
except AttributeError:
    print("torch._dynamo" in sys.modules)
"""
