"""What is installed: all of both packages, and it works away from the source tree."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from email.parser import BytesParser
from pathlib import Path

import pytest

from shardconv import __version__

ROOT = Path(__file__).parents[2]
PACKAGES = ("shardconv", "loader")

pytestmark = pytest.mark.slow


def run(*command: object, at: Path) -> str:
    """What a command printed that worked, started in the folder `at`."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([*map(str, command)], cwd=at, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def files_of(root: Path) -> set[str]:
    """Every file of both packages."""
    paths = [path for package in PACKAGES for path in (root / package).rglob("*") if path.is_file()]
    return {path.relative_to(root).as_posix() for path in paths if path.suffix != ".pyc"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel, built in a copy of the tree with what is installed here, so without a network."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tree / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps", "-w", out, tree, at=tree)
    (built,) = out.iterdir()
    return built


def test_a_wheel_holds_all_of_both_packages_and_nothing_else(wheel: Path) -> None:
    """Each file of each folder, the mark of typed packages too, under the version that the package tells."""
    with zipfile.ZipFile(wheel) as file:
        names = {name for name in file.namelist() if ".dist-info/" not in name}
        (about,) = (name for name in file.namelist() if name.endswith("/METADATA"))
        metadata = BytesParser().parsebytes(file.read(about))
    assert names == files_of(ROOT)
    assert {f"{package}/py.typed" for package in PACKAGES} < names
    assert metadata["Version"] == __version__


def test_what_is_installed_runs_the_demo_from_an_empty_folder(wheel: Path, tmp_path: Path) -> None:
    """In a fresh environment that does not know the source tree, the command finds all it needs."""
    here, environment = tmp_path / "empty", tmp_path / "environment"
    here.mkdir()
    run(sys.executable, "-m", "venv", "--without-pip", environment, at=here)
    python = environment / "bin" / "python"
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "-q",
        "--no-index",
        "--no-deps",
        "--no-compile",
        wheel,
        at=here,
    )
    (packages,) = environment.glob("lib/python*/site-packages")
    others = [path for path in sys.path if Path(path).name == "site-packages"]  # what the package depends on
    (packages / "others.pth").write_text("\n".join(others))
    found = run(python, "-c", "import shardconv, loader; print(shardconv.__file__); print(loader.__file__)", at=here)
    assert all(Path(path).is_relative_to(packages) for path in found.splitlines())
    said = run(environment / "bin" / "shardconv", "demo", at=here)
    assert "of the largest output, allowed 1e-05: equal" in said
    assert list(here.iterdir()) == []
