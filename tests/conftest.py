"""Test-wide settings: one place for threads, since two OpenMP threads on tiny tensors wait for each other."""

import os
import sys
from pathlib import Path

import pytest
import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "scripts")]
torch.set_num_threads(1)

SMOL = "smollm2-135m-q4_1"


@pytest.fixture(scope="session")
def smol():
    """The folder of the small pretrained model; skips where it was not fetched, fails if KVBENCH_REQUIRE_MODELS=1."""
    from kvbench.errors import UsageError
    from kvbench.models import fetch

    try:
        return fetch.located(SMOL)
    except UsageError as error:
        if os.environ.get("KVBENCH_REQUIRE_MODELS") == "1":
            pytest.fail(str(error))
        pytest.skip(str(error))
