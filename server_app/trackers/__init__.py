"""Trackers of experiments: what `run.track` names. Each imports its library when it is made, and only then.

They are callbacks that the server tells of a run, and send on what rounds.jsonl has of each round.
"""
