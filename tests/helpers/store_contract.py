"""What every store promises: a test class that each kind of store inherits, with a fixture of its own."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from shardconv.errors import HubError
from shardconv.remote.store import Store

FILES: Mapping[str, bytes] = {
    "config.json": b'{"a": 1}',
    "transformer/config.json": b"{}",
    "transformer/weights.safetensors": bytes(range(256)) * 40,
}
Make = Callable[..., Store]


class StoreContract:
    """A subclass has the fixtures `make` (gives a new view of one place that holds `FILES`; `offline=True` only of its
    cache) and `corrupt` (has the place send another content for a name, of the same length)."""

    @pytest.fixture
    def make(self) -> Make:
        raise NotImplementedError

    @pytest.fixture
    def corrupt(self) -> Callable[[str], None]:
        raise NotImplementedError

    def test_a_listing_names_every_file_with_its_length(self, make: Make) -> None:
        """And the commit, by which the same files are found again."""
        listing = make().listing(None)
        assert {name: file.nbytes for name, file in listing.files.items() if name in FILES} == {
            name: len(data) for name, data in FILES.items()
        }
        assert set(make().listing(listing.commit).files) == set(listing.files)

    def test_what_is_fetched_is_what_is_there(self, make: Make) -> None:
        """Under its names, in one folder, and found in the cache from then on."""
        store = make()
        listing = store.listing(None)
        assert store.cached(listing, "config.json") is None
        folder = store.fetch(listing, FILES)
        assert {name: (folder / name).read_bytes() for name in FILES} == FILES
        assert all(store.cached(listing, name) for name in FILES)
        assert folder.is_relative_to(store.cache_folder)

    def test_offline_what_was_pinned_is_found(self, make: Make) -> None:
        """The revision, its files that were fetched, and no others: a sentence for each that is missing."""
        store, revision = make(), None
        listing = store.pin(revision, ["config.json"])
        store.fetch(listing, ["transformer/config.json"])
        offline = make(offline=True)
        assert offline.offline
        again = offline.pin(revision, ["config.json"])
        assert again.commit == listing.commit
        assert (offline.fetch(again, ["config.json"]) / "config.json").read_bytes() == FILES["config.json"]
        with pytest.raises(HubError) as caught:
            offline.fetch(again, ["transformer/weights.safetensors"])
        assert caught.value.issues == (offline.not_cached(again, "transformer/weights.safetensors"),)

    def test_what_arrives_altered_is_thrown_away(self, make: Make, corrupt: Callable[[str], None]) -> None:
        """An error that names the file; nothing of it stays."""
        corrupt("transformer/weights.safetensors")
        store = make()
        listing = store.listing(None)
        with pytest.raises(HubError, match=r"transformer/weights\.safetensors: arrived altered"):
            store.fetch(listing, ["transformer/weights.safetensors"])
        assert store.cached(listing, "transformer/weights.safetensors") is None

    def test_the_start_of_a_file(self, make: Make) -> None:
        """As many bytes as asked for, the whole file at most, whether or not it is cached; nothing is kept."""
        store, name = make(), "transformer/weights.safetensors"
        listing = store.listing(None)
        assert store.read_start(listing, name, 100) == FILES[name][:100]
        assert store.cached(listing, name) is None
        store.fetch(listing, [name])
        assert store.read_start(listing, name, 1 << 20) == FILES[name]

    def test_a_download_goes_where_it_is_wanted(self, make: Make, tmp_path: Path) -> None:
        """Into the folder given, not into the cache."""
        store, name = make(), "transformer/weights.safetensors"
        listing = store.listing(None)
        path = store.download(listing, name, tmp_path / "here")
        assert hashlib.sha256(path.read_bytes()).digest() == hashlib.sha256(FILES[name]).digest()
        assert path.is_relative_to(tmp_path / "here")
        assert store.cached(listing, name) is None

    def test_what_is_not_there_is_told(self, make: Make) -> None:
        """A revision that does not exist is an error that names it and the store."""
        store: Any = make()
        with pytest.raises(HubError) as caught:
            store.listing("no-such-revision")
        assert store.name in str(caught.value)
        assert "no-such-revision" in str(caught.value)
