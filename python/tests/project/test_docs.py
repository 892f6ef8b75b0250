"""Every Python example of the README, of docs/lm.md and of docs/python runs."""

import re
from pathlib import Path

import pytest

from repository import ROOT

PAGES = [ROOT / "README.md", ROOT / "docs" / "lm.md", *sorted((ROOT / "docs" / "python").glob("*.md"))]


def examples(page: Path) -> list[str]:
    """Blocks of a page in their order; those for several processes are tested in test_distributed.py."""
    blocks = re.findall(r"^```python\n(.*?)^```$", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return [block for block in blocks if not block.startswith("# torchrun")]


@pytest.mark.parametrize("page", [page for page in PAGES if examples(page)], ids=lambda page: page.name)
def test_examples_run(page):
    namespace: dict = {}
    for block in examples(page):
        exec(compile(block, page.name, "exec"), namespace)
