"""Results of `machine_of` on real GPUs, for tests of plans without a GPU."""

from halfbyte.linear.w4a16.gemv.plan import Machine

H200 = Machine(90, 232448, 132, 66)
RTX_3090 = Machine(86, 101376, 82, 0)
