"""`shardconv inspect`: what a file, a set or an output folder is, in text, JSON and as a drawing."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import small_sets
import toys
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from shardconv import CheckpointError, SetError
from shardconv.cli import svg
from shardconv.cli.main import main
from shardconv.commands.inspect import inspect

SVG = "{http://www.w3.org/2000/svg}"
RANK_1 = "rank-00001-of-00004.safetensors"


@pytest.fixture(scope="module")
def out() -> Path:
    """A FLUX.2 converted for 4 ranks; read only."""
    return small_sets.converted("flux2", 4)


def document(capsys: pytest.CaptureFixture[str], *argv: object) -> Any:
    assert main(["inspect", "--json", *map(str, argv)]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    return json.loads(said.out)


def held(path: Path) -> dict[str, Any]:
    """What the library says of each tensor of a file: dtype, shape, bytes."""
    tensors = load_file(path)
    with safe_open(path, "pt") as file:
        return {name: (file.get_slice(name).get_shape(), tensors[name].nbytes) for name in tensors}


# What is said


def test_a_set_says_all_about_itself(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The document agrees with what convert printed, and says source, plan, versions and that nothing is missing."""
    (found,) = document(capsys, out)
    argv = ["convert", "--tp", "4", "--dry-run", "--json", str(small_sets.source("flux2")), str(out.parent / "no")]
    assert main(argv) == 0
    (expected,) = json.loads(capsys.readouterr().out)["sets"]
    for key in ("model_class", "tp_degree", "nbytes", "set_nbytes", "rank_nbytes", "replicated_share", "styles"):
        assert found[key] == expected[key]
    assert (found["path"], found["kind"], found["missing"]) == (str(out / "tp4"), "set", [])
    names = {path.name: path.stat().st_size for path in small_sets.source("flux2").glob("*.safetensors")}
    assert found["source"] == {"repo": None, "revision": None, "subfolder": None, "variant": None, "files": names}
    assert found["plan"]["transformer_blocks.*.attn.to_q"] == "colwise"
    assert len(found["conversion_id"]) == 32


@pytest.mark.parametrize("name", small_sets.NAMES)
def test_bytes_are_those_of_the_files(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Bytes a rank, by style and of replicated tensors are what the library finds in the files; a bias that stays whole
    counts as replicated, whatever its module's style."""
    out = small_sets.converted(name, 4)
    (found,) = document(capsys, "--tensors", out / "tp4")
    mine = held(out / "tp4" / RANK_1)
    shared = held(out / "tp4" / "replicated.safetensors")
    assert found["replicated_nbytes"] == sum(nbytes for _, nbytes in shared.values())
    assert found["rank_nbytes"] == sum(nbytes for _, nbytes in [*mine.values(), *shared.values()])
    tensors = {tensor["name"]: tensor for tensor in found["tensors"]}
    assert tensors.keys() == mine.keys() | shared.keys()
    for key, (shape, nbytes) in (mine | shared).items():
        tensor = tensors[key]
        assert tensor["rank_nbytes"] == nbytes
        assert (tensor["style"] == "replicated") == (key in shared)
        local = [num // 4 if dim == tensor.get("dim") else num for dim, num in enumerate(tensor["shape"])]
        assert local == shape


def test_an_output_folder_lists_every_set(out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All degrees of all components, and what is not here of them."""
    shutil.copytree(out, tmp_path / "pipe" / "transformer")
    shutil.copytree(small_sets.converted("flux2", 2) / "tp2", tmp_path / "pipe" / "transformer" / "tp2")
    (tmp_path / "pipe" / "transformer" / "tp4" / RANK_1).unlink()
    found = document(capsys, tmp_path / "pipe")
    assert [(each["tp_degree"], each["missing"]) for each in found] == [(2, []), (4, [RANK_1])]
    assert main(["inspect", str(tmp_path / "pipe")]) == 0
    assert f"not here: {RANK_1}" in capsys.readouterr().out


@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize(("name", "rank"), [(RANK_1, 1), ("replicated.safetensors", None)])
def test_b11_a_lone_file_says_what_it_is(
    name: str, rank: int | None, beside: bool, out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever it is called, a file says rank, degree and conversion; with the manifest beside it, styles as well."""
    path = out / "tp4" / name if beside else Path(shutil.copy(out / "tp4" / name, tmp_path / "any.safetensors"))
    (found,) = document(capsys, "--tensors", path)
    about = found["file"]["about"]
    (whole,) = document(capsys, out)
    assert (about["rank"], about["tp_degree"], about["conversion_id"]) == (rank, 4, whole["conversion_id"])
    expected = held(path)
    assert {each["name"]: (each["shape"], each["nbytes"]) for each in found["tensors"]} == expected
    styles = set(found["file"]["styles"])
    if rank is None:
        assert styles == {"replicated"}
    else:
        assert styles == ({"colwise", "rowwise", "packed_colwise", "packed_rowwise"} if beside else {"sharded"})
    assert main(["inspect", str(path)]) == 0
    said = capsys.readouterr().out
    assert ("Flux2Transformer2DModel" in said) == beside
    assert ("rank 1" if rank else "what all ranks hold whole") in said


def test_a_file_of_another_conversion_is_not_described_by_the_manifest_beside_it(
    out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A stray file in a set is described by what it says of itself alone."""
    shutil.copytree(out / "tp4", tmp_path / "tp4")
    shutil.copy(small_sets.converted("flux2", 2) / "tp2" / "rank-00001-of-00002.safetensors", tmp_path / "tp4" / RANK_1)
    (found,) = document(capsys, tmp_path / "tp4" / RANK_1)
    assert found["file"]["about"]["tp_degree"] == 2
    assert "model_class" not in found


def test_an_ordinary_file_is_shown_too(capsys: pytest.CaptureFixture[str]) -> None:
    """Any safetensors file is listed, and said to be of no set."""
    path = small_sets.source("flux2") / toys.SINGLE
    assert main(["inspect", "--tensors", str(path)]) == 0
    said = capsys.readouterr().out
    assert "a safetensors file, not of a converted set" in said
    for name in load_file(path):
        assert name in said


def test_what_is_none_of_these_is_refused(tmp_path: Path) -> None:
    """A file that is no safetensors file, a folder without a set, and nothing at all are errors that say so."""
    (tmp_path / "a.safetensors").write_text("<!DOCTYPE html>")
    with pytest.raises(CheckpointError, match="a web page"):
        inspect(tmp_path / "a.safetensors")
    with pytest.raises(SetError, match="no converted set in it"):
        inspect(tmp_path)
    with pytest.raises(SetError, match="no such folder"):
        inspect(tmp_path / "nowhere")


def test_text_shows_what_matters(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Class, degree, source, dtype, plan, bytes, files; every tensor when asked."""
    assert main(["inspect", str(out)]) == 0
    short = capsys.readouterr().out
    for text in ("Flux2Transformer2DModel, tp degree 4", "source: ", "dtype: as stored", "stays replicated", RANK_1):
        assert text in short
    assert main(["inspect", "--tensors", str(out)]) == 0
    names = {name for path in (out / "tp4").glob("*.safetensors") for name in load_file(path)}
    assert len(capsys.readouterr().out.splitlines()) == len(short.splitlines()) + len(names)


# The drawing


def _drawn(path: Path) -> ElementTree.Element:
    root = ElementTree.fromstring(path.read_bytes())
    assert root.tag == f"{SVG}svg"
    return root


def _texts(root: ElementTree.Element) -> list[str]:
    return ["".join(text for child in [each] for text in [child.text or "", *(c.tail or "" for c in child)])
            for each in root.iter(f"{SVG}text")]  # fmt: skip


def test_the_drawing_has_a_bar_for_each_rank(out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Valid XML: a bar a rank whose parts are as long as the styles' bytes, a legend, the replicated share, the largest
    tensors by name."""
    (found,) = document(capsys, out, "--svg", tmp_path / "a.svg", "--tensors")
    root = _drawn(tmp_path / "a.svg")
    texts = _texts(root)
    assert [text for text in texts if text.startswith("rank ")] == [f"rank {rank}" for rank in range(4)]
    for style in found["styles"]:
        assert sum(text.startswith(f"{style} ") for text in texts) == 1
    share = found["replicated_nbytes"] / found["rank_nbytes"]
    assert any(text.endswith(f"{share:.0%} of a rank") for text in texts)
    largest = max(found["tensors"], key=lambda tensor: tensor["rank_nbytes"])
    assert largest["name"] in texts
    parts = [rect for rect in root.iter(f"{SVG}rect") if rect.find(f"{SVG}title") is not None]
    assert len(parts) == 4 * len(found["styles"])
    widths = {str(rect.find(f"{SVG}title").text).partition(":")[0]: float(rect.get("width", 0)) for rect in parts}  # type: ignore[union-attr]
    for style, figures in found["styles"].items():
        assert widths[style] == pytest.approx(730 * figures["rank_nbytes"] / found["rank_nbytes"], abs=0.1)


def test_a_lone_file_is_drawn(out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One bar, titled with the file's name."""
    document(capsys, out / "tp4" / RANK_1, "--svg", tmp_path / "a.svg")
    assert {RANK_1, "this file"} <= set(_texts(_drawn(tmp_path / "a.svg")))


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.text(max_size=200), st.integers(0, 10**15)), max_size=4),
    st.dictionaries(st.sampled_from(["colwise", "replicated", "sharded", "&<>"]), st.integers(0, 10**15)),
    st.text(max_size=300),
)
def test_any_name_gives_valid_xml(largest: list[tuple[str, int]], styles: dict[str, int], title: str) -> None:
    """Names that a header may hold (markup, quotes, control characters, lone surrogates) are escaped, and nothing is
    drawn outside the picture."""
    rows = [svg.Row(name, "colwise", "F32 1x2", nbytes) for name, nbytes in sorted(largest, key=lambda each: -each[1])]
    ordered = dict(sorted(styles.items(), key=lambda item: item[0] == "replicated"))
    text = svg.draw([svg.Chart(title + "\ud800\x00", title, ["rank 0", title], ordered, rows)] * 2)
    root = ElementTree.fromstring(text.encode())
    height = float(root.get("height", 0))
    charts = root.findall(f"{SVG}g")
    assert len(charts) == 2
    for rect in charts[0].iter(f"{SVG}rect"):
        assert float(rect.get("x", 0)) + float(rect.get("width", 0)) <= svg.WIDTH
        assert float(rect.get("y", 0)) + float(rect.get("height", 0)) <= height / 2


@pytest.mark.slow
def test_inspecting_needs_no_torch(out: Path, tmp_path: Path) -> None:
    """No heavy library is loaded, also when it draws."""
    script = "import sys; from shardconv.cli.main import main\n"
    script += f"code = main(['inspect', {str(out)!r}, '--svg', {str(tmp_path / 'a.svg')!r}])\n"
    script += "print(code, sorted({'torch', 'diffusers', 'safetensors', 'huggingface_hub', 'tqdm'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 []"
