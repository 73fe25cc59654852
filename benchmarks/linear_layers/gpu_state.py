"""Driver and clocks of a GPU."""

import subprocess

import torch


def gpu_state(device: torch.device) -> dict[str, str] | None:
    """Current driver, clocks (MHz), power (W) and temperature (C) of a GPU, from `nvidia-smi`."""
    if device.type != "cuda":
        return None
    names = {
        "driver": "driver_version",
        "sm_mhz": "clocks.sm",
        "max_sm_mhz": "clocks.max.sm",
        "memory_mhz": "clocks.mem",
        "watts": "power.draw",
        "celsius": "temperature.gpu",
    }
    # By UUID: indices differ if CUDA_VISIBLE_DEVICES is set.
    gpu = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    command = ["nvidia-smi", f"--id={gpu}", f"--query-gpu={','.join(names.values())}"]
    try:
        answer = subprocess.run(
            [*command, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    values = [value.strip() for value in answer.strip().split(",")]
    return dict(zip(names, values, strict=True)) if len(values) == len(names) else None
