"""Strategies whose clients train masks: SpaFL with Local, and FedPM."""
