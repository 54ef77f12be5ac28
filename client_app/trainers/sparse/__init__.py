"""Clients of the systems in strategies/sparse."""
