"""Who takes part and what they exchange: registry, dispatch, weight cache, faults, aggregation, evaluation.

May import planning, training and what is below them, and of client_app how a client names what it keeps.
"""
