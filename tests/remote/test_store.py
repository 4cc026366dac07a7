"""The Hub is a store: it keeps what every store promises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from stand_in_hub import StandInHub
from store_contract import FILES, Make, StoreContract

from shardconv.remote.choose import is_store_name, store_named
from shardconv.remote.store import Store

REPO = "org/model"


class TestHub(StoreContract):
    """A repo of the Hub."""

    @pytest.fixture
    def make(self, hub: StandInHub, client: Any) -> Make:
        hub.add_repo(REPO, FILES)
        return lambda offline=False: store_named(REPO, local_files_only=offline)

    @pytest.fixture
    def corrupt(self, hub: StandInHub, make: Make) -> Callable[[str], None]:
        return lambda name: hub.fail("GET", name, edit=lambda data: data[:-9] + b"?" + data[-8:])


@pytest.mark.parametrize(("text", "is_one"), [("org/name", True), ("./name", False), ("a/b/c", False), ("name", False)])
def test_which_texts_name_a_store(text: str, is_one: bool) -> None:
    """Owner and name, as on the Hub."""
    assert is_store_name(text) is is_one


def test_the_protocol_is_what_the_contract_is_about() -> None:
    """Every promise of the contract uses the protocol alone."""
    assert {name for name in vars(Store) if not name.startswith("_")} <= set(dir(store_named("org/name")))
