"""Which nodes say that they are which client."""


class Claims:
    """The client that each node claims to be, found both ways: a run may have ten thousand of them."""

    def __init__(self) -> None:
        self._clients: dict[int, int] = {}
        self._nodes: dict[int, set[int]] = {}

    def add(self, node: int, client: int) -> list[int]:
        """Note that a node claims a client; return in order the other nodes that do."""
        self.drop(node)
        self._clients[node] = client
        nodes = self._nodes.setdefault(client, set())
        nodes.add(node)
        return sorted(nodes - {node})

    def drop(self, node: int) -> None:
        """Forget what a node claims, if anything."""
        client = self._clients.pop(node, None)
        if client is not None:
            self._nodes[client].remove(node)

    def keep(self, online: set[int]) -> None:
        """Forget the claims of all other nodes."""
        for node in self._clients.keys() - online:
            self.drop(node)
