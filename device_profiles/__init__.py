"""Devices: their memory, speed and network, fleets of devices, and the accounting of bytes and time.

This package imports none of the other folders.
"""
