"""Clients of a stand-in Hub: this process, ranks and command lines."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any


def command(settings: Mapping[str, str], *argv: object, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "shardconv", *map(str, argv)],
        env=environment(settings),
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )


def environment(settings: Mapping[str, str]) -> dict[str, str]:
    """That of a client process, which has certificates as any other."""
    ours = {key: value for key, value in os.environ.items() if not key.startswith("HF_") and key != "SSL_CERT_DIR"}
    return ours | dict(settings)


def constants(settings: Mapping[str, str]) -> dict[str, Any]:
    """What huggingface_hub has read from `settings` when it is imported under them."""
    home = settings["HF_HOME"]
    return {
        "ENDPOINT": settings["HF_ENDPOINT"],
        "HUGGINGFACE_CO_URL_TEMPLATE": settings["HF_ENDPOINT"] + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_OFFLINE": settings["HF_HUB_OFFLINE"] == "1",
        "HF_HUB_CACHE": f"{home}/hub",
        "HF_TOKEN_PATH": f"{home}/token",
        "HF_HUB_DISABLE_XET": True,
        "HF_HUB_DISABLE_TELEMETRY": True,
        "HF_HUB_DISABLE_PROGRESS_BARS": True,
        "HF_HUB_DOWNLOAD_TIMEOUT": 5,
        "HF_HUB_ETAG_TIMEOUT": 5,
    }


def point_at(settings: Mapping[str, str]) -> None:
    """Make this process a client of the stand-in, for the rest of its life: for ranks, which are forked."""
    import huggingface_hub.constants

    for name, value in constants(settings).items():
        assert hasattr(huggingface_hub.constants, name), name
        setattr(huggingface_hub.constants, name, value)
    os.environ.pop("HF_TOKEN", None)
    if "HF_TOKEN" in settings:
        os.environ["HF_TOKEN"] = settings["HF_TOKEN"]
