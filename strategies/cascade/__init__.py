"""Strategies that train a model block by block: FedProphet, FeDepth, ProFL, SLT and DepthFL."""
