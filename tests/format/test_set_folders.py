"""What a set's folder may be called: one grammar, whoever looks."""

from __future__ import annotations

from pathlib import Path

import pytest
import small_sets

from loader.files import readahead
from loader.files.locate import find_set
from shardconv import SetError, reshard
from shardconv.commands.inspect import inspect
from shardconv.commands.merge import merge
from shardconv.commands.sendable import sendable
from shardconv.commands.verify import verify
from shardconv.format.names import degree_of, set_folder_name
from shardconv.format.sets import any_set, components_in, set_folders, sets_in
from shardconv.remote.store import Listing, RemoteFile, degrees_in

NAMES = ["tp04", "tp0", "tp", "tp\u0664", "tp\u00b2", "TP4", "tp4 ", "tp4\n", "tp-4", "tp+4", "tp4.partial", ".tp4"]


def listed(name: str) -> Listing:
    """A repo that holds the manifest of a set in the folder `name`."""
    file = f"transformer/{name}/shardconv.json"
    return Listing("c", {file: RemoteFile(file, 1, "")}, "")


@pytest.mark.parametrize("name", [*NAMES, "tp" + "9" * 20, "tp" + "9" * 200])
def test_a_name_that_only_resembles_one_is_no_sets(name: str, tmp_path: Path) -> None:
    """Whoever looks for sets finds none: loading, reading ahead, listing, verifying, merging, resharding, pushing."""
    component = small_sets.copied(small_sets.converted("flux2", 4), tmp_path / "out")
    (component / "tp4").rename(component / name)
    assert degree_of(name) is None
    assert sets_in(component) == {}
    assert set_folders(component) == []
    assert readahead._sets(component, 4) == []
    assert degrees_in(listed(name), "transformer") == {}
    for look in (
        lambda: find_set(component, None, 4),
        lambda: any_set(component),
        lambda: components_in(tmp_path),
        lambda: verify(component),
        lambda: inspect(component),
        lambda: merge(component, tmp_path / "merged"),
        lambda: reshard(component, tmp_path / "new", tp=2),
        lambda: sendable(component, None),
    ):
        with pytest.raises(SetError, match="no converted set in it"):
            look()


@pytest.mark.parametrize("degree", [1, 4, 10, 128])
def test_every_degree_is_found_by_all(degree: int, tmp_path: Path) -> None:
    """The name that a conversion gives is one to everybody."""
    name = set_folder_name(degree)
    (tmp_path / name).mkdir()
    (tmp_path / name / "shardconv.json").write_text("{}")
    assert degree_of(name) == degree
    assert sets_in(tmp_path) == {degree: tmp_path / name}
    assert set_folders(tmp_path) == [tmp_path / name]
    assert readahead._sets(tmp_path, degree) == [tmp_path / name]
    assert degrees_in(listed(name), "transformer") == {degree: f"transformer/{name}"}
    assert find_set(tmp_path, None, degree) == tmp_path / name
