"""What a device can train: how a system cuts a model, and what each part costs in bytes, FLOPs and seconds.

May import training and what is below it.
"""
