"""GPUs as `linear_machine.machine_of` answered on them, for plans that are made without one."""

from halfbyte.kernels.linear_plan import Machine

# Clusters of 4 and 8 depend on how a chip's multiprocessors lie in its GPCs: this is the H200 that
# the committed measurements come from.
H200 = Machine(90, 232448, (132, 66, 30, 15))
RTX_3090 = Machine(86, 101376, (82, 41, 20, 10))
