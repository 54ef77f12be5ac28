"""The client: it turns a message into an update. Its store is on disk, and trainers.py says where each method's trainer is.

This package may import training and the layers below it, so that a board never loads code of the server.
"""
