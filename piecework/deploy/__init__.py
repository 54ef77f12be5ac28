"""Federations of real machines: certificates and keys of nodes, compose files, Flower's SuperLink and SuperNode as run here."""
