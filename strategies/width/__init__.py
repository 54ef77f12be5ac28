"""Systems whose clients train narrower models: HeteroFL, FedRolex, FedDrop, FjORD, SplitMix, OrigDrop, AllSmall."""
