"""The three engines: a run in this process, on Flower's Ray simulation, or as real processes of Flower.

`launch` starts and follows a run; `processes` keeps Flower's processes, which `guardian` ends if the launcher is gone.
"""
