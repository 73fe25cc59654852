"""Random weights, also in peers' formats."""

from halfbyte.bench.linear import LinearWeights
from halfbyte.linear import NvFp4Linear
from halfbyte.linear.w4a16.humming import HummingKernel


class PeerWeights(LinearWeights):
    """As `LinearWeights`, but Humming may split K: its default, which halfbyte's layers disable."""

    def layer(self, backend: str) -> NvFp4Linear:
        """A layer with its weights in a backend's format."""
        with HummingKernel.splitting_k():
            return super().layer(backend)
