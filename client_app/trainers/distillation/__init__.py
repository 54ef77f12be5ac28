"""Clients of the systems in strategies/distillation."""
