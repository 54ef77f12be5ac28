"""CoCoFL: what the server and the clients do is in server.py and client.py."""
