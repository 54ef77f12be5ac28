"""A `flower-superexec` whose tasks start at once, for SuperNodes of this machine: `piecework-executor --runtime-api-address A`.

Flower starts a Python for each message, which imports torch and Flower before it does anything. Here a process imports them
once, and forks a child for each task, which runs Flower's own `flwr-clientapp`. A task thus still has a process of its own: the
kernel accounts its memory, and may kill it alone, which the SuperNode is told at once. The pages of what was imported are
shared. The options are those of `flower-superexec`; an address may be given several times, once for each SuperNode.

The first process forks a `flower-superexec` for each SuperNode, which asks for tasks, and whose executor tells what to start.
The process that forks tasks is itself forked, and imports torch, when the first is asked for; it ends when there was none for
`--idle-seconds`. Neither imports Flower's other commands, so that an idle board holds less than with Flower's own.

A process that has a CUDA context, or threads that hold locks, cannot be forked safely. Those that fork only import, and wait:
their only threads are idle ones of numpy's BLAS library, which ends them at a fork and starts new ones in the child. The app
itself is not imported there: each task imports it from the bundle that its run brings, so that a new version needs no new
process. Only Linux is supported, where a child ends with its parent.
"""
