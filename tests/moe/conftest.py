import pytest

from halfbyte.checkpoints import DIALECTS, Dialect


@pytest.fixture(params=DIALECTS)
def dialect(request: pytest.FixtureRequest) -> Dialect:
    """Of a checkpoint's files."""
    return request.param
