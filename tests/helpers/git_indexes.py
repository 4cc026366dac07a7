"""What git 2.39 wrote as `.git/index` for a folder that holds these names, by digest and version of the index.

A file `vae/config.json`, the links LICENSE and `vae/notes.txt`; in version 3, which git writes for want of an older one
only, also a file that was announced with `git add -N`.
"""

from __future__ import annotations

import base64
from pathlib import Path

TRACKED_LINKS = {"LICENSE", "vae/notes.txt"}
INDEXES = {
    "sha1-2": "RElSQwAAAAIAAAADaw4fHBSCdeRrDh8cFIJ15AAA/gAAIUEtAACgAAAAAAAAAAAAAAAABIL0iPJpZdPQIIDM95aYVKI/DzKxAAdM"
    "SUNFTlNFAAAAaw4fHBSCdeRrDh8cFIJ15AAA/gAAIUErAACBpAAAAAAAAAAAAAAAAlh75rTD+T+TxInAERu6VZYUeibLAA92YWUv"
    "Y29uZmlnLmpzb24AAABrDh8cFIJ15GsOHxwUgnXkAAD+AAAhQSwAAKAAAAAAAAAAAAAAAAAMkRSqug/cOeKeyo/Grp7a7nIkIMMA"
    "DXZhZS9ub3Rlcy50eHQAAAAAABXf/Y4ESurNLNfAm2COZXfRuGsm",
    "sha1-3": "RElSQwAAAAMAAAAEaw4fHBUjZB1rDh8cFSNkHQAA/gAAIUFUAACgAAAAAAAAAAAAAAAABIL0iPJpZdPQIIDM95aYVKI/DzKxAAdM"
    "SUNFTlNFAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAACBpAAAAAAAAAAAAAAAAOad4puy0dZDS4sprnda2MLkjFORQAMgAGl0"
    "YQAAAAAAaw4fHBUjZB1rDh8cFSNkHQAA/gAAIUFSAACBpAAAAAAAAAAAAAAAAlh75rTD+T+TxInAERu6VZYUeibLAA92YWUvY29u"
    "ZmlnLmpzb24AAABrDh8cFSNkHWsOHxwVI2QdAAD+AAAhQVMAAKAAAAAAAAAAAAAAAAAMkRSqug/cOeKeyo/Grp7a7nIkIMMADXZh"
    "ZS9ub3Rlcy50eHQAAAAAADimDRx/L/gksoWcRvmoYUAz39V4",
    "sha1-4": "RElSQwAAAAQAAAADaw4fHBYWXhtrDh8cFhZeGwAA/gAAIUF+AACgAAAAAAAAAAAAAAAABIL0iPJpZdPQIIDM95aYVKI/DzKxAAcA"
    "TElDRU5TRQBrDh8cFgQcHmsOHxwWBBweAAD+AAAhQXwAAIGkAAAAAAAAAAAAAAACWHvmtMP5P5PEicARG7pVlhR6JssADwd2YWUv"
    "Y29uZmlnLmpzb24Aaw4fHBYEHB5rDh8cFgQcHgAA/gAAIUF9AACgAAAAAAAAAAAAAAAADJEUqroP3DninsqPxq6e2u5yJCDDAA0L"
    "bm90ZXMudHh0APSnDisEAiiHn8XREFnUh0fToHDN",
    "sha256-2": "RElSQwAAAAIAAAADaw4fHBbZkSBrDh8cFtmRIAAA/gAAIUGlAACgAAAAAAAAAAAAAAAABLgPIA/Ml0NylRHTXxyNr9QLZY5oSEPH"
    "HIPGr32OJCD6AAdMSUNFTlNFAAAAAAAAAGsOHxwW2ZEgaw4fHBbZkSAAAP4AACFBowAAgaQAAAAAAAAAAAAAAAIU9RYuL+PSQNDT"
    "eqqw+Q5K+afPp5Y587qwBbW/tBdNnwAPdmFlL2NvbmZpZy5qc29uAAAAAAAAAGsOHxwW2ZEgaw4fHBbZkSAAAP4AACFBpAAAoAAA"
    "AAAAAAAAAAAAAAz1NOk7MQdQwfrriIRYsnay1YcXxptCjUtkc/I1GKS+xgANdmFlL25vdGVzLnR4dAAhQv+IwYb0aW2kDtqQlXB4"
    "6VodsrZA2/lyJBXteA6/Aw==",
    "sha256-4": "RElSQwAAAAQAAAADaw4fHBeR6tprDh8cF5Hq2gAA/gAAIUHMAACgAAAAAAAAAAAAAAAABLgPIA/Ml0NylRHTXxyNr9QLZY5oSEPH"
    "HIPGr32OJCD6AAcATElDRU5TRQBrDh8cF5Hq2msOHxwXkeraAAD+AAAhQcoAAIGkAAAAAAAAAAAAAAACFPUWLi/j0kDQ03qqsPkO"
    "Svmnz6eWOfO6sAW1v7QXTZ8ADwd2YWUvY29uZmlnLmpzb24Aaw4fHBeR6tprDh8cF5Hq2gAA/gAAIUHLAACgAAAAAAAAAAAAAAAA"
    "DPU06TsxB1DB+uuIhFiydrLVhxfGm0KNS2Rz8jUYpL7GAA0Lbm90ZXMudHh0ALvMocVfR0wVW98BQaDvCTVoh1sP8wxMSrN1EHqK"
    "de6w",
}


def make_clone(root: Path, kind: str = "sha1-2") -> None:
    """Give `root` the `.git` of a clone that brought `TRACKED_LINKS`."""
    (root / ".git").mkdir()
    (root / ".git" / "index").write_bytes(base64.b64decode(INDEXES[kind]))
    if kind.startswith("sha256"):
        (root / ".git" / "config").write_text("[extensions]\n\tobjectformat = sha256\n")
