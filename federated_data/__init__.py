"""Data sets, their conversion and their partition among clients.

This package imports only `did_you_mean` of device_profiles.
"""
