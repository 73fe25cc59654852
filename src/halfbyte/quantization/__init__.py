"""The pipeline that writes quantized checkpoints: select layers, calibrate, write."""

from halfbyte.quantization.pipeline import QuantizationReport, quantize_checkpoint

__all__ = ["QuantizationReport", "quantize_checkpoint"]
