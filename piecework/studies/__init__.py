"""Several runs as one: what is to be run, in which order, what is done of it, and the processes that do the rest.

`runner.py` starts what a plan is missing as ordinary runs and goes on with what was interrupted. The plan is a study of
`piecework run --study` (`study.py`), or the claims of a repository, which have searches and records besides.
"""
