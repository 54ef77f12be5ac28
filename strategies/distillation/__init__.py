"""Systems that bring models of different kinds together by distillation on the server: FedDF and FedET."""
