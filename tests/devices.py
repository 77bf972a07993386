"""Devices that a test runs on: the CPU, and a GPU where there is one."""

import pytest
import torch

DEVICES = ["cpu", *([pytest.param("cuda", marks=pytest.mark.gpu)] if torch.cuda.is_available() else [])]
