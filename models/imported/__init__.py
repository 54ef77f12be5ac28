"""Models that are written as an nn.Module, outside this project: found by name (source.py), traced and cut where one tensor
crosses (graph.py, boundaries.py), and built atom by atom from the module's own submodules (atoms.py).
"""
