"""Clients of the systems in strategies/width."""
