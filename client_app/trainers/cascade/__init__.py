"""Clients of the systems in strategies/cascade."""
