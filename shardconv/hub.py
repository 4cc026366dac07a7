"""The only module that talks to the Hub, through huggingface_hub."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .checkpoint import CONFIG_NAME, read_index, select_files
from .errors import CheckpointError, ShardconvError


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A repo's files on this disk."""

    folder: Path
    commit: str


def fetch(repo: str, revision: str | None, subfolder: str | None, variant: str | None) -> Snapshot:
    """Download what a conversion of `repo` reads, pinned to the commit that `revision` names now.

    `subfolder` limits it to one component. Of each component the variant's weight files come, or the default ones
    where there is no such variant. Raises `CheckpointError` when the Hub refuses.
    """
    import huggingface_hub
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        info = huggingface_hub.HfApi().repo_info(repo, revision=revision)
        commit = str(info.sha)
        names = [sibling.rfilename for sibling in info.siblings or []]
        wanted = wanted_files(names, subfolder, variant)
        if not wanted:
            raise CheckpointError(f"{repo}: nothing to convert in {subfolder or 'the repo'}; check the name")
        for index in [name for name in wanted if ".safetensors." in name]:
            path = Path(huggingface_hub.hf_hub_download(repo, index, revision=commit))
            prefix = index.rpartition("/")[0]
            wanted += [f"{prefix}/{name}" if prefix else name for name in sorted(set(read_index(path).values()))]
        folder = huggingface_hub.snapshot_download(repo, revision=commit, allow_patterns=sorted(set(wanted)))
    except ShardconvError:
        raise
    except GatedRepoError:
        raise CheckpointError(
            f"{repo}: the Hub says: gated; accept its terms there and log in: hf auth login"
        ) from None
    except RepositoryNotFoundError:
        raise CheckpointError(
            f"{repo}: not a folder here, and the Hub says: repository not found; check the name, or log in if it is "
            "private: hf auth login"
        ) from None
    except Exception as error:  # of the network, in whatever client the Hub library uses
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"{repo}: not a folder here, and the Hub says: {first}") from None
    return Snapshot(Path(folder), commit)


def wanted_files(names: Iterable[str], subfolder: str | None, variant: str | None) -> list[str]:
    """Of a repo's file names, those a conversion reads (weight files named by an index are added from the index)."""
    folders: dict[str, list[str]] = {}
    for name in names:
        folder, _, base = name.rpartition("/")
        folders.setdefault(folder, []).append(base)
    wanted = []
    for folder, bases in folders.items():
        if subfolder is not None and folder != subfolder:
            continue
        selection = select_files(bases, variant) if CONFIG_NAME in bases else None
        chosen = _small_files(bases)
        if selection:
            chosen += [name for name in (selection.index, selection.single) if name]
        elif folder or "model_index.json" not in bases:
            chosen += [name for name in bases if name.endswith((".safetensors", ".safetensors.index.json"))]
        wanted += [f"{folder}/{name}" if folder else name for name in dict.fromkeys(chosen)]
    return wanted


def _small_files(bases: Iterable[str]) -> list[str]:
    """Configs, tokenizers and licences: all that is neither weights nor an index of weights."""
    kept = (".json", ".txt", ".model", ".md", ".jinja")
    return [name for name in bases if (name.endswith(kept) and ".index" not in name) or name.startswith("LICENSE")]
