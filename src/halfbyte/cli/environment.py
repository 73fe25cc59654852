"""The user's environment variables, as they were before halfbyte and libraries added theirs."""

import os

_users: dict[str, str] = {}


def remember_users_environment() -> None:
    """Keep the variables as they are now; called first of all."""
    _users.clear()
    _users.update(os.environ)


def users_environment() -> dict[str, str]:
    """The variables that were kept, for a program that takes this one's place."""
    return dict(_users or os.environ)
