"""Plug-ins for other engines."""
