"""The server's exchange with clients: registry, dispatch, weight cache, faults, aggregation, evaluation.

This package may import planning, training and the packages that these import. From client_app it imports only the content
hashes by which clients store frozen units.
"""
