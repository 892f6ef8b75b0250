"""Where things lie in tfla.lm: old paths of modules."""

import importlib
import sys

import pytest

from tfla.lm import _moved


@pytest.mark.parametrize("old", sorted(_moved.MOVED))
def test_old_paths_are_the_new_modules(old, monkeypatch):
    monkeypatch.delitem(sys.modules, old, raising=False)
    with pytest.warns(DeprecationWarning, match=f"^tfla: {old} is {_moved.MOVED[old]} now; the old name works"):
        module = importlib.import_module(old)
    assert module is importlib.import_module(_moved.MOVED[old]) and module.__spec__.name == _moved.MOVED[old]


def test_old_paths_by_their_attribute():
    """As examples wrote it; the warning names the line that imports."""
    with pytest.warns(DeprecationWarning) as seen:
        sys.modules.pop("tfla.lm.train", None)
        from tfla.lm.train import Run
    from tfla.lm.training.train import Run as New

    assert Run is New and seen[0].filename == __file__
