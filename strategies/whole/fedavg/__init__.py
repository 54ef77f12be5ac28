"""FedAvg."""
