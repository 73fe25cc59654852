"""From logits to tokens."""

import math
from collections.abc import Sequence

import torch

from halfbyte.engine.request import Request

_LEAST_TEMPERATURE = torch.finfo(torch.float32).tiny
"""Below, float32 has none."""


class NoTokenError(ValueError):
    """Logits from which no token follows."""


SavedGenerators = list[tuple[torch.Generator, torch.Tensor]]
"""Generators, each with the state that it had."""


class Sampler:
    """Samples each request on its own, with its own generator, so that a seeded request gets the
    same tokens whatever else is in the batch and whenever it was preempted."""

    def __init__(self) -> None:
        self._generators: dict[int, torch.Generator] = {}

    def sample(self, request: Request, logits: torch.Tensor) -> int:
        """The next token id of a request.

        Args:
            request: whose parameters apply.
            logits: `[vocabulary]`.

        Raises:
            NoTokenError: NaN among them, or a largest one that is infinite.
        """
        params = request.params
        if params.temperature == 0:
            likeliest = logits.argmax()
            # In one transfer; NaN counts as the largest.
            token, largest = torch.stack((likeliest.double(), logits[likeliest].double())).tolist()
            _check(largest)
            return int(token)
        _check(float(logits.max()))
        probabilities = _probabilities(
            # The largest becomes 0 and stays it, so that no temperature, however small, makes NaN.
            (logits - logits.max()).float().cpu() / max(params.temperature, _LEAST_TEMPERATURE),
            params.top_k,
            params.top_p,
        )
        return int(torch.multinomial(probabilities, 1, generator=self._generator(request)))

    def save(self, requests: Sequence[Request]) -> SavedGenerators:
        """The states of the generators that these requests will draw from."""
        drawing = [request for request in requests if request.params.temperature > 0]
        generators = [self._generator(request) for request in drawing]
        return [(generator, generator.get_state()) for generator in generators]

    def restore(self, saved: SavedGenerators) -> None:
        """Give generators back the states that `save` returned: what was drawn since is undone."""
        for generator, state in saved:
            generator.set_state(state)

    def forget(self, request: Request) -> None:
        """Drop what is kept for a finished request."""
        self._generators.pop(request.id, None)

    def _generator(self, request: Request) -> torch.Generator:
        if request.id not in self._generators:
            generator = torch.Generator()
            if request.params.seed is None:
                generator.seed()
            else:
                generator.manual_seed(request.params.seed)
            self._generators[request.id] = generator
        return self._generators[request.id]


def _check(largest: float) -> None:
    if not math.isfinite(largest):
        raise NoTokenError(f"the model's logits have {largest} for their largest")


def _probabilities(logits: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    if 0 < top_k < logits.numel():
        threshold = logits.topk(top_k).values[-1]
        logits = logits.masked_fill(logits < threshold, -torch.inf)
    probabilities = logits.softmax(dim=-1)
    if top_p < 1:
        ordered, order = probabilities.sort(descending=True)
        # A token stays while those before it have not reached top_p; the first always stays.
        dropped = ordered.cumsum(0) - ordered >= top_p
        probabilities = probabilities.index_fill(0, order[dropped], 0.0)
    return probabilities
