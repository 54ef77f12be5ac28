"""The server: the round loop, the records of a run, and its recovery after a crash.

This package may import everything but the command line.
"""
