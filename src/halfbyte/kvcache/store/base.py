"""The interface of store backends."""

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Container
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch

from halfbyte.dispatch import Answer
from halfbyte.kvcache.recent import RingSlots
from halfbyte.kvcache.transform import KVTransform
from halfbyte.layouts import KVCacheDType, PageLayout

Scale = float | torch.Tensor
"""A global scale: a float, or a float32 tensor of one element."""
_INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class StoreConfig:
    """Metadata of the call, by which backends decide whether they support it."""

    layout: PageLayout
    key_dtype: torch.dtype
    value_dtype: torch.dtype
    device_type: str
    transform: bool = False
    """Whether K is changed before it is packed (`KVTransform`)."""
    weighs_errors: bool = False
    """Whether K and V are rounded by weighted error (`numerics.weighted_rounding`)."""

    def answer_of(self, device_type: str, formats: Container[KVCacheDType]) -> Answer:
        """`can_implement` of a kernel for one device type and inputs of 16-bit or 32-bit floats.

        Args:
            device_type: of the kernel.
            formats: cache dtypes that it writes.
        """
        if self.device_type != device_type:
            return False, f"tensors are on {self.device_type}, not on {device_type}"
        for name, dtype in (("key", self.key_dtype), ("value", self.value_dtype)):
            if dtype not in _INPUT_DTYPES:
                return False, f"takes {name} in bfloat16, float16 or float32, not {dtype}"
        reason = self.layout.unknown_format(formats)
        return reason is None, reason or "writes the formats of K and V"


class StoreInputs(NamedTuple):
    """Validated arguments of `reshape_and_cache`; see there for the fields."""

    key: torch.Tensor
    value: torch.Tensor
    pages: torch.Tensor
    slot_mapping: torch.Tensor
    layout: PageLayout
    k_scale: Scale
    v_scale: Scale
    transform: KVTransform | None = None
    positions: torch.Tensor | None = None
    recent: RingSlots | None = None

    def config(self) -> StoreConfig:
        """Metadata of the call, by which backends decide whether they support it."""
        return StoreConfig(
            layout=self.layout,
            key_dtype=self.key.dtype,
            value_dtype=self.value.dtype,
            device_type=self.pages.device.type,
            transform=self.transform is not None,
            weighs_errors=self.transform is not None and self.transform.weighs_errors,
        )


class StoreBackend(ABC):
    """A backend that encodes K and V and writes them to slots. Stateless; never instantiated."""

    name: ClassVar[str]

    @classmethod
    @abstractmethod
    def is_supported(cls, compute_capability: int | None = None) -> Answer:
        """Whether it runs on a machine; None means this one."""

    @classmethod
    @abstractmethod
    def can_implement(cls, config: StoreConfig) -> Answer:
        """Whether it can do the work."""

    @classmethod
    @abstractmethod
    def store(cls, inputs: StoreInputs) -> None:
        """Quantize and write tokens, whose tensors are all on one device.

        The bytes are those of `ReferenceStore`, except for the payload of a NaN stored as a float.
        """


def global_scale_on(
    device: torch.device, name: str, scale: Scale, dtype: KVCacheDType
) -> float | torch.Tensor:
    """A global scale as an argument of GPU kernels: a float, or a tensor on the device.

    Raises:
        ValueError: `KVCacheDType.check_scale` refuses it.
    """
    checked = dtype.check_scale(scale, name)
    if not isinstance(checked, torch.Tensor):
        return checked
    if checked.device == device or checked.device.type != "cpu":
        return checked.to(device, torch.float32)
    return ctypes.c_float(float(checked)).value


def check_slots(inputs: StoreInputs) -> None:
    """Raise ValueError for a slot past the last page; syncs the device."""
    slot_mapping = inputs.slot_mapping
    capacity = inputs.pages.shape[0] * inputs.layout.block_size
    if slot_mapping.numel() and int(slot_mapping.max()) >= capacity:
        raise ValueError(
            f"slot_mapping: slot {int(slot_mapping.max())} is past the last, {capacity - 1}"
        )


def check_positions(
    positions: torch.Tensor | None, slots: torch.Tensor, transform: KVTransform
) -> None:
    """Raise ValueError for positions that a transform cannot use; values are not read on a GPU."""
    if positions is None:
        raise ValueError("positions: a recipe other than plain needs them")
    if positions.dtype != torch.int64 or positions.shape != slots.shape:
        raise ValueError(
            f"positions: expected int64 {tuple(slots.shape)}, got {positions.dtype} "
            f"{tuple(positions.shape)}"
        )
    if positions.device != slots.device:
        raise ValueError(f"positions: are on {positions.device}, slots are on {slots.device}")
    limit = transform.max_position
    if limit is not None and positions.device.type == "cpu":
        real = positions[slots >= 0]
        if real.numel() and not 0 <= int(real.min()) <= int(real.max()) < limit:
            raise ValueError(
                f"positions: expected 0 up to {limit - 1}, for which the calibration has means; "
                f"got {int(real.min())} up to {int(real.max())}"
            )
