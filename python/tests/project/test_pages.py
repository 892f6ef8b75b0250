"""The pages of the repository: links and anchors that exist, lengths, the present tense, one version everywhere."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from repository import ROOT

sys.path.append(str(ROOT / "tools"))

import site_hooks  # noqa: E402  from the folder above

DOCS = ROOT / "docs"
NOTEBOOK = DOCS / "notebook"
BUILT = {"build", "dist", "node_modules"}
FENCE = re.compile(r"^( *)```.*?^\1```$", flags=re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]*`")
LINK = re.compile(r"\]\(\s*([^)\s]+)[^)]*\)|^\[[^\]]+\]:\s+(\S+)", flags=re.MULTILINE)
HEADING = re.compile(r"^#{1,6} +(.+?)(?: +#+)?$", flags=re.MULTILINE)
# What a page outside of the notebook says is so today. "Is used to" says what something is for.
HISTORY = re.compile(
    r"\b(no longer|was removed|were removed|previously|(?<!is )(?<!are )(?<!be )used to)\b", re.IGNORECASE
)


def pages() -> list[Path]:
    found = ROOT.rglob("*.md")
    return sorted(p for p in found if not any(x.startswith(".") or x in BUILT for x in p.relative_to(ROOT).parts[:-1]))


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def links(text: str) -> list[str]:
    """Relative ones, of images too, without those in code."""
    found = [first or second for first, second in LINK.findall(CODE.sub("", FENCE.sub("", text)))]
    return [link for link in found if not re.match(r"[a-z]+:", link)]


def anchors(text: str) -> set[str]:
    """As GitHub makes them of headings: lower case, without punctuation, spaces as hyphens, repeated ones numbered."""
    found: set[str] = set()
    for heading in HEADING.findall(FENCE.sub("", text)):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        number = sum(re.fullmatch(rf"{re.escape(slug)}(-\d+)?", other) is not None for other in found)
        found.add(slug if number == 0 else f"{slug}-{number}")
    return found


def dead_links(page: Path) -> list[str]:
    text = page.read_text()
    dead = []
    for link in links(text):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists():
            dead.append(f"{link} does not exist")
        elif anchor and anchor not in anchors(target.read_text()):
            dead.append(f"{link}: {target.name} has no such heading")
    return dead


@pytest.mark.parametrize("page", pages(), ids=name)
def test_links_lead_somewhere(page):
    assert not dead_links(page)


@pytest.mark.parametrize(
    ("link", "dead"),
    [
        ("[a](other.md)", 0),
        ("[a](other.md#a-heading-with-code-and-256512)", 0),
        ("[a](other.md#twice-1) [b](#here) ![c](other.md)", 0),
        ("`[a](gone.md)` and [b](https://example.org/gone.md)", 0),
        ("```\n[a](gone.md)\n```", 0),
        ("[a](gone.md)", 1),
        ("![a](gone.svg)", 1),
        ("[a](other.md#gone) [b](#gone)", 2),
        ("[a](other.md#twice-2)", 1),
        ("[a](other.md#in-code)", 1),
        ("[a]\n\n[a]: gone.md", 1),
    ],
)
def test_dead_links_are_found(tmp_path, link, dead):
    (tmp_path / "other.md").write_text(
        "# A heading, with `code` and 256/512\n## Twice\n## Twice\n```\n# In code\n```\n"
    )
    page = tmp_path / "page.md"
    page.write_text(f"# Here\n\n{link}\n")
    assert len(dead_links(page)) == dead


def test_a_page_per_kernel_is_short_and_names_what_was_tried():
    kernels = sorted((DOCS / "cuda").glob("*.md"))
    assert kernels
    for page in kernels:
        lines = page.read_text().splitlines()
        assert len(lines) <= 100, f"{name(page)} has {len(lines)} lines; it must have at most 100"
        if page.stem != "emulator":  # that of the tests, which has no kernel
            assert "What was tried: [" in lines[-1] and "notebook/" in lines[-1], name(page)


def test_the_page_of_language_models_is_short():
    assert len((DOCS / "lm.md").read_text().splitlines()) <= 150


def test_the_glossary_is_short():
    glossary = (DOCS / "architecture.md").read_text().partition("## Glossary\n")[2]
    entries = glossary.partition("\n#")[0].strip().splitlines()[2:]
    assert 0 < len(entries) <= 30


@pytest.mark.parametrize(
    "page", [p for p in pages() if NOTEBOOK not in p.parents and p.name != "CHANGELOG.md"], ids=name
)
def test_pages_say_what_is_so_today(page):
    found = HISTORY.findall(" ".join(FENCE.sub("", page.read_text()).split()))
    assert not found, f"{name(page)} tells history ({', '.join(found)}); the notebook is the place for it"


@pytest.mark.parametrize(
    ("text", "history"), [("It used to be slow.", 1), ("It is used to scale.", 0), ("No longer so; previously not.", 2)]
)
def test_history_is_found(text, history):
    assert len(HISTORY.findall(text)) == history


def test_the_site_shows_every_page():
    shown = set(re.findall(r"[\w/.-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    assert {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")} <= shown


@pytest.mark.parametrize(
    ("here", "written", "on_site"),
    [
        ("index.md", "[a](docs/lm.md#data)", "[a](lm.md#data)"),
        ("index.md", "[a](CONTRIBUTING.md), [b](LICENSE)", "[a](CONTRIBUTING.md), b"),
        ("develop.md", "[a](../CONTRIBUTING.md#tests)", "[a](CONTRIBUTING.md#tests)"),
        ("cuda/index.md", "[a](../../README.md) [b](../../src/CMakeLists.txt)", "[a](../index.md) b"),
        (
            "cuda/index.md",
            "[a](../cpu.md) ![b](../../src/x.svg) [c](#d)",
            "[a](../cpu.md) ![b](../../src/x.svg) [c](#d)",
        ),
        ("index.md", "[a](docs/gone.md)", "[a](docs/gone.md)"),
        ("index.md", "```\n[a](docs/lm.md)\n```", "```\n[a](docs/lm.md)\n```"),
    ],
)
def test_links_on_the_site(here, written, on_site):
    assert site_hooks.rewritten(written, here) == on_site


def test_one_version_everywhere():
    places = {
        "CMakeLists.txt": r"^project\(tfla VERSION (\S+)",
        "pyproject.toml": r'^version = "(.+)"$',
        "python/tfla/__init__.py": r'^__version__ = "(.+)"$',
        "CITATION.cff": r"^version: (.+)$",
        "CHANGELOG.md": r"^## \[(.+)\]",  # the newest comes first
    }
    found = {}
    for file, pattern in places.items():
        match = re.search(pattern, (ROOT / file).read_text(), flags=re.MULTILINE)
        found[file] = match and match[1]
    assert len(set(found.values())) == 1 and None not in found.values(), found
