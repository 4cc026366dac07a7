"""Ranks that name one place differently load it; those that name different places are told so, at once."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import ranks
import small_sets
import torch.distributed as dist

import loader
from loader import pipeline

NAME = "qwenimage"
SOON = 10  # seconds

pytestmark = pytest.mark.slow


@pytest.fixture
def node(tmp_path: Path) -> Path:
    """A folder in which `out/wan` is a pipeline whose transformer has sets, and `out/one` is the transformer."""
    for name in ("wan/transformer", "one"):
        small_sets.copied(small_sets.converted(NAME, 4), tmp_path / "out" / name)
    small_sets.copied(small_sets.converted(NAME, 2) / "tp2", tmp_path / "out" / "one" / "tp2")
    index = {"_class_name": "QwenImagePipeline", "transformer": ["diffusers", "QwenImageTransformer2DModel"]}
    (tmp_path / "out" / "wan" / "model_index.json").write_text(json.dumps(index))
    return tmp_path


def load_each(folders: list[Path], names: list[Any], function: str = "load_model", **options: Any) -> str:
    """Each rank in its own folder, by its own name; of a pipeline only what is sharded."""
    rank = dist.get_rank()
    os.chdir(folders[rank % len(folders)])
    with mock.patch.object(pipeline, "_from_pretrained", return_value="assembled"):
        getattr(loader, function)(names[rank], device="cpu", **options)
    return "loaded"


@pytest.mark.parametrize(("function", "name"), [("load_model", "one"), ("load_pipeline", "wan")])
def test_one_folder_has_many_names(node: Path, function: str, name: str) -> None:
    """Relative, from here, absolute, with a slash at the end, as a string or a Path: the ranks load the same folder."""
    names = [f"out/{name}", f"./out/{name}", str(node / "out" / name) + "/", Path("out") / name]
    assert ranks.values(load_each, [node], names, function, n=4, timeout=30) == ["loaded"] * 4


def test_a_link_is_a_name_too(node: Path) -> None:
    """One rank goes through a link, and into the folder of the set; another does not."""
    (node / "link").symlink_to(node / "out" / "one")
    assert ranks.values(load_each, [node], ["out/one", "link/tp2"], timeout=30) == ["loaded"] * 2


def test_a_folder_of_some_ranks_and_a_repo_of_others(node: Path, tmp_path: Path) -> None:
    """`out/one` is here for rank 0 and, where rank 1 runs, could be a repo only: one sentence for both, no request."""
    (tmp_path / "elsewhere").mkdir()
    outcomes = ranks.run(load_each, [node, tmp_path / "elsewhere"], ["out/one", "out/one"], timeout=30)
    assert ranks.same(outcomes).text == (
        "path: expected one place for all ranks, found rank 0: the folder out/one; rank 1: no folder out/one, so a Hub "
        "repo; put the folder on every node, or, to load the repo, take it away"
    )
    assert all(each.seconds < SOON for each in outcomes)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["org/a", "org/b"], "path: expected one repo for all ranks, found org/a on rank 0, org/b on rank 1; give"),
        (["org/a", "./org/a"], "path: expected one place for all ranks, found rank 0: no folder org/a, so a Hub repo; "
                               "rank 1: no folder ./org/a; put the folder on every node"),
        (["/no/a", "./no/b"], "2 problems:\n  - rank 0: /no/a: no such folder; give the folder that shardconv convert "
                              "wrote\n  - rank 1: no/b: no such folder; "),
        (["out/one", "./nowhere"], "rank 1: nowhere: no such folder; give the folder"),
        (["out/one", None], "rank 1: TypeError: "),
    ],
)  # fmt: skip
def test_different_places_are_told(node: Path, names: list[Any], said: str) -> None:
    """Two repos, a repo and a folder that is not there, two folders that are not there: the same words on all ranks."""
    outcomes = ranks.run(load_each, [node], names, timeout=30)
    assert ranks.same(outcomes).text.startswith(said)
    assert all(each.seconds < SOON for each in outcomes)


def test_ranks_that_find_different_components(node: Path) -> None:
    """A pipeline with one sharded component here and two there: told, instead of waiting for a load of the second."""
    other = node / "out" / "two"
    small_sets.copied(node / "out" / "wan", other)
    small_sets.copied(other / "transformer", other / "transformer_2")
    index = json.loads((other / "model_index.json").read_text())
    (other / "model_index.json").write_text(json.dumps(index | {"transformer_2": index["transformer"]}))
    outcomes = ranks.run(load_each, [node], ["out/wan", "out/two"], "load_pipeline", timeout=30)
    assert ranks.same(outcomes).text == (
        "load_pipeline: the ranks find different sharded components to load (rank 0 transformer, rank 1 transformer "
        "transformer_2); give every node the same folder, and every rank the same components"
    )
