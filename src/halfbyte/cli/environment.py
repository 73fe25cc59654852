"""The user's environment variables, before halfbyte and libraries change them."""

import os

_users: dict[str, str] = {}


def remember_users_environment() -> None:
    """Save the current variables; must be called first."""
    _users.clear()
    _users.update(os.environ)


def users_environment() -> dict[str, str]:
    """The saved variables, for a program that replaces this process."""
    return dict(_users or os.environ)
