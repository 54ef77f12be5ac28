"""FedET: what the server does is in server.py; its clients train as FedDF's do."""
