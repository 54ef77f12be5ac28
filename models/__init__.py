"""Models as cascades of atoms, and what the systems make of them: narrower, low-rank, masked, with exits.

May import device_profiles.
"""
