"""Clients of the systems in strategies/low_rank."""
