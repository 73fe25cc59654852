"""Random weights in peers' forms, too."""

from halfbyte.bench.weights import Weights
from halfbyte.linear import NvFp4Linear
from halfbyte.linear.w4a16.humming import HummingKernel


class PeerWeights(Weights):
    """As `Weights`; Humming may split K, as it does by itself, but not in a layer of ours."""

    def layer(self, backend: str) -> NvFp4Linear:
        """A layer whose weights are in a backend's form."""
        with HummingKernel.splitting_k():
            return super().layer(backend)
