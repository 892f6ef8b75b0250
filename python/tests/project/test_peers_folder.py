"""benchmarks/operators/peers_folder.py on archives that are there: no network."""

import io
import subprocess
import sys
import tarfile
import zipfile

import pytest

from repository import ROOT


def wheel(folder, name, files):
    with zipfile.ZipFile(folder / name, "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)


def sources(folder, name, files):
    with tarfile.open(folder / f"{name}.tar.gz", "w:gz") as archive:
        for file, text in files.items():
            entry = tarfile.TarInfo(f"{name}/{file}")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))


@pytest.fixture
def downloads(tmp_path):
    folder = tmp_path / "downloads"
    folder.mkdir()
    return folder


def made(downloads, code=0, *options):
    command = [sys.executable, "-m", "benchmarks.operators.peers_folder", "--from", str(downloads)]
    command += ["--out", str(downloads.parent / "peers"), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    return done.stdout if code == 0 else done.stderr


def test_packages_and_their_versions(downloads):
    meta = "Metadata-Version: 2.1\nName: {}\nVersion: {}\n"
    wheel(
        downloads, "pure-1.5-py3-none-any.whl",
        {"pure/__init__.py": "x = 1\n", "pure-1.5.dist-info/METADATA": meta.format("pure", "1.5")},
    )  # fmt: skip
    sources(
        downloads, "with-kernels-2.0",
        {
            "PKG-INFO": meta.format("with-kernels", "2.0"), "setup.py": "raise SystemExit\n", "csrc/one.cu": "!",
            "with_kernels/__init__.py": "x = 2\n", "with_kernels/ops/two.py": "x = 3\n",
        },
    )  # fmt: skip
    text = made(downloads)
    peers = downloads.parent / "peers"
    assert {path.name for path in peers.iterdir()} == {
        "pure", "pure-1.5.dist-info", "with_kernels", "with_kernels-2.0.dist-info",
    }  # fmt: skip
    program = "import pure, with_kernels.ops.two as two\nfrom importlib.metadata import version\n"
    program += "print(pure.x, two.x, version('pure'), version('with_kernels'))"
    found = subprocess.run([sys.executable, "-c", program], cwd=peers, capture_output=True, text=True, check=True)
    assert found.stdout == "1 3 1.5 2.0\n"
    assert "0.00 MB  pure\n" in text and text.rstrip().endswith(f"MB  {peers}")
    assert "which holds something; it must be new or empty" in made(downloads, 1)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("one-1-cp312-cp312-linux_x86_64.whl", "is for one kind of machine; it must be of Python alone"),
        ("one.zip", "is neither a wheel nor a source archive"),
        ("other-1.tar.gz", "has no package other"),
    ],
)
def test_archives_that_are_refused(downloads, name, words):
    if name.endswith(".tar.gz"):
        sources(downloads, "other-1", {"PKG-INFO": "Name: other\nVersion: 1\n", "setup.py": ""})
    else:
        wheel(downloads, name, {})
    assert f"{name} {words}" in made(downloads, 1)


def test_names_beside_a_folder(downloads):
    assert "names have no use then" in made(downloads, 2, "einops")
