"""Threads on a machine that other programs use as well."""

import logging
import os

import torch

logger = logging.getLogger("halfbyte")

_VARIABLE = "OMP_WAIT_POLICY"
_SLACK = 0.5
"""Of a core: below, nothing that lasts is running."""


def say_how_to_share_cores(device: torch.device) -> None:
    """Warn where threads of PyTorch would wait for cores that other programs have.

    They spin while they wait for one another, unless OpenMP was told otherwise before it was
    loaded, which is for the user to do: with a busy program beside it a model then takes ten times
    as long. The `halfbyte` command does it by itself.
    """
    if device.type != "cpu" or _VARIABLE in os.environ or not hasattr(os, "getloadavg"):
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads, load = torch.get_num_threads(), os.getloadavg()[0]
    if threads > 1 and cores and threads + load > cores + _SLACK:
        logger.warning(
            "%d threads beside a load of %.1f on %d cores: set %s=PASSIVE before Python starts, or "
            "fewer threads with torch.set_num_threads",
            *(threads, load, cores, _VARIABLE),
        )
