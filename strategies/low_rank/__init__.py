"""Systems whose clients train models of lower rank: PriSM, and OrthDrop."""
