"""The warning about threads on a busy machine."""

import logging
import os

import pytest
import torch

from halfbyte.engine.threads import warn_shared_cores


@pytest.mark.parametrize(
    ("threads", "load", "policy", "device", "is_said"),
    [
        (4, 2.0, None, "cpu", True),
        (4, 0.3, None, "cpu", False),
        (2, 2.0, None, "cpu", False),
        (1, 9.0, None, "cpu", False),
        (4, 2.0, "PASSIVE", "cpu", False),
        (4, 2.0, None, "meta", False),
    ],
    ids=["busy", "idle", "room", "one thread", "told", "not on a CPU"],
)
def test_a_busy_machine_is_logged_once_with_what_to_do(
    threads: int,
    load: float,
    policy: str | None,
    device: str,
    is_said: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if policy is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", policy)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0), raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)), raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    with caplog.at_level(logging.WARNING, logger="halfbyte"):
        warn_shared_cores(torch.device(device))
    assert len(caplog.messages) == is_said
    if is_said:
        assert (
            "4 threads beside a load of 2.0 on 4 cores: set OMP_WAIT_POLICY=PASSIVE" in caplog.text
        )
