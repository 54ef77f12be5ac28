"""Models as cascades of atoms, and the variants that methods train: narrower, low-rank, masked or with exits.

The words for portions of a model:

    atom       the smallest portion that is held at once; a cascade is a sequence of atoms with a head
    unit       what has arrays of its own and is sent as one: an atom, the head, or an auxiliary head
    piece      atoms that are built and run together on a client, with a head or without one
    part       a piece as planning sees it, with its loss, its step and their costs
    item       a work item: what a client is asked to train, named in messages
    block      FeDepth's, ProFL's and DepthFL's consecutive atoms
    module     FedProphet's block, with its auxiliary head
    stage      a phase of a run that always trains the same parts

This package may import device_profiles.
"""
