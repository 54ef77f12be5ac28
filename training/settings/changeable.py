"""What a resumed run may change of the settings that it started with."""

# Settings that a resumed run may change; all others affect its numbers.
CHANGEABLE = frozenset(
    {
        "num-rounds",
        "output-dir",
        "run-name",
        "resume-from",
        "callbacks",
        "run.track",
        "run.superlink",  # its address; that it had one stays (commands/options.py)
        "engine",
        "workers",
        "messages.max-in-flight",
        "evaluation.every",
        "evaluation.on-clients-every",
        "evaluation.clients",
        "evaluation.autoattack-examples",
        "memory.keep-experiments",
        "faults.allow-untrained",  # it decides whether a run starts, but none of its numbers
    }
)
# Settings that a resumed run may set: they affect the rates of the rounds to come.
EXTENDABLE = frozenset({"training.lr-rounds"})
