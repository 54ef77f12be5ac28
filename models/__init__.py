"""Models as cascades of atoms, and the variants that methods train: narrower, low-rank, masked or with exits.

This package may import device_profiles.
"""
