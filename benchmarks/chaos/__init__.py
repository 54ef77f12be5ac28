"""Runs that are killed, disks that are full, clocks that jump and files that are damaged: what becomes of the runs."""
