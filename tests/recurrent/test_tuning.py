"""Tuning of Triton's kernels before a step never ends the step."""

import logging

import pytest
import torch

from hf_burst.recurrent.tuning import tuning


def test_a_gpu_without_room_tunes_later(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "hf_burst"), tuning("some kernels"):
        raise torch.OutOfMemoryError("CUDA out of memory.")
    assert "some kernels are tuned within the step, since the GPU has no room" in caplog.text


def test_other_errors_are_told() -> None:
    with pytest.raises(RuntimeError, match="a kernel"), tuning("some kernels"):
        raise RuntimeError("a kernel failed")
