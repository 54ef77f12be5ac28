KINDS: dict = {}


class Reader: ...
