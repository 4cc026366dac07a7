"""Sets that the version of bc07819 wrote, kept as they were: they mean today what they meant then, and would be written
the same today."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import toys
from safetensors.torch import load_file

import loader
import shardconv
from shardconv.cli.main import main

GOLDEN = Path(__file__).parents[1] / "golden"
sys.path.append(str(GOLDEN))
import weights  # noqa: E402

SETS = json.loads((GOLDEN / "sets.json").read_text())
FILES = {"shardconv.json", "replicated.safetensors"}
each_set = pytest.mark.parametrize("entry", SETS, ids=lambda entry: "-".join([entry["model"], *entry["flags"]]))


def degree(entry: dict[str, Any]) -> int:
    return int(entry["flags"][entry["flags"].index("--tp") + 1])


def kept(entry: dict[str, Any]) -> Path:
    return GOLDEN / entry["model"] / entry["set"] / f"tp{degree(entry)}"


def placed(entry: dict[str, Any], out: Path) -> Path:
    """The set where a conversion would have put it, with the config beside it."""
    shutil.copytree(kept(entry), out / kept(entry).name)
    shutil.copy(GOLDEN / entry["model"] / "config.json", out)
    return out / kept(entry).name


def values_of(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the safetensors files in a folder."""
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


@each_set
def test_a_conversion_writes_the_bytes_it_wrote(entry: dict[str, Any], tmp_path: Path) -> None:
    """The same source and flags: the same rank files, manifest and config, byte for byte."""
    source = weights.write_source(entry["model"], tmp_path / "source")
    assert main(["convert", "--quiet", *entry["flags"], str(source), str(tmp_path / "out")]) == 0
    assert toys.contents(tmp_path / "out") == toys.contents(placed(entry, tmp_path / "then").parent)


@each_set
def test_a_set_of_then_verifies_merges_and_reshards(entry: dict[str, Any], tmp_path: Path) -> None:
    """`verify` against the source finds nothing; `merge` gives the source's values back; `reshard` there and back again
    gives the same slices."""
    source = weights.write_source(entry["model"], tmp_path / "source")
    then = placed(entry, tmp_path / "then")
    assert main(["verify", "--quiet", "--source", str(source), str(then)]) == 0
    shardconv.merge(then, tmp_path / "merged")
    merged, expected = values_of(tmp_path / "merged"), values_of(source)
    assert set(merged) == set(expected)
    assert all(torch.equal(merged[name], expected[name].to(merged[name].dtype)) for name in expected)
    shardconv.reshard(then, tmp_path / "other", tp=1)
    shardconv.reshard(tmp_path / "other" / "tp1", tmp_path / "back", tp=degree(entry))
    again, before = tmp_path / "back" / then.name, {path.name for path in then.glob("*.safetensors")}
    assert {path.name for path in again.glob("*.safetensors")} == before
    for name in before:
        now, earlier = load_file(again / name), load_file(then / name)
        assert set(now) == set(earlier)
        assert all(torch.equal(now[key], earlier[key]) for key in earlier)


@each_set
def test_a_set_of_then_loads(entry: dict[str, Any], tmp_path: Path) -> None:
    """On one process it is the ordinary model with the source's weights."""
    model = loader.load_model(placed(entry, tmp_path / "then"), device="cpu", verify=True)
    expected = values_of(weights.write_source(entry["model"], tmp_path / "source"))
    state = model.state_dict()
    assert all(torch.equal(state[name], value.to(state[name].dtype)) for name, value in expected.items())
