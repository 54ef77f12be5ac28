"""The live page of a folder of runs: their states, and each run's curves and clients, while they go on.

A browser fetches JSON every second or two. Nothing is written, and only the record files of runs that were found are read.
"""
