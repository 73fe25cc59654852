"""Warning about CPU threads on a busy machine."""

import logging
import os

import torch

logger = logging.getLogger("halfbyte")

_VARIABLE = "OMP_WAIT_POLICY"
_SLACK = 0.5
"""Load below this is not a running program."""


def warn_shared_cores(device: torch.device) -> None:
    """Warn if PyTorch's threads and other programs need more cores than there are.

    OpenMP threads spin while they wait for each other: beside a busy program a model then takes
    ten times as long. `OMP_WAIT_POLICY=PASSIVE` avoids that but must be set before OpenMP is
    loaded. The `halfbyte` command sets it.
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
