"""Where things of tfla.lm are: old paths of modules, and the fields of its configurations in docs/lm_fields.md."""

import dataclasses
import importlib
import sys

import pytest

from lm_inputs import ROOT
from tfla.lm import ModelConfig, Recipe, _moved
from tfla.lm.models import KINDS


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


def shown(value: object) -> str:
    """A default as the page says it."""
    if value is dataclasses.MISSING:
        return ""
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    if isinstance(value, tuple):
        return ", ".join(map(shown, value))
    return f"`{value}`" if isinstance(value, str) else f"{value:g}"


def rows(cls: type, base: type | None = None) -> list[str]:
    """The fields of a configuration, or those that it adds to another."""
    known = {field.name for field in dataclasses.fields(base)} if base else set()
    fields = [field for field in dataclasses.fields(cls) if field.name not in known]
    return [f"| `{field.name}` | {shown(field.default)} | {field.metadata['meaning']} |" for field in fields]


TABLES = {"every model": rows(ModelConfig), "the recipe": rows(Recipe)}
TABLES |= {name: rows(kind.config, ModelConfig) for name, kind in KINDS.items()}


@pytest.mark.parametrize("title", TABLES)
def test_the_page_has_every_field_as_it_is_described(title):
    page = (ROOT / "docs" / "lm_fields.md").read_text()
    table = "\n".join([f"| field of {title} | default | |", "|---|---|---|", *TABLES[title], ""])
    assert table in page, table
