"""Writing to the Hub, through huggingface_hub. Every error it raises is a `HubError`."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import HubError
from .hub import Repo

SMALL_NBYTES = 1 << 20  # below it, files are sent together


@dataclass(frozen=True, slots=True)
class WritableRepo(Repo):
    """A repo that is pushed to."""

    def user(self) -> tuple[str, str]:
        """(name, role of the token: "write", "read", "fineGrained" or "")."""
        info = self._ask(lambda api: api.whoami())
        return str(info["name"]), str(info.get("auth", {}).get("accessToken", {}).get("role", ""))

    def check_write(self) -> None:
        """Raises when this token may not write to the repo (with a client that can ask)."""
        name, role = self.user()
        if role == "read":
            raise HubError(f"{self.name}: {name}'s token may only read; use one that may write: hf auth login")

        def check(api: Any) -> None:
            if "write" in inspect.signature(api.auth_check).parameters:
                api.auth_check(self.name, write=True)

        self._ask(check)

    def create(self, private: bool) -> None:
        """Create the repo, empty."""
        self._ask(lambda api: api.create_repo(self.name, private=private, exist_ok=True))

    def gate(self, gated: str) -> None:
        """Have access to the repo asked for; `gated` as in `Listing`."""
        self._ask(lambda api: api.update_repo_settings(self.name, gated=gated))

    def create_branch(self, branch: str) -> None:
        """From the head of main."""
        self._ask(lambda api: api.create_branch(self.name, branch=branch, exist_ok=True), revision="main")

    def upload(self, branch: str, names: Mapping[str, Path | bytes], new_pull: bool) -> list[Any]:
        """Send the large ones among files (name in the repo -> file here, or its content) that the Hub does not hold
        yet; nothing shows in the repo. Returns what `commit` takes.

        One after the other, so that those that arrived are not sent again after a failure.
        """
        import huggingface_hub

        def send(additions: list[Any]) -> None:
            options = {"revision": branch, "create_pr": new_pull, "free_memory": False}
            subject = f"{self.name}: {additions[0].path_in_repo}"
            self._ask(lambda api: api.preupload_lfs_files(self.name, additions, **options), subject, branch)

        additions = [huggingface_hub.CommitOperationAdd(name, content) for name, content in names.items()]
        small = [each for each in additions if each.upload_info.size < SMALL_NBYTES]
        for batch in [small, *([each] for each in additions if each not in small)]:
            if batch:
                send(batch)
        return additions

    def commit(
        self, branch: str, parent: str, message: str, additions: Sequence[Any], deletions: Iterable[str], new_pull: bool
    ) -> tuple[str, str, str]:
        """One commit on top of `parent`, of files that were uploaded and of names to delete.

        Returns (commit, branch for further commits, URL of the commit or of the new pull request).
        """
        import huggingface_hub

        operations = [*additions, *(huggingface_hub.CommitOperationDelete(name, is_folder=False) for name in deletions)]
        info = self._ask(
            lambda api: api.create_commit(
                self.name,
                operations,
                commit_message=message,
                revision=branch,
                parent_commit=parent,
                create_pr=new_pull,
            ),
            revision=branch,
        )
        return str(info.oid), str(info.pr_revision or branch), str(info.pr_url or info.commit_url)


def card_metadata(text: str) -> dict[str, Any]:
    """The front matter of a model card; empty when there is none that can be read."""
    import huggingface_hub

    try:
        return dict(huggingface_hub.ModelCard(text, ignore_metadata_errors=True).data.to_dict())
    except ValueError:
        return {}


def front_matter(metadata: Mapping[str, Any]) -> str:
    """The lines that a model card begins with."""
    import huggingface_hub

    return f"---\n{huggingface_hub.ModelCardData(**metadata).to_yaml()}\n---\n"
