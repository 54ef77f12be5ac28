"""The engine `ray`: a grid of our own on Ray's scheduler, over one machine or many.

`grid.py` is what the round loop talks to. `book.py` says which client trains where, `worker.py` is what trains there,
`waiting.py` has what waits, `shared_arrays.py` sends arrays once a node, `homes.py` says where clients' states lie, `keeper.py`
and `packed.py` move them, `travel.py` brings the data set, and `start.py` starts Ray or joins a cluster.
"""
