"""Systems whose clients train the whole model: FedAvg, ExclusiveFL, jFAT and FedRBN."""
