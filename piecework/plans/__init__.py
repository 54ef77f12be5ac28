"""The commands `plan` and `suggest`: what a fleet can train of a model, and which systems suit it, computed before training.

How a system cuts a model, and what each part costs, is computed in `piecework.planning`.
"""
