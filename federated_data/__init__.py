"""Data sets, their conversion and their partition among clients.

This package imports none of the other folders.
"""
