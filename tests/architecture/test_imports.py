"""Who may import what, and who may print: read from the sources, and from what a fresh interpreter has loaded."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import loader
import shardconv

PACKAGES = {"shardconv": Path(shardconv.__file__).parent, "loader": Path(loader.__file__).parent}
FILES = {
    f"{package}/{path.relative_to(folder).as_posix()}": path
    for package, folder in PACKAGES.items()
    for path in sorted(folder.rglob("*.py"))
}
OURS = [name for name in FILES if name.startswith("shardconv/")]
# Modules that import torch at their top, and that nobody imports at theirs but the loader.
IMPORTED_LATE = {f"shardconv/{name}.py" for name in ("trial/check_ranks", "trial/demo_rank", "libraries/torch_private")}
HEAVY = {"torch", "diffusers", "transformers", "huggingface_hub", "tqdm", "safetensors", "accelerate"}


def _imported(nodes: Iterator[ast.AST] | list[ast.stmt], package: str) -> set[str]:
    """Top-level packages, and in relative imports our own modules as `package.module`, that `nodes` import."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add((node.module or "").partition(".")[0])
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{package}.{node.module}"} if node.module else {f"{package}.{a.name}" for a in node.names}
    return found


def _at_import_time(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run when a module is imported: not those of functions, nor under `if TYPE_CHECKING`."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from _at_import_time(node.orelse)
            continue
        yield node
        for part in ("body", "orelse", "finalbody"):
            yield from _at_import_time(getattr(node, part, []))
        for handler in getattr(node, "handlers", []):
            yield from _at_import_time(handler.body)


def _tree(name: str) -> ast.Module:
    return ast.parse(FILES[name].read_text(encoding="utf-8"), name)


def _loaded_by(code: str) -> set[str]:
    """Top-level packages that a fresh interpreter has loaded after `code`."""
    script = f"import sys\n{code}\nprint('loaded:', *sorted({{name.partition('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.rpartition("loaded:")[2].split())


@pytest.mark.parametrize("name", OURS)
def test_heavy_libraries_are_imported_late(name: str) -> None:
    """Importing a module of shardconv imports no heavy library, but for a few."""
    if name not in IMPORTED_LATE:
        assert not _imported(list(_at_import_time(_tree(name).body)), "shardconv") & HEAVY


def test_two_modules_talk_to_the_hub() -> None:
    """huggingface_hub is imported where the Hub is read and where it is written to, and nowhere else."""
    users = [name for name in FILES if "huggingface_hub" in _imported(ast.walk(_tree(name)), "")]
    assert users == ["shardconv/remote/hub.py", "shardconv/remote/publish.py"]


def test_nothing_is_unpickled() -> None:
    """No module imports pickle, and none calls torch.load, so no checkpoint can run code."""
    for name in FILES:
        assert not _imported(ast.walk(_tree(name)), "") & {"pickle", "dill", "joblib", "cloudpickle"}
        assert "torch.load" not in {ast.unparse(n.func) for n in ast.walk(_tree(name)) if isinstance(n, ast.Call)}


def test_only_the_command_line_prints() -> None:
    """`print` and the standard streams are used in shardconv/cli and by the demo's ranks, nowhere else."""
    for name in FILES:
        if name.startswith("shardconv/cli/") or name == "shardconv/trial/demo_rank.py":
            continue
        used = {ast.unparse(n) for n in ast.walk(_tree(name)) if isinstance(n, (ast.Name, ast.Attribute))}
        assert not used & {"print", "sys.stdout", "sys.stderr"}, name


def test_the_rules_above_see_what_they_forbid() -> None:
    """The checks of this file find an import at the top, in a class, in a try, but not in a function or for types."""
    lines = ["import a.b", "if TYPE_CHECKING:", "    import t", "else:", "    import e", "try:", "    from c import d"]
    lines += ["except X:", "    import h", "class K:", "    from . import k", "def f():", "    import late"]
    source = "\n".join(lines)
    assert _imported(list(_at_import_time(ast.parse(source).body)), "pkg") == {"a", "e", "c", "h", "pkg.k"}
    assert _imported(ast.walk(ast.parse(source)), "pkg") == {"a", "t", "e", "c", "h", "pkg.k", "late"}


@pytest.mark.slow
@pytest.mark.parametrize("code", ["import shardconv", "import loader", "import shardconv.cli.main"])
def test_importing_is_light(code: str) -> None:
    """Importing a package or the command line loads neither torch nor any other heavy library."""
    assert _loaded_by(code) & HEAVY == set()


@pytest.mark.slow
def test_the_loader_comes_late() -> None:
    """The loader's names are there at once, and torch only when one of them is taken."""
    assert "torch" not in _loaded_by("import loader; assert 'load_model' in loader.__all__")
    assert "torch" in _loaded_by("import loader; loader.load_model")


def test_the_loader_names_what_it_lacks() -> None:
    """A name that the loader does not have is an ordinary AttributeError."""
    with pytest.raises(AttributeError, match="module 'loader' has no attribute 'load_modle'"):
        _ = loader.load_modle
