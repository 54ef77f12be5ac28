"""Clients of the systems in strategies/whole."""
