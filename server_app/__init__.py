"""The server: the round loop, the records of a run, and how it goes on after a crash.

May import everything but the command line.
"""
