"""What holds for every test: no network, and one torch thread in this process and in every process it starts.

Imports leave a million objects that live to the end: the garbage collector is kept from walking through them again and
again.

Tests of the Hub take the fixtures `hub`, a stand-in on this machine, and `client`, which makes this process its client.
"""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"  # read by huggingface_hub when it is imported
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):  # read by torch when it is imported, which many tests never do
    os.environ[_name] = "1"
gc.disable()
# What large tensors take for a moment goes back to the system (M_MMAP_THRESHOLD): between small things that stay, the
# heap would grow to more than the machine's memory, and then no process could be forked. Of what is small enough some
# stays (M_TRIM_THRESHOLD), or the system would give the same pages again and again.
ctypes.CDLL(None).mallopt(-3, 16 << 20)
ctypes.CDLL(None).mallopt(-1, 256 << 20)


def pytest_collection_finish() -> None:
    """All is imported: from here on only what tests make is garbage to look for."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True, scope="module")
def _no_leftovers(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a module of tests keeps from one test to the next goes with it: gigabytes of small models would make every
    later fork slow."""
    yield
    own = [each for each in vars(request.module).values() if getattr(each, "__module__", "") == request.module.__name__]
    kept = [each for each in own if hasattr(each, "cache_clear")]
    for each in kept:
        each.cache_clear()
    if kept:
        gc.collect()


@pytest.fixture
def hub() -> Iterator[object]:
    """A `StandInHub`, empty."""
    import stand_in_hub

    with stand_in_hub.serving() as server:
        yield server


@pytest.fixture
def client(hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """This process asks `hub`, as alice, who may write to org; the value are the settings. Nothing waits."""
    import hub_clients
    import huggingface_hub.constants
    import huggingface_hub.utils

    settings = hub.settings(tmp_path / "home")
    for name, value in hub_clients.constants(settings).items():
        monkeypatch.setattr(huggingface_hub.constants, name, value)
    monkeypatch.setenv("HF_TOKEN", settings["HF_TOKEN"])
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    monkeypatch.setenv("SSL_CERT_DIR", str(tmp_path))  # no certificates: each client would load some hundred, for http
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    huggingface_hub.utils.disable_progress_bars()
    huggingface_hub.utils.logging.set_verbosity_error()
    yield settings
    huggingface_hub.close_session()
