"""Results of `gpu_of` on real GPUs, for tests of plans without a GPU."""

from halfbyte.linear.w4a16.gemv.plan import Gpu

H200 = Gpu(90, 232448, 132, 66)
RTX_3090 = Gpu(86, 101376, 82, 0)
