"""The command line's groups of commands, its options and consoles, and the shorter commands themselves.

`piecework.cli` puts the groups together; plans and advice, reports, engines and deployments have folders of their own.
"""
