import os
import sys
import tempfile
from pathlib import Path

import pytest

# torch.compile keeps machine code for the processor at hand in a folder that all programs share, under a key that does
# not say all of what that processor has. On a machine that has another one by now such code ends in an illegal
# instruction, so every run begins with an empty folder.
_compiled = tempfile.TemporaryDirectory(prefix="tfla-compiled-")
os.environ["TORCHINDUCTOR_CACHE_DIR"] = _compiled.name

import torch  # noqa: E402

# Tests import each other's helpers by their names, from whichever folder.
sys.path += sorted(str(path) for path in Path(__file__).parent.iterdir() if path.is_dir() and path.name[0] not in "._")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def one_thread():
    """For models so small that a second thread costs more than it gives."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
