"""Settings of the process that a method's code changes are put back behind it."""

import os

import pytest
import torch

from kvbench.methods.core.walls import contained

SETTINGS = {
    "dtype": (torch.get_default_dtype, lambda: torch.set_default_dtype(torch.float64)),
    "threads": (torch.get_num_threads, lambda: torch.set_num_threads(3)),
    "gradients": (torch.is_grad_enabled, lambda: torch.set_grad_enabled(not torch.is_grad_enabled())),
    "determinism": (
        torch.are_deterministic_algorithms_enabled,
        lambda: torch.use_deterministic_algorithms(not torch.are_deterministic_algorithms_enabled()),
    ),
    "products": (torch.get_float32_matmul_precision, lambda: torch.set_float32_matmul_precision("medium")),
    "autocast": (
        lambda: torch.is_autocast_enabled("cpu"),
        lambda: torch.set_autocast_enabled("cpu", not torch.is_autocast_enabled("cpu")),
    ),
    "folder": (os.getcwd, lambda: os.chdir(os.sep)),
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("fails", [False, True])
def test_a_setting_of_the_process_is_put_back(name, fails):
    read, change = SETTINGS[name]
    before = read()
    try:
        with contained("mine", foreign=True, seed=0):
            change()
            assert read() != before
            if fails:
                raise ArithmeticError("in the middle")
    except ArithmeticError:
        assert fails
    assert read() == before
