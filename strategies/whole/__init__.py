"""Systems whose clients train the whole model: FedAvg, CoCoFL, ExclusiveFL, jFAT and FedRBN."""
