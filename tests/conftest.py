"""What holds for every test: no network, and one torch thread in this process and in every process it starts."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # read by huggingface_hub when it is imported
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):  # read by torch when it is imported, which many tests never do
    os.environ[_name] = "1"
