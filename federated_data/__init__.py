"""Data sets, their conversion and their partition among clients.

Imports none of the other folders.
"""
