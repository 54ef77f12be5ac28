"""Devices: their memory, speed and network, fleets of them, and the one accounting of bytes and time.

Imports none of the other folders.
"""
