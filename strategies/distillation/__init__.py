"""Systems that combine models of different architectures by distillation on the server: FedDF and FedET."""
