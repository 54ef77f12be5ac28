"""The parts of a model that a device can train: how a strategy cuts the model, and each part's bytes, FLOPs and seconds.

This package may import training and the packages that training imports.
"""
