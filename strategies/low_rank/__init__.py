"""Strategies whose clients train low-rank sub-models: PriSM and OrthDrop."""
