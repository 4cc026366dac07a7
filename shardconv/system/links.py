"""Which links are followed: one rule, for whatever is read.

A link that a person made on this disk is followed wherever it leads: a component on another disk, a weight file that
two pipelines share, the links into the cache that older clients of the Hub left in a `--local-dir` folder.

A link that came with a download is a stranger's. It must not lead out of the download: what it reaches would be
converted, and perhaps published, as if it belonged to the model. Two kinds of download bring links along:

- a snapshot in a Hub cache, whose links lead to the blobs of its own repo, or to those that all its repos share;
- a clone, whose links are those that git keeps as such; others in it a person made. Where git's index cannot be read,
  all of them are taken for the clone's if its root is a model.

What was unpacked from an archive cannot be told from one's own; look at its links first. Names that a repo's files
state (in an index, a manifest, a pipeline) are no links; they are plain names of their own folder, always. And `push`
sends nothing through a link that leads out of the folder it is given, whoever made it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from ..errors import CheckpointError
from .gitindex import tracked_links

_MODEL_FILES = ("model_index.json", "config.json")
_MAX_LINKS = 40  # one after the other, as the system has it


def strange_link(path: Path) -> Path | None:
    """Where `path` leads, when a link on the way came with a download and leads out of it; None when all is well."""
    for link in _links(path):
        real = Path(os.path.realpath(link))
        if _is_strange(link, real):
            return real
    return None


def _is_strange(link: Path, real: Path) -> bool:
    """Whether `link`, in a folder given by its real name, came with a download and leads out of it, to `real`."""
    inside = _snapshot(link.parent)
    if inside:
        return not any(real.is_relative_to(each) for each in inside)
    clone = next((each for each in link.parents if os.path.lexists(each / ".git")), None)
    if clone is None or real.is_relative_to(clone):
        return False
    tracked = tracked_links(clone)
    if tracked is None:
        return any((clone / name).exists() for name in _MODEL_FILES)
    return str(link.relative_to(clone)) in tracked


def leads_out(path: Path, folder: Path) -> Path | None:
    """Where `path` really is, when that is outside `folder` and outside the Hub cache the folder is a snapshot of."""
    real, home = (Path(os.path.realpath(each)) for each in (path, folder))  # Path.resolve fails on a link to itself
    inside = (home, *_snapshot(home))
    return None if any(real.is_relative_to(each) for each in inside) else real


def files_in(folder: Path, above: tuple[str, ...] = ()) -> Iterator[Path]:
    """Every file in `folder` and below, also in folders that are links; and links that lead nowhere, and those that are
    not to be followed, as they stand. `above`: the real folders on the way, into which links would lead in a circle."""
    real = os.path.realpath(folder)
    if strange_link(folder):
        yield folder
    elif real not in above:
        for name in sorted(os.listdir(folder)):
            path = folder / name
            if os.path.isdir(path):
                yield from files_in(path, (*above, real))
            elif os.path.isfile(path) or not os.path.exists(path):  # no pipes, no devices
                yield path


def link_issues(names: Iterable[str], folder: Path) -> list[str]:
    """What is wrong with the links among the files `names` of `folder`."""
    issues = []
    for name in names:
        real = strange_link(folder / name)
        if real:
            issues.append(f"{name}: a link that leads out of its folder, to {real}; put the file itself there")
        elif not os.path.exists(folder / name):
            issues.append(f"{name}: a link that leads nowhere, to {os.path.realpath(folder / name)}; fetch the file")
    return issues


def followed(names: Iterable[str], folder: Path) -> str | None:
    """One sentence about those of the files `names` of `folder` that links bring in from elsewhere."""
    real = {name: there for name in names if (there := leads_out(folder / name, folder))}
    if not real:
        return None
    first = next(iter(real))
    return f"{folder}: {len(real)} of its files come by links from elsewhere, such as {first} from {real[first]}"


def _links(path: Path) -> Iterator[Path]:
    """Every link that is followed on the way to where `path` leads, by the real name of the folder it stands in."""
    place, left = Path("/"), list(path.absolute().parts[:0:-1])
    followed = 0
    while left and followed < _MAX_LINKS:
        name = left.pop()
        here = place.parent if name == ".." else place / name
        if not os.path.islink(here):
            place = here
            continue
        yield here
        followed += 1
        target = Path(os.readlink(here))
        if target.is_absolute():
            place = Path("/")
        left += reversed(target.parts[1:] if target.is_absolute() else target.parts)


def _snapshot(folder: Path) -> tuple[Path, ...]:
    """Of a folder in a snapshot of a Hub cache, CACHE/models--org--repo/snapshots/COMMIT: where its files may be."""
    for commit in (folder, *folder.parents):
        repo = commit.parent.parent
        if commit.parent.name == "snapshots" and repo.name.startswith("models--"):
            return commit, *(Path(os.path.realpath(each / "blobs")) for each in (repo, repo.parent))
    return ()


def names_in(folder: Path) -> list[str]:
    return sorted(entry.name for entry in os.scandir(folder)) if folder.is_dir() else []


def refuse_link_out(path: Path) -> None:
    outside = strange_link(path)
    if outside:
        raise CheckpointError(f"{path}: a link that leads out of its folder, to {outside}; put the file itself there")
