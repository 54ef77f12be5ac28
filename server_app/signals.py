"""Signals that end a run or must not reach what it started, and processes that end with the one that started them."""

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker

PR_SET_PDEATHSIG = 1  # of Linux's prctl
HANGUP: signal.Signals | None = getattr(signal, "SIGHUP", None)  # Windows has none


def end_on_hangup() -> None:
    """Let SIGHUP, which a terminal sends when it is closed, do what SIGTERM does; under nohup it stays ignored."""
    in_main = threading.current_thread() is threading.main_thread()  # Python sets handlers in no other thread
    if HANGUP is not None and in_main and signal.getsignal(HANGUP) is signal.SIG_DFL:
        signal.signal(HANGUP, lambda *_: signal.raise_signal(signal.SIGTERM))


@contextmanager
def block_signals(*signals: signal.Signals | None) -> Iterator[None]:
    """Block signals in the body: processes that are started there never receive them."""
    known = {each for each in signals if each is not None}
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, known)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def without_interrupts() -> Iterator[None]:
    """Processes started in the body never see Ctrl-C or SIGHUP, which a terminal sends to all, even while they import torch."""
    with block_signals(HANGUP):
        if hasattr(signal, "pthread_sigmask"):
            resource_tracker.ensure_running()  # if multiprocessing started it later, that would unblock Ctrl-C
        with block_signals(signal.SIGINT):
            yield


def end_with_parent() -> None:
    """Have this process, one of multiprocessing's, exit at once when its parent is gone, even in the middle of a step.

    On Linux that holds while it is suspended, too. There it ends with the thread that started it, if that ends earlier.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    if sys.platform == "linux":  # a sandbox may refuse it: then only the thread below watches
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))

    def watch() -> None:
        parent.join()
        os._exit(1)

    # After the call above, so that it also finds a parent that was gone by then.
    threading.Thread(target=watch, daemon=True).start()
